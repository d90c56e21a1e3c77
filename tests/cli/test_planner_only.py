"""Planning needs none of the packages that run a model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from xgpt.core.errors import EXTRAS

WITHOUT = f"""
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(set().union(*(modules for _, modules in EXTRAS.values())))!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from importlib import metadata

version = metadata.version

def installed(name):
    if name == "torch":
        raise metadata.PackageNotFoundError(name)
    return version(name)

metadata.version = installed
from xgpt.cli import main
for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit as end:
        print("exit", end.code, file=sys.stderr)
"""


PROBLEM = "--cluster h200x1 --model llama-3.1-8b --latency-bound 20 --objective saturated --policy orca"


def test_planning_works_without_them_and_what_runs_a_model_names_what_to_install(tmp_path: Path) -> None:
    works = (
        f"plan {PROBLEM} -o plan.json",
        "simulate plan.json --requests 200",
        "export plan.json --to shell -o scripts",
        "doctor",
    )
    refused = ("plan --latency-bound 9.8", "compare --latency-bound 9.8", "serve plan.json")
    pages = ("report plan.json -o plan.html", "ui --port 0")
    command = [sys.executable, "-c", WITHOUT, *works, *refused, *pages]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}  # with no profile of this machine
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    ends = [line for line in done.stderr.splitlines() if line.startswith("exit ")]
    assert ends == ["exit 0"] * len(works) + ["exit 3"] * (len(refused) + len(pages)), done.stderr
    assert done.stderr.count("pip install 'xgpt-serve[serve]'") == len(refused), done.stderr
    assert done.stderr.count("pip install 'xgpt-serve[ui]'") == len(pages), done.stderr
    assert done.stderr.count("or plan for another --cluster, such as --cluster h100x8") == 2, done.stderr
    assert "no torch" in done.stdout and "planning for clusters works" in done.stdout, done.stdout
    assert "Traceback" not in done.stderr
