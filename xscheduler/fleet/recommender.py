"""Compute from samples of the load the number of replicas of each kind that a fleet should have now.

The recommender reads no clock and starts nothing. `xgpt.autoscaling` publishes its numbers for an autoscaler.
`simulate_day` follows them in simulated time, where replicas take time to start and to end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, log, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InfeasibleError
from xgpt.core.schema.fleet import FleetPlan
from xgpt.core.workload import standard_deviation
from xscheduler.fleet.day_load import ALIKE
from xscheduler.fleet.load_forecast import LoadForecast
from xscheduler.fleet.replica_counts import DeviceLimit, FleetProblem, solve_fleet
from xsimulator.fleet import Replica, Requests

Ints = npt.NDArray[np.int64]

STEP_S = 300.0
"""Longest time step of the recommender's own plan for the near future."""
NUM_STEPS = 6
DEVIATIONS = 1.0
"""Reserve for the forecast's error, as a number of standard errors."""
BACKLOG_SHARE = 0.5
"""If the fleet can clear a backlog within this share of the latency bound, the backlog is attributed to chance. If the
backlog is larger, enough replicas are added to clear it within the lead time.
"""
HYSTERESIS = 0.03
"""Replicas are removed only if the remaining ones can serve a load that exceeds the need by this share."""
LEAST_LENGTHS = 50
"""Smallest number of requests from which mean lengths are computed."""


@dataclass(frozen=True)
class LoadSample:
    """A sample of the load, taken at regular intervals.

    Attributes:
        now_s: seconds since the planned day began.
        seconds: time since the previous sample.
        ready: number of replicas of each kind that serve now. None means unknown: replicas then count as serving once
            they were recommended long enough ago. # [kinds]
        input_mean, output_mean: recent mean lengths. None means that they are unknown, since there were too few
            requests.
    """

    now_s: float
    seconds: float
    num_requests: float
    waiting: float = 0.0
    ready: Sequence[int] | None = None
    input_mean: float | None = None
    output_mean: float | None = None
    num_lengths: int = 0


class WantedReplicas(NamedTuple):
    """The number of replicas that a fleet should have.

    Attributes:
        need_per_s: highest load, in requests a second, that is expected before replicas ordered now would serve.
        held_per_s: load, in requests a second, that the previously recommended replicas can serve.
    """

    replicas: tuple[int, ...]
    need_per_s: float
    held_per_s: float


class Recommender:
    """Recommends the number of a fleet's replicas at every sample of the load.

    A higher number is recommended immediately. A lower number is recommended only after it would have been enough for
    as long as a replica takes to start and to end.
    """

    def __init__(self, fleet: FleetPlan, limits: Sequence[DeviceLimit] = (), look_s: float = 15.0) -> None:
        self._fleet, self._limits = fleet, tuple(limits)
        self._lead_s = max(kind.start_s for kind in fleet.kinds) + look_s
        self.forecast = LoadForecast(fleet, self._lead_s)
        self._step_s = min(fleet.interval_s, STEP_S)
        both = [
            [(lengths.mean, standard_deviation(lengths)) for lengths in (one.input, one.output)]
            for one in fleet.lengths
        ]
        self._logs = np.asarray([[log(of_mean) for of_mean, _ in one] for one in both])
        """Logarithms of the mean lengths. # [lengths, 2]"""
        self._spreads = np.asarray([[deviation / of_mean for of_mean, deviation in one] for one in both])
        self._fewer_since_s: float | None = None
        self._change_s = max(kind.start_s + kind.drain_s for kind in fleet.kinds)
        self._ordered_s: list[list[float]] = []
        """For each kind, the times at which its replicas were first recommended, in ascending order."""

    def as_planned(self, now_s: float, ready: Sequence[int] | None = None) -> WantedReplicas:
        """Return the planned replicas for this time of day, but for each kind at least as many as were recommended
        before. Before the first recommendation, the replicas that are ready count as recommended.
        """
        planned = np.asarray(self._fleet.interval_at(now_s).replicas)
        if not self._ordered_s and ready is not None:
            self._order(np.asarray(ready), -np.inf)
        if self._ordered_s:
            planned = np.maximum(planned, self._present())
        self._order(planned, now_s)
        kept = float(np.asarray(self._rates_of(self._fleet.interval_at(now_s).lengths)) @ planned)
        return WantedReplicas(tuple(planned.tolist()), self.forecast.rate, kept)

    def recommend(self, sample: LoadSample) -> WantedReplicas:
        now_s = sample.now_s
        self.forecast.look(now_s, sample.seconds, sample.num_requests)
        if not self._ordered_s:
            first = sample.ready if sample.ready is not None and any(sample.ready) else None
            self._order(np.asarray(self._fleet.interval_at(now_s).replicas if first is None else first), -np.inf)
        present = self._present()
        problem = self._problem(sample, present)
        wanted = self._wanted(problem)
        more, fewer = np.maximum(wanted - present, 0), np.maximum(present - wanted, 0)
        kept, need = float(problem.rates[0] @ present), float(problem.needs[0])
        leaving: list[tuple[int, float]] = []
        if not fewer.any():
            self._fewer_since_s = None
        elif self._fewer_since_s is None:
            self._fewer_since_s = now_s
        if self._fewer_since_s is not None:
            if now_s - self._fewer_since_s >= self._change_s:
                if not more.any():  # their replacements must be ready first
                    leaving = self._leaving(sample, fewer, problem)
            elif kept >= need:  # the other fleet may be cheaper only because of noise
                more = np.zeros_like(more)
        for kind, ordered_s in leaving:
            self._ordered_s[kind].remove(ordered_s)
        self._order(self._present() + more, now_s)
        return WantedReplicas(tuple(self._present().tolist()), need, kept)

    def _present(self) -> Ints:
        return np.asarray([len(times) for times in self._ordered_s])

    def _order(self, replicas: Ints, now_s: float) -> None:
        self._ordered_s = self._ordered_s or [[] for _ in self._fleet.kinds]
        for times, count in zip(self._ordered_s, replicas.tolist(), strict=True):
            times += [now_s] * (count - len(times))

    def _problem(self, sample: LoadSample, present: Ints) -> FleetProblem:
        """The problem's first step ends when replicas ordered at the next sample would begin to serve."""
        fleet, lead_s = self._fleet, self._lead_s
        edges = [0.0, *(lead_s + i * self._step_s for i in range(NUM_STEPS))]
        spans = list(pairwise(edges))
        needs = np.asarray([self.forecast.most(*span, DEVIATIONS, fleet.load_factor) for span in spans])
        rates = np.asarray([self._rates(sample, span[0]) for span in spans])
        bound_s = fleet.constraint.latency_bound_s or fleet.constraint.ttft_s or self._change_s
        kept = float(rates[0] @ present)
        needs[0] += max(0.0, sample.waiting - BACKLOG_SHARE * bound_s * kept) / lead_s
        return FleetProblem(
            needs=needs,
            rates=rates,
            prices=np.asarray([kind.price_per_hour for kind in fleet.kinds]),
            start_costs=np.asarray([kind.change_cost for kind in fleet.kinds]),
            hours=np.full(NUM_STEPS, self._step_s / 3600),
            least_stay=max(1, ceil(fleet.least_stay_s / self._step_s)),
            least=fleet.least_replicas,
            limits=self._limits,
            before=present,
        )

    def _rates(self, sample: LoadSample, ahead_s: float) -> tuple[float, ...]:
        """Return the rate that a replica of each kind serves with the planned lengths or, if other lengths are
        observed, with the most similar of the day's groups of lengths.
        """
        group = self._fleet.interval_at(sample.now_s + ahead_s).lengths
        if sample.input_mean is not None and sample.output_mean is not None:
            apart = np.abs(self._logs - np.log([sample.input_mean, sample.output_mean]))
            chance = 2 * self._spreads[group] / sqrt(max(sample.num_lengths, 1))
            if (apart[group] > ALIKE + chance).any():
                group = int(apart.sum(axis=1).argmin())
        return self._rates_of(group)

    def _rates_of(self, group: int) -> tuple[float, ...]:
        return tuple(kind.rates_per_s[group] for kind in self._fleet.kinds)

    def _wanted(self, problem: FleetProblem) -> Ints:
        while True:
            try:
                return solve_fleet(problem).replicas[0]
            except InfeasibleError:
                problem = replace(problem, needs=0.95 * problem.needs)
                if problem.needs.max() < 1e-3:
                    return np.zeros(len(problem.prices), int)

    def _leaving(self, sample: LoadSample, fewer: Ints, problem: FleetProblem) -> list[tuple[int, float]]:
        starts_s = [kind.start_s for kind in self._fleet.kinds]
        ready = np.asarray(
            [
                sum(sample.now_s - time_s >= start_s for time_s in times)
                for times, start_s in zip(self._ordered_s, starts_s, strict=True)
            ]
            if sample.ready is None
            else sample.ready
        )
        each = sorted(
            (number < ready[kind], -time_s, kind)
            for kind, times in enumerate(self._ordered_s)
            for number, time_s in enumerate(times)
        )
        leaving, fewer = [], fewer.copy()
        for is_ready, negative_s, kind in each:
            ordered_s = -negative_s
            stays = is_ready and sample.now_s - ordered_s - starts_s[kind] < self._fleet.least_stay_s
            without = ready - (np.arange(len(ready)) == kind) * is_ready
            enough = problem.rates[0] @ without >= (1 + HYSTERESIS) * problem.needs[0]
            if fewer[kind] and not stays and (enough or not is_ready):
                ready = without
                fewer[kind] -= 1
                leaving.append((kind, ordered_s))
        return leaving


LENGTHS_S = 600.0
"""Mean lengths are computed from the requests of this time span."""

Recommend = Callable[[LoadSample], WantedReplicas]


@dataclass
class _SimulatedReplica:
    kind: int
    ordered_s: float
    ready_s: float
    leaves_s: float = float("inf")


@dataclass(frozen=True)
class RecommendedDay:
    """A fleet's replicas during a day, and their cost.

    Attributes:
        device_hours, cost: totals of all replicas, each counted from its order to its end.
        samples: (time in s, number of serving replicas, need in requests/s) at each sample.
    """

    replicas: tuple[Replica, ...]
    device_hours: float
    cost: float
    samples: tuple[tuple[float, int, float], ...]


def simulate_day(
    fleet: FleetPlan, requests: Requests, seconds: float, recommend: Recommend, look_s: float, first: Sequence[int]
) -> RecommendedDay:
    """Return the replicas of a day on which the fleet follows the recommendation at every sample of the load.

    Waiting requests are modelled as a fluid queue, to which arrivals beyond the capacity of ready replicas are added.
    """
    all_: list[_SimulatedReplica] = [
        _SimulatedReplica(kind, 0.0, 0.0) for kind, count in enumerate(first) for _ in range(count)
    ]
    waiting, kept = 0.0, []
    count = int(np.ceil(seconds / look_s))
    edges = np.searchsorted(requests.arrivals_s, look_s * np.arange(count + 1))
    back = np.searchsorted(requests.arrivals_s, look_s * np.arange(count + 1) - LENGTHS_S)
    for i in range(1, count + 1):
        now_s = i * look_s
        arrived = int(edges[i] - edges[i - 1])
        group = fleet.interval_at(now_s).lengths
        serving = [one.kind for one in all_ if one.ready_s <= now_s < one.leaves_s]
        capacity = sum(fleet.kinds[kind].rates_per_s[group] for kind in serving)
        waiting = max(0.0, waiting + arrived - capacity * look_s)
        recent = slice(back[i], edges[i])
        tells = edges[i] - back[i] >= LEAST_LENGTHS
        sample = LoadSample(
            now_s,
            look_s,
            arrived,
            waiting,
            tuple(serving.count(kind) for kind in range(len(fleet.kinds))),
            float(requests.inputs[recent].mean()) if tells else None,
            float(requests.outputs[recent].mean()) if tells else None,
            int(edges[i] - back[i]),
        )
        found = recommend(sample)
        kept.append((now_s, len(serving), found.need_per_s))
        _follow(fleet, all_, found.replicas, now_s)
    return RecommendedDay(_served(all_), *_spent(fleet, all_, seconds), tuple(kept))


def _follow(fleet: FleetPlan, all_: list[_SimulatedReplica], wanted: Sequence[int], now_s: float) -> None:
    for kind, number in enumerate(wanted):
        present = [one for one in all_ if one.kind == kind and one.leaves_s > now_s]
        present.sort(key=lambda one: (one.ready_s <= now_s, -one.ordered_s))
        for one in present[: max(0, len(present) - number)]:
            one.leaves_s = now_s
        missing = max(0, number - len(present))
        all_ += [_SimulatedReplica(kind, now_s, now_s + fleet.kinds[kind].start_s) for _ in range(missing)]


def _served(all_: Sequence[_SimulatedReplica]) -> tuple[Replica, ...]:
    served = [Replica(one.kind, one.ready_s, one.leaves_s) for one in all_ if one.ready_s < one.leaves_s]
    return tuple(sorted(served, key=lambda replica: replica.from_s))


def _spent(fleet: FleetPlan, all_: Sequence[_SimulatedReplica], seconds: float) -> tuple[float, float]:
    device_hours = cost = 0.0
    for one in all_:
        kind = fleet.kinds[one.kind]
        drained_s = one.leaves_s + (kind.drain_s if one.ready_s < one.leaves_s else 0.0)
        hours = max(0.0, min(drained_s, seconds) - one.ordered_s) / 3600
        device_hours += hours * kind.num_devices
        cost += hours * kind.price_per_hour
    return device_hours, cost
