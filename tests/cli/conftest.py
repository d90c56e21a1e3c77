"""Commands in an empty directory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.cli.commands import PROBLEM, Xgpt, run
from tests.rings import shorten


@pytest.fixture
def full_simulations() -> None:
    """Let `xgpt` verify plans with as many requests as users' commands do."""


@pytest.fixture
def xgpt(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Xgpt:
    """Commands that verify plans with few requests: what is tested is what they say and do, not their figures."""
    if "full_simulations" not in request.fixturenames:
        shorten(monkeypatch)
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
        shorten(patch)
        assert run("plan", "--latency-bound", "4", *PROBLEM, "-o", str(folder / "plan.json")).code == 0
    return folder


@pytest.fixture
def plan(xgpt: Xgpt, planned: Path) -> Path:
    shutil.copytree(planned / "cache", os.environ["XDG_CACHE_HOME"], dirs_exist_ok=True)
    return Path(shutil.copy(planned / "plan.json", "plan.json"))
