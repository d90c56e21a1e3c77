"""Read numbers in their usual notation; Python's own functions also accept 1_0, nan and digits of other alphabets."""

from __future__ import annotations

import re

_WHOLE = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


def whole(text: str) -> int:
    """Return the integer in a text. Raises ValueError."""
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"not a whole number: {text!r}")
    return int(text)


def decimal(text: str) -> float:
    """Return the finite number in a text. Raises ValueError."""
    if not _DECIMAL.fullmatch(text) or (number := float(text)) in (float("inf"), float("-inf")):
        raise ValueError(f"not a number: {text!r}")
    return number
