"""The demo measures a plan again only on a machine that has changed, and with a new profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import demo
from xgpt.core.schema import BenchReport, Comparison


def run(pace: float | None, *, outside: bool, differences: str | None = None) -> BenchReport:
    """A measurement at a pace, of a plan that allows 12% longer steps."""
    throughput = Comparison(metric="throughput_rps", predicted=2, measured=3 if outside else 2, low=1.9, high=2.1)
    return BenchReport(
        plan_sha256="0", policy="chunked", workload="summarization", arrival_rate_per_s=2, num_requests=120,
        num_failed=0, window_s=60, figures=(throughput,), pace=pace, headroom=0.12, differences=differences,
        latency_bound_s=9.8, bound_kept=True, share_within_bound=1, end_to_end_p99_s=8,
    )  # fmt: skip


CALM = run(1.04, outside=False)
AGAIN = ["plan", "bench", "profile", "plan", "bench"]


@pytest.mark.parametrize(
    ("reports", "steps", "says"),
    [
        ([CALM], ["plan", "bench"], ""),
        ([run(1.04, outside=True)], ["plan", "bench"], ""),
        ([run(1.11, outside=False)], ["plan", "bench"], ""),
        ([run(1.13, outside=False), CALM], AGAIN, "so it is profiled again"),
        ([run(1.11, outside=True), CALM], AGAIN, "so it is profiled again"),
        ([run(0.88, outside=True), CALM], AGAIN, "so it is profiled again"),
        ([run(1.04, outside=True, differences="the clock"), CALM], AGAIN, "so it is profiled again"),
        ([run(None, outside=True, differences="the clock"), CALM], AGAIN, "so it is profiled again"),
        ([run(1.2, outside=True)] * 2, AGAIN, "has changed again"),
    ],
)
def test_a_changed_machine_gets_a_new_profile_and_a_new_plan(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reports: list[BenchReport],
    steps: list[str],
    says: str,
) -> None:
    done: list[str] = []
    runs = iter(reports)

    def measure(path: str) -> BenchReport:
        done.append("bench")
        return next(runs)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "xgpt", lambda command: done.append(command[0]))
    monkeypatch.setattr(demo, "measure", measure)
    demo.main()
    assert done == steps
    assert says in capsys.readouterr().out
