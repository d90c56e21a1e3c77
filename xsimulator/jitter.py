"""Draw the times of single simulated steps: steps that do the same work take different times.

A profile's tables contain means, which are enough for sums of many steps. The longest gaps between tokens, however, are
single steps.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from xgpt.core.schema import Jitter

NUM_DRAWN = 2**16
"""Number of ratios that are drawn once and reused."""


class JitteredTimes:
    """Returns a random time for a step, given its mean time. Equal sequences of calls give equal results.

    A step is divided into parts about as long as the measured steps. Each part's time varies by a ratio drawn from
    those that were measured, so a step of n parts varies by 1/sqrt(n) as much.
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
    """Return the sums of the first 0, 1, .. drawn ratios, whose mean is 1. They are the same in every run."""
    drawn = np.random.default_rng(0).choice(ratios, NUM_DRAWN)
    return [0.0, *np.cumsum(drawn / drawn.mean()).tolist()]
