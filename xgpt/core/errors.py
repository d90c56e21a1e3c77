"""Define the exceptions, each with the exit code of the command line.

XgptError (4: a defect of this program)
├── InfeasibleError (1: nothing meets the bound)
├── InputError      (2: a mistake in the user's input: field, value, what is accepted)
└── MachineError    (3: this machine cannot do it: devices, memory, port)
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

MAX_SHOWN = 200
"""Largest number of characters of the user's text that an error or a log line shows."""


class XgptError(Exception):
    exit_code = 4


class InfeasibleError(XgptError):
    """No schedule meets the constraint.

    Args:
        nearest_bound_s: the smallest value of the bound `binding` that some schedule keeps. None means that no value
            helps, or that it is not a bound.
        binding: name of the constraint that cannot be met, such as "latency_bound_s" or "memory".

    Attributes:
        reason: the message as a sentence without options, or "".
        kept_per_s: the highest arrival rate at which a schedule that was found keeps the bounds. 0: none, or not known.
        nearest: fields of the constraint with values under which some schedule is found: the nearest one of a single
            field, or all bounds times one factor. Empty: not known.
        answer: what is told all the same, if a load's requests can be replayed: the plans of `xgpt.solve` or
            `xgpt.compare` that keep the bounds for most of them. None otherwise.
        because: an end for the message that says what takes the time, or "".
        warnings: reasons why some schedule might meet the constraint after all, one sentence each.
    """

    exit_code = 1

    def __init__(
        self, message: str, *, nearest_bound_s: float | None = None, binding: str, reason: str = "", because: str = ""
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.because = because
        self.nearest_bound_s = nearest_bound_s
        self.binding = binding
        self.warnings: tuple[str, ...] = ()
        self.kept_per_s = 0.0
        self.nearest: dict[str, float | None] = {}
        self.answer: Any = None


class InputError(XgptError):
    """A user's value is not accepted, or is missing (None). The message names the field and what to do."""

    exit_code = 2

    def __init__(self, field: str, value: object, accepted: str) -> None:
        if value is None:
            wrong = f"{field} is missing"
        elif isinstance(value, dict | list | tuple):
            wrong = f"{field} is not accepted"
        else:
            wrong = f"{field}: {cut(repr(value))} is not accepted"
        super().__init__(f"{wrong}; {accepted}")
        self.field = field
        self.value = value
        self.accepted = accepted


class MachineError(XgptError):
    exit_code = 3


EXTRAS = {
    "running a model": ("serve", {"torch", "safetensors", "tokenizers", "llguidance", "zmq"}),
    "a page": ("ui", {"matplotlib", "starlette", "uvicorn"}),
}
"""By purpose: the optional dependencies, and the modules that they install and that planning does not need."""


def not_installed(error: ModuleNotFoundError) -> MachineError | None:
    """Return an error that says what to install if the missing module is optional. Otherwise return None."""
    module = (error.name or "").partition(".")[0]
    for purpose, (extra, modules) in EXTRAS.items():
        if module in modules:
            return MachineError(f"{purpose} needs {module}, which is not installed: pip install 'xgpt-serve[{extra}]'")
    return None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ": did you mean X?" for the end of an error message, or "" if no known name is similar."""
    found = similar(name, known)
    return f": did you mean {found}?" if found else ""


def similar(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known names that begin with `name`, as "X or Y". If there are none, return the most similar name, or
    "" if none is similar.

    Args:
        cutoff: least similarity, from 0 to 1 (see `difflib.get_close_matches`).
    """
    if len(name) > MAX_SHOWN:  # comparing long names takes much time, and ten times their memory
        return ""
    known = list(known)
    begin = [each for each in known if name and each.startswith(name)]
    return " or ".join(begin or get_close_matches(name, known, n=1, cutoff=cutoff))


def nearest_names(name: str, known: Iterable[str], most: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return up to `most` known names: first those with the same parts in any order, such as 8xh100 and h100x8, then
    those that begin with `name`, then similar ones.
    """

    def parts(text: str) -> list[str]:
        return sorted(re.findall(r"[a-z]+\d+[a-z]?|\d+|[a-z]+", text.lower().replace("x", " ")))

    known = list(known)
    alike = [each for each in known if parts(each) == parts(name)]
    begin = [each for each in known if name and each.startswith(name.lower())]
    near = get_close_matches(name.lower(), known, n=most, cutoff=cutoff)
    return list(dict.fromkeys([*alike, *begin, *near]))[:most]


def reason_of(error: OSError | UnicodeDecodeError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not text in UTF-8"
    if error.errno is None or error.errno <= 0 or type(error).__module__ == "ssl":
        return error.strerror or str(error)
    return os.strerror(error.errno)  # asyncio's own texts repeat the address


def cut(text: str, most: int = MAX_SHOWN) -> str:
    """Return a text, cut to `most` characters. A text that was cut ends in dots."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def printable(text: str) -> str:
    return "".join(
        character if character in "\n\t" or unicodedata.category(character)[0] != "C" else repr(character)[1:-1]
        for character in text
    )
