"""Commands in an empty directory."""

from __future__ import annotations

import os
import shutil
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
    for name in ("xgpt.problems.as_served", "xgpt.served_profile.as_served"):
        monkeypatch.setattr(name, lambda profile, *_: profile)  # it serves a load for a quarter of a minute
    return Xgpt(capfd)


@pytest.fixture(scope="session")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what `xgpt plan` writes, plan and profile: planned once for all tests that take a plan."""
    folder = tmp_path_factory.mktemp("planned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()), pytest.raises(SystemExit) as end:
            main(["plan", "--latency-bound", "4", *PROBLEM, "-o", str(folder / "plan.json")])
    assert end.value.code == 0
    return folder


@pytest.fixture
def plan(xgpt: Xgpt, planned: Path) -> Path:
    shutil.copytree(planned / "cache", os.environ["XDG_CACHE_HOME"], dirs_exist_ok=True)
    return Path(shutil.copy(planned / "plan.json", "plan.json"))
