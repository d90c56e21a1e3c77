"""Simulate a day on which a fleet follows the recommender. Replicas take time to start and to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from xgpt.core.schema.fleet import FleetPlan
from xscheduler.fleet.recommender import LEAST_LENGTHS, LoadSample, Recommendation
from xsimulator.fleet import Replica, Requests

LENGTHS_S = 600.0
"""Mean lengths are computed from the requests of this time span."""

Recommend = Callable[[LoadSample], Recommendation]


@dataclass
class _SimulatedReplica:
    """A replica on the simulated clock."""

    kind: int
    ordered_s: float
    ready_s: float
    leaves_s: float = float("inf")


@dataclass(frozen=True)
class RecommendedDay:
    """A fleet's replicas during a day, and their cost.

    Attributes:
        replicas: the replicas, each with the times between which it accepted requests.
        device_hours, cost: totals of all replicas, each counted from its order to its end.
        samples: (time, number of serving replicas, need) at each sample.
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

    Args:
        first: number of replicas of each kind at the start.
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
    """Start missing replicas, and end surplus replicas: first those that do not serve yet, then the newest."""
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
