"""Read numbers only in their usual notation, and tell probabilities apart as words do. Python's own functions also
accept 1_0, nan and digits of other alphabets.
"""

from __future__ import annotations

import re
from math import ceil, floor, log10

_WHOLE = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


def whole(text: str) -> int:
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"not a whole number: {text!r}")
    return int(text)


UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def seconds(text: str) -> tuple[float, str]:
    """Return the seconds and the unit ("" if none) in a text such as 200ms, 2s or 1.5, or raise ValueError."""
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyz").strip()
    unit = text.strip().removeprefix(number).strip()
    if unit and unit not in UNITS_S:
        raise ValueError(f"not a time: {text!r}")
    return decimal(number) * UNITS_S.get(unit, 1.0), unit


def duration(seconds: float) -> str:
    """Return a duration as text in a suitable unit, such as "45 s", "12 min", "6 h" or "3.5 days"."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86400:.3g} days"


def decimal(text: str) -> float:
    if not _DECIMAL.fullmatch(text) or (number := float(text)) in (float("inf"), float("-inf")):
        raise ValueError(f"not a number: {text!r}")
    return number


def rounded_up(value: float) -> float:
    """Return the least number of three significant digits that is not below a positive one."""
    step = 10.0 ** (floor(log10(value)) - 2)
    return float(f"{step * ceil(value / step - 1e-9):.3g}")


LEVELS = (1, 20), *((each, 10) for each in range(1, 10)), (19, 20), (99, 100)
"""Probabilities that are said in words, as number of cases of so many."""


def level_of(share: float) -> int:
    """Return the number of `LEVELS` that a probability reaches."""
    return sum(share >= part / of - 1e-9 for part, of in LEVELS)


def rounded_down(share: float) -> float:
    """Return the least probability that words do not tell from this one."""
    level = level_of(share)
    return min(share, LEVELS[level - 1][0] / LEVELS[level - 1][1]) if level else share
