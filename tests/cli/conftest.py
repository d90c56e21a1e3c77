"""Commands in an empty directory."""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from tests.cli.commands import PROBLEM, Xgpt
from xgpt.cli import main


@pytest.fixture
def xgpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Xgpt:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return Xgpt(capfd)


@pytest.fixture(scope="session")
def planned_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `xgpt plan` writes: planned once for all tests that take a plan."""
    file = tmp_path_factory.mktemp("planned") / "plan.json"
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), pytest.raises(SystemExit) as end:
        main(["plan", "--latency-bound", "4", *PROBLEM, "-o", str(file)])
    assert end.value.code == 0
    return file.read_text()


@pytest.fixture
def plan(xgpt: Xgpt, planned_text: str) -> Path:
    Path("plan.json").write_text(planned_text)
    return Path("plan.json")
