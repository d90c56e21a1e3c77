"""Single steps in simulation: steps that do the same work take different times.

A profile's tables are means, and sums of many steps need no more. The long gaps between tokens are single steps.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from xgpt.core.schema import Jitter

NUM_DRAWN = 2**16
"""Stretches that are drawn once, and used over and over."""


class JitteredTimes:
    """Returns the time of a single step for its mean time, and for the same calls always the same.

    A step passes in stretches that last about as long as the steps that were measured. Each takes a ratio drawn from
    theirs, so that a step of n stretches varies by 1/sqrt(n) as much as they do.
    """

    def __init__(self, jitter: Jitter) -> None:
        self._sums = _sums_of(jitter.ratios)
        self._stretch_ns = 1e9 * jitter.seconds
        self._at = 0

    def __call__(self, mean_ns: int) -> int:
        count = min(max(1, round(mean_ns / self._stretch_ns)), NUM_DRAWN)
        if self._at + count > NUM_DRAWN:
            self._at = 0
        before, self._at = self._sums[self._at], self._at + count
        return max(1, round(mean_ns * (self._sums[self._at] - before) / count))


@lru_cache(maxsize=8)
def _sums_of(ratios: tuple[float, ...]) -> list[float]:
    """Return the sums of the first 0, 1, .. drawn ratios, whose mean is 1: the same for every run."""
    drawn = np.random.default_rng(0).choice(ratios, NUM_DRAWN)
    return [0.0, *np.cumsum(drawn / drawn.mean()).tolist()]
