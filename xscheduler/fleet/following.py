"""Simulate a day on which a fleet follows a rule of scaling. Replicas take time to start and to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from xgpt.core.load import KeptByWindow
from xgpt.core.schema.fleet import FleetPlan
from xsimulator.fleet import Replica, Requests


@dataclass(frozen=True)
class LoadSample:
    """A sample of the load, taken at regular intervals."""

    now_s: float
    seconds: float
    num_requests: float
    waiting: float
    ready: Sequence[int]


class WantedReplicas(NamedTuple):
    replicas: tuple[int, ...]
    need_per_s: float


Recommend = Callable[[LoadSample], WantedReplicas]


@dataclass
class _SimulatedReplica:
    kind: int
    ordered_s: float
    ready_s: float
    leaves_s: float = float("inf")


@dataclass(frozen=True)
class FollowedDay:
    """A fleet's replicas during a day, and their cost.

    Attributes:
        samples: (time in s, number of serving replicas, need in requests/s) at each sample.
    """

    replicas: tuple[Replica, ...]
    device_hours: float
    cost: float
    samples: tuple[tuple[float, int, float], ...]


LOOK_S = 15.0
"""Seconds between two samples: the interval at which Prometheus evaluates rules, and KEDA polls."""


@dataclass(frozen=True)
class FollowedFleet:
    """The result of a day on which a fleet followed its schedule, if it has one, and the rule.

    Attributes:
        share_kept: share of requests that keep the bounds less the headroom.
        within: shares of requests that keep the bounds, of the day and by interval.
    """

    fleet: FleetPlan
    day: FollowedDay
    num_requests: int
    share_kept: float
    within: KeptByWindow
    has_schedule: bool = True

    @property
    def holds(self) -> bool:
        """Whether the wanted share keeps the bounds, of the day and, if the fleet is planned so, in each interval."""
        wanted = self.fleet.constraint.quantile
        return self.within.holds(wanted) if self.fleet.slo_window == "interval" else self.within.share >= wanted

    @property
    def figures(self) -> dict[str, float | str | None]:
        worst = self.within.worst
        return {
            "requests": self.num_requests,
            "share_kept": self.share_kept,
            "share_within": self.within.share,
            "worst_interval": None if worst is None else worst.name,
            "worst_share_within": self.within.worst_share,
            "holds": self.holds,
            "has_schedule": self.has_schedule,
            "device_hours": self.day.device_hours,
            "replicas": len(self.day.replicas),
            **({"cost": self.day.cost} if self.fleet.is_priced else {}),
        }


def simulate_day(
    fleet: FleetPlan,
    requests: Requests,
    seconds: float,
    recommend: Recommend,
    look_s: float,
    first: Sequence[int],
    later_s: float = 0.0,
) -> FollowedDay:
    """Return the replicas of a day on which the fleet follows the recommendation at every sample of the load.

    Waiting requests are modelled as a fluid queue, to which arrivals beyond the capacity of ready replicas are added.

    Args:
        later_s: how much later than the fleet's day this one begins, by the clock.
    """
    all_: list[_SimulatedReplica] = [
        _SimulatedReplica(kind, 0.0, 0.0) for kind, count in enumerate(first) for _ in range(count)
    ]
    waiting, kept = 0.0, []
    count = int(np.ceil(seconds / look_s))
    edges = np.searchsorted(requests.arrivals_s, look_s * np.arange(count + 1))
    for i in range(1, count + 1):
        now_s, arrived = i * look_s, int(edges[i] - edges[i - 1])
        group = fleet.interval_at(later_s + now_s).lengths
        serving = [one.kind for one in all_ if one.ready_s <= now_s < one.leaves_s]
        capacity = sum(fleet.kinds[kind].rates_per_s[group] for kind in serving)
        waiting = max(0.0, waiting + arrived - capacity * look_s)
        ready = tuple(serving.count(kind) for kind in range(len(fleet.kinds)))
        found = recommend(LoadSample(later_s + now_s, look_s, arrived, waiting, ready))
        kept.append((now_s, len(serving), found.need_per_s))
        _follow(fleet, all_, found.replicas, now_s)
    return FollowedDay(_served(all_), *_spent(fleet, all_, seconds), tuple(kept))


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
