"""Order measurements in several passes over all points. So no point is measured at only one of the clock's rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

PASSES = 6
"""Number of passes. The first one is warm-up."""
LONG_TOKENS, LONG_EVERY = 1024, 2
"""Points with at least `LONG_TOKENS` prompt tokens are measured only in every `LONG_EVERY`-th pass."""

Point = TypeVar("Point")


def in_passes(points: Iterable[Point], prompt_tokens: Callable[[Point], int], passes: int = PASSES) -> list[Point]:
    once = list(points)
    return [
        point
        for number in range(passes)
        for point in once
        if number % LONG_EVERY == 0 or prompt_tokens(point) < LONG_TOKENS
    ]
