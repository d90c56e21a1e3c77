"""The container's recipe, as far as it can be checked without an engine that builds it."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
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


@pytest.mark.long
def test_its_steps_in_a_clean_root_give_an_xgpt_that_plans(tmp_path: Path) -> None:
    """Only what is copied is in the root. The recipe's own pip lines resolve against the index in a fresh environment,
    where the package then runs with this environment's dependencies."""
    root, elsewhere, tools = tmp_path / "root", tmp_path / "work", tmp_path / "tools"
    for folder in (root, elsewhere, tools):
        folder.mkdir()
    for name, rest in STEPS:
        if name == "COPY":
            *sources, _ = shlex.split(rest)
            for source in sources:
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, root / source)
    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", fresh], check=True)
    python = str(fresh / "bin/python")
    (tools / "pip").write_text(f'#!/bin/sh\nexec {python} -m pip "$@" --dry-run\n')
    (tools / "pip").chmod(0o755)
    (steps,) = [rest for name, rest in STEPS if name == "RUN" and "pip install" in rest]
    arguments = dict(rest.split("=", 1) for name, rest in STEPS if name == "ARG")
    at = os.environ | arguments | {"PATH": f"{tools}:{os.environ['PATH']}"}
    steps = steps.replace("/tmp/", f"{tmp_path}/")
    resolved = subprocess.run(["sh", "-ec", steps], cwd=root, env=at, capture_output=True, text=True, check=False)
    assert resolved.returncode == 0, resolved.stderr
    assert resolved.stdout.count("Would install") == 2 and " xgpt-serve-" in resolved.stdout
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", str(root)], check=True)
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    (Path(packages) / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    asked = "plan --model opt-13b --cluster a40x4 --workload summarization --latency-bound 8 --policy orca"
    ran = subprocess.run(
        [fresh / "bin/xgpt", *asked.split()], cwd=elsewhere, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0 and (elsewhere / "plan.json").exists(), ran.stderr
    where = subprocess.run(
        [python, "-c", "import xgpt; print(xgpt.__file__)"], cwd=elsewhere, capture_output=True, text=True
    )
    assert where.stdout.startswith(packages)
