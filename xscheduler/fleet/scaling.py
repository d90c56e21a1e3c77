"""Scale a fleet by the planned day and by the load: the rule that exports write for Prometheus and KEDA.

Each kind of replica follows the day's schedule, ahead by the time that a replica takes to start. One kind, the cheapest
for its rate, also takes the load that exceeds what the others hold: ceil((factor * load - others) / rate - SPARED).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import ceil

import numpy as np

from xgpt.core.schema.fleet import FleetPlan
from xscheduler.fleet.following import LoadSample, WantedReplicas

DAY_MIN = 1440
RATE_S = 60.0
"""The load is the mean arrival rate of this time, plus what waits, to be served within the time of a start."""
SPARED = 0.1
"""Share of a replica up to which a load above what the others hold orders none: a minute's rate varies by as much."""


class Scaling:
    """The rule of a fleet.

    Attributes:
        rates: for each kind, the rate that a replica holds for the day's mix of lengths, requests/s. The schedule has
            the replicas that times of heavier lengths need. # [kinds]
        has_schedule: whether the planned load repeats daily. If not, only the rule scales.
        factor: factor on the load: the fleet's load factor, but at least 1.
        least, most: for each kind, its smallest and largest planned number of replicas. # [kinds]
    """

    def __init__(self, fleet: FleetPlan) -> None:
        self.fleet = fleet
        self.has_schedule = abs(fleet.edges_s[-1] - 60 * DAY_MIN) <= fleet.interval_s
        self.factor = max(1.0, fleet.load_factor)
        self.rates = tuple(_mixed(kind.rates_per_s, fleet) for kind in fleet.kinds)
        counts = np.asarray([interval.replicas for interval in fleet.intervals])
        self.least, self.most = tuple(counts.min(axis=0).tolist()), tuple(counts.max(axis=0).tolist())
        able = [number for number, rate in enumerate(self.rates) if rate > 0 and self.most[number]]
        self.marginal = min(
            able or [0], key=lambda number: fleet.kinds[number].price_per_hour / (self.rates[number] or 1)
        )

    def scheduled(self, kind: int, now_s: float) -> int:
        """Return the number of replicas that must run now, so that those planned within a start's time serve then.
        Without a schedule, it is the least planned one.
        """
        if not self.has_schedule:
            return self.least[kind]
        step_s, lead_s = self.fleet.interval_s, self.fleet.kinds[kind].start_s
        times = [*np.arange(now_s, now_s + lead_s, step_s).tolist(), now_s + lead_s]
        return max(self.fleet.interval_at(time_s).replicas[kind] for time_s in times)

    def spans(self, kind: int) -> Iterator[tuple[int, int, int]]:
        """Return the minutes (begin, end) of a UTC day with more than the least number of replicas, and this number."""
        begin_s = (self.fleet.begin_s or 0.0) % (60 * DAY_MIN)

        def most(minute: int) -> int:  # what must start within a minute starts with it
            return max(self.scheduled(kind, 60.0 * minute - begin_s + within_s) for within_s in (0.0, 59.0))

        for count, each in groupby(range(DAY_MIN), most):
            span = list(each)
            if count > self.least[kind]:
                yield span[0], span[-1] + 1, count

    def wanted(self, now_s: float, load_per_s: float) -> tuple[int, ...]:
        counts = [self.scheduled(kind, now_s) for kind in range(len(self.rates))]
        others = sum(n * rate for i, (n, rate) in enumerate(zip(counts, self.rates, strict=True)) if i != self.marginal)
        if self.rates[self.marginal] > 0:
            rest = ceil((self.factor * load_per_s - others) / self.rates[self.marginal] - SPARED)
            counts[self.marginal] = max(counts[self.marginal], rest)
        return tuple(counts)


def _mixed(rates: Sequence[float], fleet: FleetPlan) -> float:
    """Return a replica's rate when requests come as they do over the day, given its rate for each of the lengths."""
    shares = [(each.rate_per_s, rates[each.lengths]) for each in fleet.intervals if each.rate_per_s > 0]
    if not shares or min(rate for _, rate in shares) <= 0:
        return 0.0
    return sum(load for load, _ in shares) / sum(load / rate for load, rate in shares)


class Follower:
    """What Prometheus and KEDA make of a fleet's rule at each sample: more replicas at once, fewer after a while."""

    def __init__(self, fleet: FleetPlan) -> None:
        self._scaling = Scaling(fleet)
        kind = fleet.kinds[self._scaling.marginal]
        self._lead_s, self._stable_s = kind.start_s, max(each.start_s + each.drain_s for each in fleet.kinds)
        self._arrived, self._wanted = deque[LoadSample](), deque[tuple[float, tuple[int, ...]]]()

    def __call__(self, sample: LoadSample) -> WantedReplicas:
        self._arrived.append(sample)
        while self._arrived[0].now_s <= sample.now_s - RATE_S:
            self._arrived.popleft()
        seconds = sum(each.seconds for each in self._arrived)
        load = sum(each.num_requests for each in self._arrived) / seconds + sample.waiting / self._lead_s
        self._wanted.append((sample.now_s, self._scaling.wanted(sample.now_s, load)))
        while self._wanted[0][0] < sample.now_s - self._stable_s:
            self._wanted.popleft()
        most = np.max([counts for _, counts in self._wanted], axis=0)
        return WantedReplicas(tuple(most.tolist()), load)
