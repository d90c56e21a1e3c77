"""The Python API: its examples run, its arguments are the request's, errors are raised and nothing is printed."""

from __future__ import annotations

import doctest
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import xgpt
from xgpt import api
from xgpt.app.request import PlanRequest, plan_request
from xgpt.schema import Constraint

ROOT = Path(__file__).resolve().parents[2]
NAMES = [name for name in xgpt.__all__ if not name.endswith("Error")]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_in_docstrings_run(name: str) -> None:
    function = getattr(xgpt, name)
    tests = doctest.DocTestFinder(recurse=False).find(inspect.unwrap(function), name, globs={})
    results = [doctest.DocTestRunner(verbose=False).run(test) for test in tests]
    assert sum(result.failed for result in results) == 0


def test_every_function_is_documented() -> None:
    for name in NAMES:
        text = inspect.getdoc(getattr(xgpt, name)) or ""
        assert "Raises:" in text and f"xgpt.{name}(" in text, name


def test_the_arguments_of_plan_are_the_fields_of_the_request() -> None:
    fields = (PlanRequest.model_fields.keys() | Constraint.model_fields.keys()) - {"constraint"}
    assert inspect.signature(xgpt.plan).parameters.keys() - {"progress"} == fields


def test_an_argument_that_is_not_known_is_refused() -> None:
    with pytest.raises(xgpt.InputError, match="polcy"):
        plan_request(polcy="rra")
    with pytest.raises(xgpt.InputError, match="latency_bound_s"):
        plan_request(latency_bound_s=-1.0)


def test_errors_are_raised_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(xgpt.InfeasibleError) as raised:
        xgpt.plan(model="llama-3.1-8b", cluster="h200x1", latency_bound_s=1e-3, objective="saturated")
    assert raised.value.nearest_bound_s is not None
    with pytest.raises(xgpt.InputError, match="no-such-model"):
        xgpt.plan(model="no-such-model", latency_bound_s=None)
    with pytest.raises(AttributeError):
        xgpt.no_such_function  # noqa: B018
    assert capfd.readouterr() == ("", "")
    assert api.plan is xgpt.plan


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name == "serve_and_bench" else []) for name in EXAMPLES],
)
def test_examples_run(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout and not ran.stderr
