"""Keep a fleet to a live load: observations enter, the replicas to start and to drain leave.

The controller reads no clock and starts nothing: a driver observes the world, asks it, and carries out its orders
(`xgpt.operating.drivers`), on the simulated clock and on the real one. It remembers nothing of the fleet itself, only
of the load: replicas are read from the world at every look, so a restarted controller continues with those that are
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, log, sqrt
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InfeasibleError
from xgpt.core.schema.fleet import FleetPlan
from xgpt.core.workload import standard_deviation
from xscheduler.fleet.day import ALIKE
from xscheduler.fleet.forecast import Forecast
from xscheduler.fleet.sizes import DeviceLimit, FleetProblem, solve_fleet

Ints = npt.NDArray[np.int64]

STEP_S = 300.0
"""Longest step of the time that is planned ahead."""
NUM_STEPS = 6
DEVIATIONS = 1.0
"""Standard errors of the forecast that are held in reserve."""
BACKLOG_SHARE = 0.5
"""Share of the latency bound in which the fleet works off random backlogs; larger ones are worked off in
the lead time."""
HYSTERESIS = 0.03
"""Share by which the remaining replicas must exceed the need before others leave."""
LEAST_LENGTHS = 50
"""Least number of requests from which lengths are observed."""

State = Literal["starting", "ready", "draining"]


class ReplicaState(NamedTuple):
    """A replica's state.

    Attributes:
        kind: number of its kind.
        since_s: when its state began, on the controller's clock.
    """

    name: str
    kind: int
    state: State
    since_s: float


@dataclass(frozen=True)
class Look:
    """An observation of the world.

    Attributes:
        now_s: seconds since the planned day began.
        seconds: time since the previous look.
        num_requests: requests that have arrived since.
        waiting: waiting requests beyond those that replicas can take and keep the bounds.
        input_mean, output_mean: recent mean lengths; None: too few requests.
        num_told: number of these requests.
    """

    now_s: float
    seconds: float
    num_requests: int
    waiting: float
    replicas: Sequence[ReplicaState]
    input_mean: float | None = None
    output_mean: float | None = None
    num_told: int = 0


class Orders(NamedTuple):
    """What a driver is to do.

    Attributes:
        start: replicas of each kind to start. # [kinds]
        drain: names of replicas that take no further requests, and end once they have none.
        need_per_s: highest load, in requests a second, until an order given now would serve.
        reason: in words.
    """

    start: tuple[int, ...]
    drain: tuple[str, ...]
    need_per_s: float
    reason: str


class Controller:
    """Decides at every look which replicas to start and to drain.

    Args:
        limits: limits on devices that kinds share.
        look_s: time between looks.
    """

    def __init__(self, fleet: FleetPlan, limits: Sequence[DeviceLimit] = (), look_s: float = 15.0) -> None:
        self._fleet, self._limits, self._look_s = fleet, tuple(limits), look_s
        self._lead_s = max(kind.start_s for kind in fleet.kinds) + look_s
        self.forecast = Forecast(fleet, self._lead_s)
        self._step_s = min(fleet.interval_s, STEP_S)
        both = [[(of.mean, standard_deviation(of)) for of in (one.input, one.output)] for one in fleet.lengths]
        self._logs = np.asarray([[log(of_mean) for of_mean, _ in one] for one in both])
        """Logarithms of the mean lengths. # [lengths, 2]"""
        self._spreads = np.asarray([[deviation / of_mean for of_mean, deviation in one] for one in both])
        self._fewer_since_s: float | None = None
        self._change_s = max(kind.start_s + kind.drain_s for kind in fleet.kinds)

    def decide(self, look: Look) -> Orders:
        """Return the orders for now."""
        fleet = self._fleet
        self.forecast.look(look.now_s, look.seconds, look.num_requests)
        kept = [replica for replica in look.replicas if replica.state != "draining"]
        present = np.bincount([replica.kind for replica in kept], minlength=len(fleet.kinds))
        problem = self._problem(look, present)
        wanted = self._wanted(problem)
        start = np.maximum(wanted - present, 0)
        fewer = np.maximum(present - wanted, 0)
        held = float(problem.rates[0] @ present)
        needs = f"{problem.needs[0]:.3g} requests/s to hold, {held:.3g} held"
        drain: tuple[str, ...] = ()
        if not fewer.any():
            self._fewer_since_s = None
        elif self._fewer_since_s is None:
            self._fewer_since_s = look.now_s
        if self._fewer_since_s is not None:
            if look.now_s - self._fewer_since_s >= self._change_s:
                drain = self._leaving(kept, fewer, look.now_s, problem, start)
            elif held >= problem.needs[0]:  # another fleet would be cheaper, but perhaps only by noise: start none
                start = np.zeros_like(start)
        return Orders(tuple(start.tolist()), drain, float(problem.needs[0]), needs)

    def _problem(self, look: Look, present: Ints) -> FleetProblem:
        """Return the fleet problem of the time ahead. Its first step lasts until an order at the next look
        would serve: later needs are not ordered now."""
        fleet, lead_s = self._fleet, self._lead_s
        edges = [0.0, *(lead_s + i * self._step_s for i in range(NUM_STEPS))]
        spans = list(pairwise(edges))
        needs = np.asarray([self.forecast.most(*span, DEVIATIONS, fleet.load_factor) for span in spans])
        rates = np.asarray([self._rates(look, span[0]) for span in spans])
        bound_s = fleet.constraint.latency_bound_s or fleet.constraint.ttft_s or self._change_s
        held = float(rates[0] @ present)
        needs[0] += max(0.0, look.waiting - BACKLOG_SHARE * bound_s * held) / lead_s
        return FleetProblem(
            needs=needs,
            rates=rates,
            prices=np.asarray([kind.price_per_hour for kind in fleet.kinds]),
            start_costs=np.asarray([kind.change_cost for kind in fleet.kinds]),
            hours=self._step_s / 3600,
            least_stay=max(1, ceil(fleet.least_stay_s / self._step_s)),
            least=fleet.least_replicas,
            limits=self._limits,
            before=present,
        )

    def _rates(self, look: Look, ahead_s: float) -> tuple[float, ...]:
        """Return the rate that a replica of each kind holds, under the planned lengths unless others are observed."""
        group = self._fleet.interval_at(look.now_s + ahead_s).lengths
        if look.input_mean is not None and look.output_mean is not None:
            apart = np.abs(self._logs - np.log([look.input_mean, look.output_mean]))
            chance = 2 * self._spreads[group] / sqrt(max(look.num_told, 1))
            if (apart[group] > ALIKE + chance).any():
                group = int(apart.sum(axis=1).argmin())
        return tuple(kind.rates_per_s[group] for kind in self._fleet.kinds)

    def _wanted(self, problem: FleetProblem) -> Ints:
        """Return the wanted replicas of each kind; if devices do not suffice, those that hold the most."""
        while True:
            try:
                return solve_fleet(problem).replicas[0]
            except InfeasibleError:
                problem = replace(problem, needs=0.95 * problem.needs)
                if problem.needs.max() < 1e-3:
                    return np.zeros(len(problem.prices), int)

    def _leaving(
        self, kept: Sequence[ReplicaState], fewer: Ints, now_s: float, problem: FleetProblem, start: Ints
    ) -> tuple[str, ...]:
        """Return the replicas to drain: first those that do not serve yet, then the newest.

        Replicas of other kinds that replace them must be ready first.
        """
        names = []
        by_age = sorted(kept, key=lambda replica: (replica.state == "ready", -replica.since_s))
        left = np.bincount([r.kind for r in kept if r.state == "ready"], minlength=len(fewer))
        for replica in by_age:
            stays = replica.state == "ready" and now_s - replica.since_s < self._fleet.least_stay_s
            if not fewer[replica.kind] or stays:
                continue
            without = left.copy()
            without[replica.kind] -= replica.state == "ready"
            enough = problem.rates[0] @ without >= (1 + HYSTERESIS) * problem.needs[0]
            if start.any() or (replica.state == "ready" and not enough):
                continue
            left, fewer = without, fewer - (np.arange(len(fewer)) == replica.kind)
            names.append(replica.name)
        return tuple(names)
