"""The Python API: its examples run, its arguments are the request's, errors are raised and nothing is printed."""

from __future__ import annotations

import ast
import doctest
import inspect
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import xgpt
from tests.rings import few
from xgpt import api
from xgpt.cli import COMMANDS, commands, main
from xgpt.requests import REQUESTS, PlanRequest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("xgpt", "xprofiler", "xsimulator", "xscheduler", "xrunner")
NAMES = [name for name in xgpt.__all__ if not name.endswith("Error") and name != "Rule"]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", few(NAMES, 3))
def test_the_examples_in_docstrings_run(name: str) -> None:
    function = getattr(xgpt, name)
    tests = doctest.DocTestFinder(recurse=False).find(inspect.unwrap(function), name, globs={})
    results = [doctest.DocTestRunner(verbose=False).run(test) for test in tests]
    assert sum(result.failed for result in results) == 0


def test_every_function_is_documented() -> None:
    for name in NAMES:
        text = inspect.getdoc(getattr(xgpt, name)) or ""
        assert "Raises:" in text and f"xgpt.{name}(" in text, name


@pytest.mark.parametrize("name", [*REQUESTS, "solve"])
def test_signatures_and_docstrings_have_every_field(name: str) -> None:
    """As an editor, help() and inspect show them."""
    function = getattr(xgpt, name)
    fields = REQUESTS.get(name, PlanRequest).model_fields
    parameters = inspect.signature(function).parameters
    assert fields.keys() <= parameters.keys()
    assert not [one for one in parameters.values() if one.kind is inspect.Parameter.VAR_KEYWORD]
    for field, each in fields.items():
        default = parameters[field].default
        assert default is inspect.Parameter.empty or default == each.get_default(call_default_factory=True)
    listed = (inspect.getdoc(function) or "").partition("Args:")[2]
    assert name == "solve" or [one for one in parameters if f"    {one}" not in listed and one != "plan"] == []


@pytest.mark.parametrize("call", [xgpt.solve, xgpt.plan, xgpt.compare])
def test_an_argument_that_is_not_known_is_refused(call: Callable[..., object]) -> None:
    with pytest.raises(xgpt.InputError, match=r"^polcy: 'rra' is not accepted; there is no such argument"):
        call(latency_bound_s=None, polcy="rra")
    with pytest.raises(xgpt.InputError, match=r"^latency_bound_s: -1\.0 is not accepted"):
        call(latency_bound_s=-1.0)
    for unbounded in (None, float("inf")):
        with pytest.raises(xgpt.InputError, match=r"^price: -1 is not accepted"):
            call(latency_bound_s=unbounded, price=-1)


def test_what_compare_would_ignore_is_refused() -> None:
    with pytest.raises(xgpt.InputError, match="order"):
        xgpt.compare(latency_bound_s=None, order="sjf")  # type: ignore[call-arg]


def test_an_error_names_arguments_here_and_options_at_the_command_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(xgpt.InputError) as raised:
        xgpt.plan(latency_bound_s=8, objective="arrivals", sla="request")
    assert str(raised.value) == (
        "sla: 'request' is not accepted; it needs `objective=saturated`: with `objective=arrivals` leave it out"
    )
    with pytest.raises(SystemExit):
        main(["plan", "--latency-bound", "8", "--objective", "arrivals", "--sla", "request"])
    assert capfd.readouterr().err == (
        "xgpt: --sla: 'request' is not accepted; it needs --objective saturated: with --objective arrivals leave it"
        " out\n"
    )


def test_no_error_of_the_api_names_an_option() -> None:
    """Of xgpt's own. Flags of vLLM's are named as they are, and answers over HTTP are for a server's operator."""
    options = {option for name in COMMANDS for option in options_of(name)}
    errors = {"InputError", "MachineError", "InfeasibleError", "XgptError"}
    paths = {path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    for path in sorted(paths - set((ROOT / "xgpt" / "cli").iterdir())):
        source = path.read_text(encoding="utf-8")
        if not options.intersection(re.findall(r"--[a-z-]+", source)):
            continue
        for text in messages(ast.parse(source), errors):
            words = re.findall(r"--[a-z-]+", re.sub(r"`[^`]* [^`]*`", "", text))  # but for whole commands
            assert not options.intersection(words) or text.startswith("current") or "vllm" in path.parts, (path, text)


def messages(tree: ast.AST, errors: set[str]) -> Iterator[str]:
    """The texts of all errors that are made: in the call, or in a name that is given to it."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        nodes = list(ast.walk(function))
        called = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", None) in errors]
        given = {arg.id for call in called for arg in call.args if isinstance(arg, ast.Name)}
        named = [
            node.value
            for node in nodes
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in given
        ]
        for made in (*called, *named):
            texts = [part.value for part in ast.walk(made) if isinstance(getattr(part, "value", None), str)]
            yield "".join(texts)


def options_of(name: str) -> list[str]:
    command = getattr(commands, name)
    return [option for param in command.params for option in param.opts if option.startswith("--")]


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


@pytest.mark.usefixtures("short_simulations")
def test_an_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(xgpt, "plan", partial(xgpt.plan, policy="chunked"))  # six plans of all policies take seconds
    runpy.run_path(str(ROOT / "examples" / "what_if.py"))
    assert "6 s: " in capsys.readouterr().out and (tmp_path / "what_if.svg").exists()


@pytest.mark.long
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout and not ran.stderr
