"""Define fleet.json, which states how many replicas of each plan run in each interval of a day."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from xgpt.core.schema.base import Frozen
from xgpt.core.schema.constraint import Constraint
from xgpt.core.schema.plan import Plan
from xgpt.core.schema.workload import Workload

SloWindow = Literal["interval", "day"]

STARTUP_S = 60.0
"""Seconds from ordering a replica until it begins to load its weights, unless the user states them."""


class ReplicaKind(Frozen):
    """A kind of replica: one plan on some devices."""

    name: str
    """Name of the kind: the cluster and the number of devices."""
    plan: Plan
    """The plan of one replica."""
    price_per_hour: PositiveFloat
    """Price of one replica for an hour. Without device prices, this is the number of its devices."""
    rates_per_s: tuple[NonNegativeFloat, ...]
    """For each of the fleet's `lengths`, the highest arrival rate of one replica within the bounds, requests a second.
    """
    start_s: NonNegativeFloat
    """Seconds from ordering a replica until it serves, including loading weights."""
    drain_s: NonNegativeFloat
    """Seconds from the last request that a replica accepts until all its requests have ended."""

    @property
    def num_devices(self) -> int:
        """Number of devices of one replica."""
        return self.plan.devices_per_replica

    @property
    def change_cost(self) -> float:
        """Cost of starting and stopping a replica: the price of the time in which it runs but accepts no requests."""
        return self.price_per_hour * (self.start_s + self.drain_s) / 3600


class FleetInterval(Frozen):
    """The load of an interval, and the replicas that serve it."""

    rate_per_s: NonNegativeFloat
    """Mean arrival rate, requests a second."""
    peak_per_s: NonNegativeFloat
    """Mean arrival rate in the busiest third of the interval, for which the fleet is planned."""
    lengths: NonNegativeInt
    """The interval's request lengths, as an index in the fleet's `lengths`."""
    replicas: tuple[NonNegativeInt, ...]
    """Number of replicas of each kind."""
    share_kept: float | None = None
    """By simulation, the share of the interval's requests that keep bounds tightened by the headroom. None means that
    no requests arrive.
    """
    share_within: float | None = None
    """The share that keeps the full bounds. None: not known, or no requests arrive."""

    @property
    def within(self) -> float | None:
        """The share within the full bounds or, in files of earlier versions, within the tightened ones."""
        return self.share_kept if self.share_within is None else self.share_within


class FleetFigures(Frozen):
    """The cost of a fleet over the day, and the shares of requests that keep the bounds."""

    cost: NonNegativeFloat
    """Cost of all replicas, including the time in which they start and drain."""
    device_hours: NonNegativeFloat
    """Device hours of all replicas, including the time in which they start and drain."""
    starts: NonNegativeInt
    """Number of replicas that are started during the day."""
    share_kept: float
    """By simulation, the share of the day's requests that keep bounds tightened by the headroom."""
    share_within: float
    """By simulation, the share of the day's requests that keep the full bounds, without headroom."""
    confidence: float | None = None
    """Probability that the bounds are kept in the interval whose load comes nearest to its replicas' rates, by the
    errors of earlier predictions. None: these are not known.
    """


class ConstantFleet(Frozen):
    """The cheapest fleet that keeps its replicas all day."""

    replicas: tuple[NonNegativeInt, ...]
    """Number of replicas of each kind."""
    figures: FleetFigures
    """The fleet's cost, and the share of requests that keep the bounds."""


class FleetPlan(Frozen):
    """The content of fleet.json: for each interval of a day, the numbers of replicas that serve the load at the least
    cost.

    The fleet of the first interval already runs when the day begins, so its start costs nothing.
    """

    schema_version: Literal[1] = 1
    """Version of this format."""
    name: str
    """Name of the day's load."""
    constraint: Constraint
    """The bounds. The quantile is the share of requests that must keep them, of those that `slo_window` names."""
    interval_s: PositiveFloat
    """Length of an interval, in seconds. The last interval ends with the day."""
    day_s: PositiveFloat | None = None
    """Length of the day, in seconds. After this time, the day repeats. None means that the last interval is as long as
    the others.
    """
    begin_s: float | None = None
    """When the day begins, in seconds since 1970. None: not known; a schedule then begins at midnight UTC."""
    least_stay_s: NonNegativeFloat
    """Least time for which a started replica runs, in seconds."""
    least_replicas: NonNegativeInt
    """Least number of replicas at any time."""
    load_factor: PositiveFloat
    """Factor on the load for which replicas are planned: the smallest one found with which the simulated fleet keeps
    the quantile.
    """
    slo_window: SloWindow = "day"
    """Whether the quantile of requests keeps the bounds in each interval, but for chance, or of the whole day."""
    kinds: tuple[ReplicaKind, ...] = Field(min_length=1)
    """Kinds of replicas, in the order of `replicas`."""
    lengths: tuple[Workload, ...] = Field(min_length=1)
    """The distributions of request lengths during the day."""
    intervals: tuple[FleetInterval, ...] = Field(min_length=1)
    """The day's intervals, in order."""
    planned: FleetFigures
    """Figures of the planned fleet."""
    constant: ConstantFleet
    """The cheapest fleet that keeps its replicas all day, for comparison."""
    least_cost: NonNegativeFloat
    """Lower bound on the cost of any fleet for `load_factor` times the load: the cost if changes were free and
    immediate.
    """
    gap: NonNegativeFloat
    """Largest share of the planned cost, including changes, that another fleet for `load_factor` times the load of each
    interval could save.
    """
    num_requests: PositiveInt
    """Number of requests in the day's simulation."""
    planning_s: NonNegativeFloat
    """Duration of planning, in seconds."""
    verifying_s: NonNegativeFloat
    """Duration of the day's simulation, in seconds."""

    @property
    def is_priced(self) -> bool:
        """Whether any device has a price. Otherwise costs are device-hours."""
        return any(kind.plan.cluster.price_per_device_hour is not None for kind in self.kinds)

    @property
    def most_devices(self) -> int:
        """The planned fleet's devices at once, at most. Replicas start beside those that then end."""
        counts = [interval.replicas for interval in self.intervals]
        changes = zip([counts[0], *counts[:-1]], counts, strict=True)
        return max(self.devices_of(tuple(map(max, *change))) for change in changes)

    def devices_of(self, replicas: tuple[int, ...]) -> int:
        return sum(count * kind.num_devices for count, kind in zip(replicas, self.kinds, strict=True))

    @property
    def edges_s(self) -> tuple[float, ...]:
        """The times at which the intervals begin, and the end of the day, in seconds from its start."""
        return (*(self.interval_s * i for i in range(len(self.intervals))), self._seconds)

    @property
    def _seconds(self) -> float:
        return self.day_s or self.interval_s * len(self.intervals)

    def place(self, time_s: float) -> tuple[int, float]:
        """Return the number of the interval at a time, and the share of it that has passed. The time is in seconds from
        the start of the day, and days repeat.
        """
        into_s, last = time_s % self._seconds, len(self.intervals) - 1
        i = min(int(into_s // self.interval_s), last)
        start_s = self.interval_s * i
        return i, (into_s - start_s) / (self.interval_s if i < last else self._seconds - start_s)

    def in_words(self, replicas: tuple[int, ...]) -> str:
        """Return numbers of replicas as text, such as "2 h100, 1 cpu"."""
        return ", ".join(f"{count} {kind.name}" for count, kind in zip(replicas, self.kinds, strict=True) if count)

    def interval_at(self, time_s: float) -> FleetInterval:
        """Return the interval `time_s` seconds after the start of the day. Days repeat."""
        return self.intervals[self.place(time_s)[0]]

    @model_validator(mode="after")
    def _check(self) -> FleetPlan:
        if self.day_s is not None and self.day_s <= self.interval_s * (len(self.intervals) - 1):
            raise ValueError(f"day_s: {self.day_s:g} s are too few for {len(self.intervals)} intervals")
        for i, interval in enumerate(self.intervals):
            if len(interval.replicas) != len(self.kinds):
                raise ValueError(
                    f"intervals: interval {i} has {len(interval.replicas)} counts of replicas, but there are "
                    f"{len(self.kinds)} kinds"
                )
            if interval.lengths >= len(self.lengths):
                raise ValueError(
                    f"intervals: interval {i} refers to lengths {interval.lengths}, but there are only "
                    f"{len(self.lengths)}"
                )
        for kind in self.kinds:
            if len(kind.rates_per_s) != len(self.lengths):
                raise ValueError(
                    f"kinds: {kind.name} has {len(kind.rates_per_s)} rates, but there are {len(self.lengths)} lengths"
                )
            if kind.plan.replicas != 1:
                raise ValueError(f"kinds: {kind.name} has a plan of {kind.plan.replicas} replicas; it must have one")
        return self
