"""The demo measures a plan again only on a machine that slowed down, and with a new profile."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import demo


@pytest.mark.parametrize(
    ("disturbed", "steps", "says"),
    [
        ([False], ["plan", "bench"], ""),
        ([True, False], ["plan", "bench", "profile", "plan", "bench"], "profiled again"),
        ([True, True], ["plan", "bench", "profile", "plan", "bench"], "slowed down again"),
    ],
)
def test_a_slower_machine_gets_a_new_profile_and_a_new_plan(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    disturbed: list[bool],
    steps: list[str],
    says: str,
) -> None:
    done: list[str] = []
    runs = iter(disturbed)

    def measure(path: str) -> SimpleNamespace:
        done.append("bench")
        return SimpleNamespace(is_disturbed=next(runs))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "xgpt", lambda command: done.append(command[0]))
    monkeypatch.setattr(demo, "measure", measure)
    demo.main()
    assert done == steps
    assert says in capsys.readouterr().out
