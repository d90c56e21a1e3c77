"""Planning needs none of the packages that run a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from xgpt.core.errors import RUNS_MODELS

WITHOUT = f"""
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(RUNS_MODELS)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from xgpt.cli import main
main(sys.argv[1:])
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT, *arguments], cwd=folder, capture_output=True, text=True)


PROBLEM = ("--cluster", "h200x1", "--model", "llama-3.1-8b", "--latency-bound", "20")


def test_plan_simulate_report_and_export(tmp_path: Path) -> None:
    for arguments in (
        ("plan", *PROBLEM, "-o", "plan.json"),
        ("simulate", "plan.json", "--requests", "200"),
        ("report", "plan.json", "-o", "plan.html"),
        ("export", "plan.json", "--to", "script", "-o", "scripts"),
        ("compare", *PROBLEM),
    ):
        done = run(tmp_path, *arguments)
        assert done.returncode == 0, (arguments, done.stderr)
    assert (tmp_path / "plan.html").exists()


@pytest.mark.parametrize("arguments", [("plan", "--latency-bound", "9.8"), ("serve", "plan.json")])
def test_what_runs_a_model_names_what_to_install(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    run(tmp_path, "plan", *PROBLEM, "-o", "plan.json")
    done = run(tmp_path, *arguments)
    assert done.returncode == 3
    assert "pip install 'xgpt-serve[serve]'" in done.stderr and len(done.stderr.splitlines()) <= 2, done.stderr
