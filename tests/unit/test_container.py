"""The container's recipe, as far as it can be checked without an engine that builds it."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import FakeExecutor, fake_app, fake_engine, running

ROOT = Path(__file__).resolve().parents[2]
LINES = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
STEPS = [line.split(maxsplit=1) for line in LINES if line.strip() and not line.startswith("#")]


def test_it_runs_without_rights_and_ends_on_sigterm() -> None:
    users = [rest for name, rest in STEPS if name == "USER"]
    assert users and users[-1] not in ("root", "0")
    assert ["STOPSIGNAL", "SIGTERM"] in STEPS
    assert ["ENTRYPOINT", '["xgpt"]'] in STEPS


def test_everything_that_is_copied_is_there_and_all_packages_are() -> None:
    copied = [source for name, rest in STEPS if name == "COPY" for source in shlex.split(rest)[:-1]]
    assert all((ROOT / source).exists() for source in copied)
    packages = re.search(r"packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text())
    assert packages is not None
    assert set(re.findall(r'"(\w+)"', packages[1])) <= set(copied)


@pytest.mark.parametrize("is_up", [True, False])
def test_the_health_check(is_up: bool) -> None:
    (command,) = [rest.partition("CMD ")[2] for name, rest in STEPS if name == "HEALTHCHECK"]
    module = re.findall(r'"([\w.]+)"', command)[-1]
    with running(fake_app(fake_engine(FakeExecutor()))) as url:
        port = url.rsplit(":", 1)[1] if is_up else "1"
        check = subprocess.run(
            [sys.executable, "-m", module], env={"XGPT_PORT": port}, cwd=ROOT, capture_output=True, check=False
        )
    assert check.returncode == (0 if is_up else 1)
