"""The report of a plan: self-contained, escaped, and clean in a browser."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.browser import CHROMIUM
from tests.contract.scenarios import problem
from tests.rings import few
from xgpt import api
from xgpt.cli.render import plans_table
from xgpt.core.schema import Capacity, ChunkedSettings, Constraint, Histogram, Plan
from xgpt.reporting.plan_text import schedule_in_words
from xgpt.resolve import load_engine
from xscheduler.objectives.best_plans import plan_each
from xscheduler.placement import Placement
from xscheduler.schedule import NOT_SEARCHED, Scheduler
from xscheduler.space import POLICIES
from xsimulator.run import simulate

HOSTILE = "</style><script>alert(1)</script>'\"&$x^2$"


def a_plan(kind: str, latency_bound_s: float | None = 4.0) -> Plan:
    return Scheduler(problem("llama-3.1-8b", "h200x1", "orca", latency_bound_s)).best((kind,))


def page_of(plan: Plan) -> str:
    from xgpt.reporting.report import report

    return report(plan, problem("llama-3.1-8b", "h200x1", "orca").profile, np.random.default_rng(0))


def test_a_pipelines_step_has_its_share_of_the_token_budget() -> None:
    """A report said 1216 tokens beside --max-num-batched-tokens 608."""
    plan: Any = SimpleNamespace(engine=None, replicas=2)
    plan.policy = ChunkedSettings(token_budget=1216, max_batch=234, microbatches=2)
    assert "a total of 608; at most 234 requests at once in each replica" in schedule_in_words(plan)


def test_a_longest_length_that_was_shortened_is_not_the_longest_requests() -> None:
    """The page named 28768 tokens of a log whose longest input has 30000."""
    from xgpt.reporting.report import _histogram

    lengths = Histogram(lengths=(10, 60), probabilities=(0.5, 0.5))
    workload = SimpleNamespace(output=Histogram(lengths=(4, 40), probabilities=(0.5, 0.5)))
    for context, said in ((100, "the longest counts as 60, so that"), (101, "the longest request has 60.")):
        plan: Any = SimpleNamespace(workload=workload, model=SimpleNamespace(max_context=context))
        assert said in _histogram(lengths, "input tokens", plan).caption


@pytest.fixture(scope="module")
def hostile_page() -> str:
    plan = a_plan("chunked")
    named = {
        "model": plan.model.model_copy(update={"name": HOSTILE}),
        "cluster": plan.cluster.model_copy(update={"name": HOSTILE, "price_per_device_hour": 2.5}),
        "workload": plan.workload.model_copy(update={"name": HOSTILE}),
        "estimate": plan.estimate.model_copy(update={"warnings": (HOSTILE,), "cost_per_million_tokens": 0.5}),
        "search": plan.search.model_copy(update={"bound": HOSTILE}),
    }
    return page_of(plan.model_copy(update=named))


@pytest.mark.parametrize("kind", few(kind for kind in POLICIES if kind != "waa"))
def test_the_report_says_what_the_plan_says(kind: str) -> None:
    plan = a_plan(kind)
    page = page_of(plan)
    e = plan.estimate
    for said in (plan.model.name, plan.search.bound, plan.profile.sha256, f"{e.latency_s:.3f}", "bound 4 s"):
        assert said in page
    assert page.count("data:image/svg+xml;base64,") == 5
    assert page == page_of(plan), "same plan, same page"


@pytest.mark.long
def test_a_bound_on_all_requests_stands_beside_what_all_simulated_ones_took() -> None:
    from xgpt.reporting.report import NUM_REQUESTS

    plan = a_plan("rra")
    plan = plan.model_copy(update={"constraint": plan.constraint.model_copy(update={"sla": "request"})})
    profile = problem("llama-3.1-8b", "h200x1", "orca").profile
    measured, _ = simulate(plan, profile, plan.workload, NUM_REQUESTS, np.random.default_rng(0))
    shown = re.search(r"latency at p99, s</td><td>[\d.]+</td><td>.*?</td><td>([\d.]+)</td>", page_of(plan))
    assert shown is not None and shown[1] == f"{measured.request_latency_s:.3f}" != f"{measured.latency_s:.3f}"


def test_no_latency_is_shown_at_a_rate_that_does_not_keep_the_bounds() -> None:
    plan = a_plan("static")
    none = Capacity(rate_per_s=0, whole_s=0, share_kept=0, num_requests=2000, warm_up_requests=32, seed=0)
    plan = plan.with_estimate(capacity=none).proven(plan.ceiling)
    assert "from arrival</th>" not in page_of(plan)
    shown = plans_table({"static": plan})
    row = dict(zip(shown.columns, shown.rows[0], strict=True))
    assert (row["arrivals/s"], row.get("whole s", "-")) == ("0.000", "-")


def test_the_page_of_what_runs_now_names_its_file_and_shows_bounds_that_it_never_keeps() -> None:
    """It named plan.json, another plan's file, and bounds that a plan keeps at no rate ended a report."""
    from xgpt.reporting.report import report

    asked = problem("llama-3.1-8b", "h200x1", "orca").under(Constraint(objective="arrivals", ttft_s=1e-3))
    plan = Scheduler(asked).score(ChunkedSettings(token_budget=512, max_batch=8), Placement.of(a_plan("chunked")))
    page = report(plan.proven(NOT_SEARCHED), asked.profile, np.random.default_rng(0), "current.json")
    assert "plan.json" not in page and "current.json" in page and page.count("data:image/svg+xml") == 5


def test_a_report_on_arrivals_shows_the_latency_under_the_bound_and_the_command() -> None:
    plan = a_plan("chunked")
    kept = Capacity(rate_per_s=3.5, whole_s=3.9, share_kept=0.99, num_requests=2000, warm_up_requests=32, seed=0)
    constraint = plan.constraint.model_copy(update={"sla": "request", "objective": "arrivals"})
    page = page_of(plan.but(constraint=constraint).with_estimate(capacity=kept).proven(plan.ceiling))
    cards = re.findall(r'<div class="value">(.*?)</div><div class="label">(.*?)</div>', page)
    assert cards[0] == ("3.5", "requests/s within the bounds, at most")
    assert cards[1][1].startswith("latency, p99 at that rate; bound 4 s, margin ")
    assert "Your bounds at each load" in page and "saturated" not in {label for _, label in cards}
    assert "<code><span>vllm</span> <span>serve</span> <span>meta-llama/Llama-3.1-8B-Instruct</span>" in page


@pytest.mark.long
def test_curves_are_of_the_devices_and_the_draft_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for 4 of 8 devices stood below the curves of 8, and one with a draft below those of rra."""
    from xgpt.pages import charts
    from xgpt.reporting.report import _frontier

    shown: list[list[charts.Series]] = []
    monkeypatch.setattr(charts, "frontier", lambda lines, *_, **__: shown.append(lines))
    asked = {"model": "llama-3.1-70b", "cluster": "h100x8", "objective": "saturated", "latency_bound_s": 40}
    for more in ({"devices": 4}, {"speculative": "eagle3", "speculative_tokens": 1, "acceptance": 0.6}):
        planned = api.solve(**asked, **more)
        _frontier(planned.best, planned.problem.profile)
        best = max(max(line.y) for line in shown[-1])
        assert best < 1.2 * planned.best.estimate.throughput_rps
    assert {line.name for line in shown[-1]} == {"chunked"}, "no engine runs orca with drafts"


def test_curves_are_of_policies_that_the_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from xgpt.pages import charts
    from xgpt.reporting.report import _frontier

    monkeypatch.setattr(charts, "frontier", lambda lines, *_, **__: [line.name for line in lines])
    profile, plan = problem("llama-3.1-8b", "h200x1", "orca").profile, a_plan("chunked")
    for engine, shown in (("sglang", ["chunked"]), ("vllm", ["chunked", "orca", "rra", "static"])):
        named = plan.model_copy(update={"engine": load_engine(engine)})
        assert sorted(_frontier(named, profile)) == shown  # type: ignore[call-overload]


def test_nothing_is_loaded_and_nothing_runs(hostile_page: str) -> None:
    assert "<script" not in hostile_page
    assert hostile_page.count("</style>") == 1
    assert "&lt;script&gt;alert(1)" in hostile_page
    for address in re.findall(r"""(?:src|href)=["']([^"']*)""", hostile_page):
        assert address.startswith("data:")
    assert "url(" not in hostile_page
    assert "@import" not in hostile_page


def test_a_value_that_is_left_out_is_an_error() -> None:
    from xgpt.pages import render

    with pytest.raises(Exception, match="heading"):
        render("report.html")


def test_a_browser_shows_it_without_complaint(hostile_page: str, tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    page, shot, paper = tmp_path / "report.html", tmp_path / "shot.png", tmp_path / "report.pdf"
    page.write_text(hostile_page, encoding="utf-8")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-pdf-header-footer",
        "--enable-logging=stderr",
        "--window-size=1366,900",
    ]
    for output in (f"--screenshot={shot}", f"--print-to-pdf={paper}"):
        ran = subprocess.run(
            [CHROMIUM, *flags, f"--user-data-dir={tmp_path / 'profile'}", output, page.as_uri()],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert "CONSOLE" not in ran.stderr, ran.stderr
    assert shot.read_bytes().startswith(b"\x89PNG")
    assert shot.stat().st_size > 20_000, "more than an empty page"
    assert paper.read_bytes().startswith(b"%PDF")


@pytest.mark.long
def test_a_page_shows_the_bounds_that_the_user_gave() -> None:
    subject = problem("llama-3.1-8b", "h200x1", "orca", None)
    constraint = Constraint(objective="arrivals", ttft_s=1.0, tpot_s=0.05)
    plan = plan_each(subject.under(constraint), "orca")["orca"]
    page = page_of(plan)
    assert "TTFT within 1 s and TPOT within 50 ms for 99% of requests" in page and "no latency bound" not in page
    assert "TTFT, p99 at that rate; bound 1 s" in page and "latency, p99" not in page
