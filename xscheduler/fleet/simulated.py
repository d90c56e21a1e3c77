"""The simulated clock of a fleet's controller: a day's requests, replicas that take time to start and to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from xgpt.core.schema.fleet import FleetPlan
from xscheduler.fleet.controller import LEAST_LENGTHS, Look, Orders, ReplicaState
from xsimulator.fleet import Replica, Requests

LENGTHS_S = 600.0
"""Time over whose requests lengths are observed."""

Decide = Callable[[Look], Orders]


@dataclass
class _Simulated:
    """A replica on the simulated clock."""

    kind: int
    ordered_s: float
    ready_s: float
    leaves_s: float = float("inf")

    def state(self, name: str, now_s: float) -> ReplicaState:
        if self.leaves_s <= now_s:
            return ReplicaState(name, self.kind, "draining", self.leaves_s)
        if self.ready_s <= now_s:
            return ReplicaState(name, self.kind, "ready", self.ready_s)
        return ReplicaState(name, self.kind, "starting", self.ordered_s)


@dataclass(frozen=True)
class ControlledDay:
    """What a controller has made of a day.

    Attributes:
        replicas: the times at which each took requests.
        device_hours, cost: of all replicas, from their orders to their ends.
        held: (time, serving replicas, need) at each look.
    """

    replicas: tuple[Replica, ...]
    device_hours: float
    cost: float
    held: tuple[tuple[float, int, float], ...]


def control_day(
    fleet: FleetPlan, requests: Requests, seconds: float, decide: Decide, look_s: float, first: Sequence[int]
) -> ControlledDay:
    """Run a controller over a day.

    Waiting requests are a fluid queue: those beyond what ready replicas hold under the day's lengths add up.

    Args:
        first: replicas of each kind at the beginning.
    """
    all_: list[_Simulated] = [_Simulated(kind, 0.0, 0.0) for kind, count in enumerate(first) for _ in range(count)]
    waiting, held = 0.0, []
    count = int(np.ceil(seconds / look_s))
    edges = np.searchsorted(requests.arrivals_s, look_s * np.arange(count + 1))
    back = np.searchsorted(requests.arrivals_s, look_s * np.arange(count + 1) - LENGTHS_S)
    for i in range(1, count + 1):
        now_s = i * look_s
        arrived = int(edges[i] - edges[i - 1])
        states = [one.state(str(n), now_s) for n, one in enumerate(all_)]
        present = [state for state in states if state.state != "draining" or now_s < state.since_s + look_s]
        group = fleet.interval_at(now_s).lengths
        ready = [state for state in present if state.state == "ready"]
        capacity = sum(fleet.kinds[state.kind].rates_per_s[group] for state in ready)
        waiting = max(0.0, waiting + arrived - capacity * look_s)
        recent = slice(back[i], edges[i])
        tells = edges[i] - back[i] >= LEAST_LENGTHS
        look = Look(
            now_s,
            look_s,
            arrived,
            waiting,
            [state for state in present if state.state != "draining"],
            float(requests.inputs[recent].mean()) if tells else None,
            float(requests.outputs[recent].mean()) if tells else None,
            int(edges[i] - back[i]),
        )
        orders = decide(look)
        held.append((now_s, len(ready), orders.need_per_s))
        for name in orders.drain:
            all_[int(name)].leaves_s = now_s
        for kind, number in enumerate(orders.start):
            all_ += [_Simulated(kind, now_s, now_s + fleet.kinds[kind].start_s) for _ in range(number)]
    return ControlledDay(_served(all_), *_spent(fleet, all_, seconds), tuple(held))


def _served(all_: Sequence[_Simulated]) -> tuple[Replica, ...]:
    served = [Replica(one.kind, one.ready_s, one.leaves_s) for one in all_ if one.ready_s < one.leaves_s]
    return tuple(sorted(served, key=lambda replica: replica.from_s))


def _spent(fleet: FleetPlan, all_: Sequence[_Simulated], seconds: float) -> tuple[float, float]:
    device_hours = cost = 0.0
    for one in all_:
        kind = fleet.kinds[one.kind]
        drained_s = one.leaves_s + (kind.drain_s if one.ready_s < one.leaves_s else 0.0)
        hours = max(0.0, min(drained_s, seconds) - one.ordered_s) / 3600
        device_hours += hours * kind.num_devices
        cost += hours * kind.price_per_hour
    return device_hours, cost
