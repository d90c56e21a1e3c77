"""Two rings of tests: `make test` runs the first in minutes, `make test-all` both.

What takes long is marked `long`. A test over many cases or random draws runs a few of them in the first ring.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pytest

T = TypeVar("T", bound=Callable[..., Any])
ALL = os.environ.get("XGPT_TESTS") == "all"
only_first = False
"""Whether this run leaves out what is long: then few of its cases are made, and half as much is collected."""
_HAS_IPV6 = Path("/proc/net/if_inet6").exists()
LOOPBACKS = (
    "127.0.0.1",
    pytest.param("::1", marks=pytest.mark.skipif(not _HAS_IPV6, reason="this machine has no IPv6")),
)
"""The addresses of the loopback interface, for `parametrize`."""


def few(cases: Iterable[Any], count: int = 1, *, whole: bool = False) -> list[Any]:
    """Return the cases for `parametrize`, those after the first `count` marked long.

    Args:
        whole: each case is the value of one parameter, even if it is a tuple.
    """
    cases = list(islice(cases, count + 1 if only_first else None))
    later = ((case,) if whole else _values(case) for case in cases[count:])
    return [*cases[:count], *(pytest.param(*values, marks=pytest.mark.long) for values in later)]


def examples(many: int, some: int) -> int:
    """Return the number of random examples: `some` in the first ring, `many` in all."""
    return many if ALL else some


def known(cases: Iterable[Any], some: int) -> Callable[[T], T]:
    """Return a decorator that adds known cases to a property's random ones: `some` in the first ring, else all."""

    def add(test: T) -> T:
        from hypothesis import example  # vLLM's environment has no hypothesis, and no test that comes here

        for case in list(cases)[: None if ALL else some]:
            test = example(case)(test)
        return test

    return add


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify plans with a tenth of the requests, and with a quarter of the sessions."""
    # vLLM's environment collects tests without the planner's packages.
    from xscheduler.objectives import every_setting, saturation
    from xsimulator import capacity, session_rate

    for search in (capacity.CapacitySearch, capacity.Trial):
        monkeypatch.setitem(search.__init__.__kwdefaults__, "least_requests", 200)  # type: ignore[misc]
    changed: tuple[tuple[ModuleType, dict[str, object]], ...] = (
        (capacity, {"LASTING_REQUESTS": 200, "LEAST_WARM_UP": 16, "LIFETIMES": 1}),
        (every_setting, {"LASTING_REQUESTS": 200, "LEAST_REQUESTS": 200}),
        (saturation, {"LEAST_REQUESTS": 200, "MOST_REQUESTS": 500, "LIFETIMES": 2}),
        (session_rate, {"BY_COUNTS": session_rate.ON_ENGINE}),
    )
    for module, figures in changed:
        for name, value in figures.items():
            monkeypatch.setattr(module, name, value)


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
