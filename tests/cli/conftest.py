"""Commands in an empty directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import PROBLEM, Xgpt


@pytest.fixture
def xgpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Xgpt:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return Xgpt(capfd)


@pytest.fixture
def plan(xgpt: Xgpt) -> Path:
    assert xgpt("plan", "--latency-bound", "4", *PROBLEM).code == 0
    return Path("plan.json")
