"""Compute the times of consecutive steps through the stages of a lane.

Steps go through the stages in order. Step n finishes stage j at

    finish[j, n] = max(finish[j - 1, n] + hop, finish[j, n - 1]) + cost[j, n]

and a micro-batch's next step starts once its previous step has left the last stage. This module has closed forms for
the steady state of this recursion, for a lane's kinds of stages (see LaneCost). Arrays are [kinds, candidates].
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import scipy as sp

from xsimulator.costs.curves import Array
from xsimulator.costs.step_cost import LaneCost

SHARE = (0.656, -0.076, (-0.53, 0.133), -0.237)
"""Coefficients of `RandomSteps.share` for m micro-batches. With as many micro-batches as stages, the share is the first
coefficient plus the second times log m. With more micro-batches than stages, the pair also applies (a constant, and a
factor on the logarithm of the number of long steps in a round). With fewer, the last one also applies.
"""
SQRT_2_PI = np.sqrt(2 * np.pi)


def _blom(count: npt.ArrayLike) -> Array:
    n = np.maximum(np.asarray(count, float), 1.0)
    return sp.special.ndtri((n - 0.375) / (n + 0.25))


@cache
def _table() -> Array:
    return _blom(np.arange(1025))


def expected_max_deviate(count: npt.ArrayLike) -> Array:
    """Return the expected maximum of `count` standard normal deviates (Blom's approximation). It is 0 for one."""
    n = np.asarray(count).astype(int)
    table = _table()
    return table[n] if n.max() < len(table) else _blom(n)


class Pipeline:
    """The order of a lane's stages, for the closed forms.

    A run is a sequence of equal stages. Sums over the stages before and after a point are linear within a run, so their
    maximum is at an end of a run.

    Attributes:
        counts, devices: number of stages of each kind, and of their devices. # [kinds] each
        before, after: for each end of a run, the number of stages of each kind up to this end, and from this end on.
            # [ends, kinds] each
        run_of_end: the run to which each end belongs. # [ends]
    """

    def __init__(self, lane: LaneCost) -> None:
        kinds, num_kinds = lane.kind_of, len(lane.kinds)
        last = len(kinds) - 1
        ends = [x for x in range(len(kinds)) if x in (0, last) or kinds[x] != kinds[x - 1] or kinds[x] != kinds[x + 1]]
        member = np.eye(num_kinds)[kinds]  # [stages, kinds]
        self.counts = lane.counts
        self.devices = lane.counts * [stage.tp for stage, _ in lane.kinds]
        self.before: Array = np.cumsum(member, axis=0)[ends]
        self.after: Array = np.cumsum(member[::-1], axis=0)[::-1][ends]
        runs = [x for x in range(len(kinds)) if x == 0 or kinds[x] != kinds[x - 1]]
        self._kind_of_run = kinds[runs]
        self.run_of_end = np.searchsorted(runs, ends, side="right") - 1
        self.num_stages = len(kinds)

    def through(self, cost: Array, hop: Array) -> Array:
        """Return the seconds of a step through all stages. # [kinds, n] -> [n]"""
        return self.counts @ (cost + hop)

    def all_stages(self, cost: Array) -> Array:
        """Return the sum over all stages. # [kinds, ...] -> [...]"""
        return (self.counts @ cost.reshape(len(cost), -1)).reshape(cost.shape[1:])

    def bubble(self, work: Array, seconds: Array) -> Array:
        """Return the share of `seconds` in which devices do not work. # [kinds, n] s of work, [n] s -> [n]"""
        return 1 - self.devices @ work / (self.devices.sum() * seconds)

    def slowest_until(self, cost: Array) -> Array:
        """Return, for each run, the time of the slowest stage up to the run's end. # [kinds, ...] -> [runs, ...]"""
        return np.maximum.accumulate(cost[self._kind_of_run])

    def slowest_from(self, cost: Array) -> Array:
        """Return, for each run, the time of the slowest stage from the run's start on. # [kinds, ...] -> [runs, ...]"""
        return np.maximum.accumulate(cost[self._kind_of_run[::-1]])[::-1]


class RandomSteps:
    """Predicts the times of rounds. The steps have random, independent times, since steps that encode take longer.

    In a round, each of the M micro-batches has one step. Steps keep their order, so all others wait for a long step. A
    step leaves the last stage at the end of the longest path through the recursion. Such a path consists of laps. A lap
    is on one stage from a step a to a later step b, then goes through all stages with b, and continues with the next
    step of b's micro-batch, M steps later:

        gain = c[a] + .. + c[b - 1] + through[b],    advance = b - a + M

    If a path waits in each lap for a step with at least a certain time, its gain for each step of its advance is

        (E[c; shorter] + E[through; as long]) / (1 - p + M p),   p = P(as long).

    The highest gain over all such times is a lower bound on the mean time of a step, since better paths may exist. The
    upper estimate assumes that every M steps take as long as the longest of them. It is far too high if M is large. The
    true time is between the two, and nearer to the upper estimate if M is small.

        probability: probability of each kind of step, for several cases. # [cases, steps, n]
        microbatches: M. # [n]

    The first kind of step does not encode.
    """

    def __init__(self, through: Array, slowest: Array, probability: Array, microbatches: Array) -> None:
        order = (-through).argsort(axis=0)
        rows = np.arange(len(microbatches))
        self.m, self._long = microbatches, 1 - probability[:, 0]
        self._through, self._slowest = through[order, rows], slowest[order, rows]
        share = probability[:, order, rows]
        reach = np.minimum(np.add.accumulate(share, axis=1), 1.0)  # probability that a step takes at least as long
        self._shorter = 1 - reach
        self._all_shorter = self._shorter**self.m
        """Probability that all steps of a round are shorter."""
        work = share * self._slowest
        working = np.add.accumulate(work, axis=1)
        self._mean = working[:, -1]
        self.variance: Array = np.maximum((work * self._slowest).sum(axis=1) - self._mean**2, 0.0)
        passing = np.add.accumulate(share * self._through, axis=1)
        self._stages = np.maximum(passing[:, -1] / np.maximum(working[:, -1], 1e-300), 1.0)
        """The mean time of a step through all stages, divided by its mean time on the slowest stage."""
        laps = passing - working + working[:, -1:]
        laps /= 1 + (self.m - 1) * reach
        self._least = np.maximum(np.maximum.reduce(laps, axis=1), self._mean)

    def round(self) -> Array:
        least, most = self.bounds()
        return least + self.share() * (most - least)

    def bounds(self) -> tuple[Array, Array]:
        """Return a lower bound on the time of a round, and the time of its longest step. # [cases, n] each"""
        m = self.m
        longest = (_falls(self._all_shorter) * self._through).sum(axis=1)
        most = longest + _excess(m * self._mean - longest, np.sqrt((m - 1) * self.variance))
        least = m * self._least
        return least, np.maximum(most, least)

    def long_round(self, share: float) -> Array:
        """Return, for the first case, the time in seconds that a share `share` of all rounds exceeds. # [n]"""
        return self._through[(self._all_shorter[0] <= 1 - share).argmax(axis=0), np.arange(len(self.m))]

    def share(self) -> Array:
        """Return the position of the true time between the two `bounds`: 0 is the first, 1 the second. # [cases, n]"""
        first, many, lean, thin = SHARE
        log_m = np.log(self.m)
        long = np.log(np.maximum(self._long, 1e-9)) + log_m
        less = np.log(self._stages) - log_m  # how many more stages than micro-batches
        share = first + many * log_m + np.minimum(less, 0.0) * (lean[0] + lean[1] * long)
        return np.minimum(np.maximum(share + thin * np.maximum(less, 0.0) * long, 0.0), 1.5)

    def round_with(self, through: Array, slowest: Array) -> Array:
        m = self.m - 1
        longer = np.maximum(self._through[:, None] - through, 0.0)  # [steps, k, n]
        longest = through + (_falls(self._shorter[0] ** m)[:, None] * longer).sum(axis=0)
        work = slowest + m * self._mean[0]
        return longest + _excess(work - longest, np.sqrt(m * self.variance[0]))


def _falls(shorter: Array) -> Array:
    """Return the decrease from each entry to the next, beginning from 1 to the first entry. # [.., steps, n]"""
    falls = -shorter
    falls[..., 0, :] += 1
    falls[..., 1:, :] += shorter[..., :-1, :]
    return falls


def _excess(mean: Array, sd: Array) -> Array:
    """Return E[max(X, 0)] of a normal X."""
    sd = np.maximum(sd, 1e-12)
    z = mean / sd
    return sd * (np.exp(-0.5 * z * z) / SQRT_2_PI + z * sp.special.ndtr(z))
