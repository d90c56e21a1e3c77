"""Draw the times of single simulated steps, since steps that do the same work take different times.

A profile's tables contain means, which suffice to predict the total time of many steps. The longest gaps between
tokens, however, depend on single steps.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from xgpt.core.schema import Jitter

NUM_DRAWN = 2**16
"""Number of ratios that are drawn once and reused."""


class JitteredTimes:
    """Draws a random time for a step with a given mean time. Equal sequences of calls give equal results.

    A step is divided into parts that are about as long as the steps whose variation was measured. The time of each part
    is multiplied by a ratio that is drawn from the measured ratios, so a step of n parts varies 1/sqrt(n) times as
    much.
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
    """Return the sums of the first 0, 1, .. drawn ratios. Every run draws the same ratios, whose mean is 1."""
    drawn = np.random.default_rng(0).choice(ratios, NUM_DRAWN)
    return [0.0, *np.cumsum(drawn / drawn.mean()).tolist()]
