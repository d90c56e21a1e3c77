"""How long steps take that follow each other through the stages of a lane.

Steps pass the stages in order. Step n finishes stage j at

    finish[j, n] = max(finish[j - 1, n] + hop, finish[j, n - 1]) + cost[j, n]

and a micro-batch's next step starts once its last one has left the last stage. What follows are closed forms of that
recursion's steady state, for a lane's kinds of stages (see LaneCost); arrays are [kinds, candidates].
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from xsimulator.cost import Array
from xsimulator.lane import LaneCost

Steps = tuple[Array, Array]
"""Seconds on each kind of stage, and of the hop to it. # [kinds, n] each"""


def expected_max_deviate(count: npt.ArrayLike) -> Array:
    """Expected largest of so many standard normal deviates (Blom's approximation), 0 for one."""
    n = np.maximum(np.asarray(count, float), 1.0)
    return ndtri((n - 0.375) / (n + 0.25))


class Pipeline:
    """The order of a lane's stages, as the closed forms need it.

    A run is a stretch of equal stages. Sums over stages before and after a point are linear within a run, so that
    only its ends matter where a largest one is looked for.
    """

    def __init__(self, lane: LaneCost) -> None:
        kinds, num_kinds = lane.kind_of, len(lane.kinds)
        last = len(kinds) - 1
        ends = [x for x in range(len(kinds)) if x in (0, last) or kinds[x] != kinds[x - 1] or kinds[x] != kinds[x + 1]]
        member = np.eye(num_kinds)[kinds]  # [stages, kinds]
        self.counts = lane.counts
        self.before: Array = np.cumsum(member, axis=0)[ends]
        """Stages of each kind up to and with an end. # [ends, kinds]"""
        self.after: Array = np.cumsum(member[::-1], axis=0)[::-1][ends]
        self._is_before = (self.before > 0).astype(float)
        self._is_after = (self.after > 0).astype(float)
        self.num_stages = len(kinds)

    def through(self, cost: Array, hop: Array) -> Array:
        """Seconds that a step needs through all stages. # [kinds, n] -> [n]"""
        return self.counts @ (cost + hop)

    def all_stages(self, cost: Array) -> Array:
        """The sum over all stages. # [kinds, ...] -> [...]"""
        return (self.counts @ cost.reshape(len(cost), -1)).reshape(cost.shape[1:])

    def round(self, cost: Array, hop: Array, microbatches: Array) -> Array:
        """Seconds from one step of a micro-batch to its next, where all steps are alike. # [kinds, n] -> [n]"""
        return np.maximum(microbatches * cost.max(axis=0), self.through(cost, hop))

    def change(self, first: Array, first_hop: Array, then: Array, then_hop: Array, microbatches: Array) -> Array:
        """The longest way through a round of `first` steps and on, at stage x, through the round of `then` steps.

        Returns:
            For each end of a run. # [ends, n]
        """
        down = self.before @ (first + first_hop) + self.after @ (then + then_hop)
        slowest = np.maximum(self.slowest_until(first), self.slowest_from(then))
        return down + (microbatches - 1) * slowest

    def slowest_until(self, cost: Array) -> Array:
        """The slowest stage up to each end of a run. # [kinds, ...] -> [ends, ...]"""
        return _masked_max(self._is_before, cost)

    def slowest_from(self, cost: Array) -> Array:
        """The slowest stage from each end of a run on. # [kinds, ...] -> [ends, ...]"""
        return _masked_max(self._is_after, cost)


def _masked_max(mask: Array, cost: Array) -> Array:
    """The largest cost under each row of a mask. # [ends, kinds], [kinds, ...], none negative -> [ends, ...]"""
    return (mask.reshape(*mask.shape, *(1,) * (cost.ndim - 1)) * cost).max(axis=1)
