"""The command line as scripts see it."""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from xgpt import api
from xgpt.cli import main

PROBLEM = ("--model", "llama-3.1-8b", "--cluster", "h200x1", "--workload", "orca")


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


def run(*arguments: str) -> Ran:
    """Run a command where no test captures what is printed."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert isinstance(end.value.code, int)
    return Ran(end.value.code, out.getvalue(), err.getvalue())


def once(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """Let the commands of a function of `xgpt` all get its first answer, until the list is cleared."""
    answer, answers = getattr(api, name), list[Any]()

    def first(*arguments: Any, **given: Any) -> Any:
        answers.extend([] if answers else [answer(*arguments, **given)])
        return answers[0]

    monkeypatch.setattr(api, name, first)
    return answers


class Xgpt:
    """Runs commands in an empty directory with a cache of its own."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, *arguments: str) -> Ran:
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        assert isinstance(end.value.code, int)
        return Ran(end.value.code, *self._capfd.readouterr())

    def fails(self, code: int, *arguments: str) -> str:
        """Run what must fail: one line on standard error (after lines of progress, if the machine is slow), nothing on
        standard output, no file. Returns the line.
        """
        before = set(Path.cwd().iterdir())
        ran = self(*arguments)
        assert ran.code == code, ran
        assert ran.out == ""
        (error,) = [line for line in ran.err.splitlines(keepends=True) if not line.endswith(" ...\n")]
        assert error.startswith("xgpt: ") and error.endswith("\n")
        assert set(Path.cwd().iterdir()) == before
        return error
