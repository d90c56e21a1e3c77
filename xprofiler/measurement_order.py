"""The order in which points are measured: several passes over all, so that none is measured at a single clock rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

PASSES = 6
"""The first is to warm up."""
LONG_TOKENS, LONG_EVERY = 1024, 2
"""Prompts of this many tokens last long enough to meet all of the clock's rates: every second pass has them."""

Point = TypeVar("Point")


def in_passes(points: Iterable[Point], prompt_tokens: Callable[[Point], int]) -> list[Point]:
    """The points of all passes, one pass after the other.

    Args:
        prompt_tokens: that a point encodes.
    """
    once = list(points)
    return [
        point
        for number in range(PASSES)
        for point in once
        if number % LONG_EVERY == 0 or prompt_tokens(point) < LONG_TOKENS
    ]
