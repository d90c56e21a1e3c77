"""Compute a quantile of all requests' latencies in closed form, with random prompts and random step times.

The time to a request's first token depends on its prompt and on the step that encodes the prompt. Then come D decode
steps, where D has the distribution of output lengths. If step times are independent, with mean t and standard deviation
s, then

    P(latency > x) = sum_jk p_j w_k P(D > d_jk),   first_j + t d_jk + z_k s sqrt(d_jk) = x,

where z_k and w_k represent a normal distribution (Gauss-Hermite). The probability falls with x, so bisection finds the
quantile. If the time to the first token is constant and s is 0, the quantile is the latency of a request whose output
length is at the quantile.
"""

from __future__ import annotations

import numpy as np

from xsimulator.costs.curves import Array
from xsimulator.lengths import Lengths

DEVIATES = np.asarray([-np.sqrt(3.0), 0.0, np.sqrt(3.0)])[:, None, None]
WEIGHTS = np.asarray([1 / 6, 2 / 3, 1 / 6])[:, None, None]
HALVINGS = 12


class AllRequests:
    """Computes a quantile of all requests' latencies for one distribution of output lengths.

    Args:
        quantile: share of all requests whose latency the result bounds.
    """

    def __init__(self, lengths: Lengths, quantile: float) -> None:
        self._above = np.concatenate([lengths.survival, [0.0]])  # P(D > d)
        self._late = 1 - quantile
        self._decodes = lengths.decodes_at(quantile)

    def latency(self, first: Array, shares: Array, step: Array, deviation: Array) -> Array:
        """Return the quantile of all requests' latencies, s. # [n]

        Args:
            first, shares: possible seconds to the first token, and their probabilities. # [values, n] each
            step, deviation: mean and standard deviation of a decode step's seconds. # [n]
        """
        spread = DEVIATES * deviation  # [3, 1, n]
        step = np.maximum(step, 1e-12)
        weights = WEIGHTS * shares
        low = first.min(axis=0)
        high = first.max(axis=0) + self._decodes * step + 1.8 * deviation * np.sqrt(self._decodes)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            left = middle - first  # [values, n]
            root = np.sqrt(spread**2 + 4 * step * np.maximum(left, 0.0)) - spread
            decodes = np.minimum((root / (2 * step)) ** 2, len(self._above) - 1).astype(int)
            late = np.where(left < 0, 1.0, self._above[decodes])
            breaks = (weights * late).sum(axis=(0, 1)) > self._late
            low, high = np.where(breaks, middle, low), np.where(breaks, high, middle)
        return high
