"""fleet.json: the number of replicas of each plan in each interval of a day."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from xgpt.core.schema.base import Frozen
from xgpt.core.schema.constraint import Constraint
from xgpt.core.schema.plan import Plan
from xgpt.core.schema.workload import Workload


class ReplicaKind(Frozen):
    """A kind of replica: one plan on some devices."""

    name: str
    """Name of the kind: cluster, and number of devices."""
    plan: Plan
    """The plan of one replica."""
    price_per_hour: PositiveFloat
    """Price of one replica for an hour; without prices, its number of devices."""
    rates_per_s: tuple[NonNegativeFloat, ...]
    """Highest arrival rate of one replica that keeps the bounds, under each of the fleet's lengths."""
    start_s: NonNegativeFloat
    """Time from ordering a replica until it serves: starting, and loading weights."""
    drain_s: NonNegativeFloat
    """Time from the last request that a replica takes until its requests have ended."""

    @property
    def num_devices(self) -> int:
        """Number of devices of one replica."""
        return self.plan.devices_per_replica

    @property
    def change_cost(self) -> float:
        """Cost of starting and stopping a replica: the price of the time in which it takes no requests."""
        return self.price_per_hour * (self.start_s + self.drain_s) / 3600


class FleetInterval(Frozen):
    """The load of an interval, and the replicas that hold it."""

    rate_per_s: NonNegativeFloat
    """Mean number of requests that arrive in a second."""
    peak_per_s: NonNegativeFloat
    """Mean rate of the interval's busiest third, for which the fleet is planned."""
    lengths: NonNegativeInt
    """Index of the lengths of its requests in the fleet's `lengths`."""
    replicas: tuple[NonNegativeInt, ...]
    """Replicas of each kind."""
    share_kept: float | None = None
    """Share of its requests that keep the bounds, simulated; None: there are none."""


class FleetFigures(Frozen):
    """The cost of a fleet over the day, and the share of requests that keep the bounds."""

    cost: NonNegativeFloat
    """Cost of all replicas, including the time in which they start and drain."""
    device_hours: NonNegativeFloat
    """Device hours, including the same time."""
    starts: NonNegativeInt
    """Replicas started during the day."""
    share_kept: float
    """Share of all requests of the day that keep the bounds with the headroom left free, by simulation."""
    share_within: float
    """Share of them that keep the bounds themselves, the headroom used up."""


class ConstantFleet(Frozen):
    """The cheapest fleet that never changes."""

    replicas: tuple[NonNegativeInt, ...]
    """Replicas of each kind."""
    figures: FleetFigures
    """Its cost, and the share of requests that keep the bounds."""


class FleetPlan(Frozen):
    """The whole of fleet.json: for each interval of a day how many replicas of which plan hold its load at least cost.

    The day begins with its first interval's fleet already there; that start costs nothing.
    """

    schema_version: Literal[1] = 1
    """Version of this format."""
    name: str
    """Name of the day's load."""
    constraint: Constraint
    """The bounds; the quantile is the share of all requests of the day that must keep them."""
    interval_s: PositiveFloat
    """Length of an interval."""
    least_stay_s: NonNegativeFloat
    """Least time for which a started replica stays."""
    least_replicas: NonNegativeInt
    """Least number of replicas at any time."""
    load_factor: PositiveFloat
    """Multiple of the load that replicas are planned to hold: the least that keeps the share in simulation."""
    kinds: tuple[ReplicaKind, ...] = Field(min_length=1)
    """Kinds of replicas."""
    lengths: tuple[Workload, ...] = Field(min_length=1)
    """The different lengths of requests during the day."""
    intervals: tuple[FleetInterval, ...] = Field(min_length=1)
    """The day's intervals, in order."""
    planned: FleetFigures
    """The planned fleet."""
    constant: ConstantFleet
    """The cheapest fleet that never changes, for comparison."""
    least_cost: NonNegativeFloat
    """Lower bound on the cost of any fleet that holds the planned load: changes are free and take no time."""
    gap: NonNegativeFloat
    """Largest share by which the planned cost can exceed the clairvoyant optimum, all changes paid."""
    num_requests: PositiveInt
    """Number of simulated requests."""
    planning_s: NonNegativeFloat
    """Time that planning took."""
    verifying_s: NonNegativeFloat
    """Time that simulating the day took."""

    @property
    def day_s(self) -> float:
        """Length of the day."""
        return self.interval_s * len(self.intervals)

    def interval_at(self, time_s: float) -> FleetInterval:
        """Return the interval of a time since the day's beginning; days repeat."""
        return self.intervals[int(time_s % self.day_s // self.interval_s)]

    @model_validator(mode="after")
    def _check(self) -> FleetPlan:
        for i, interval in enumerate(self.intervals):
            if len(interval.replicas) != len(self.kinds):
                raise ValueError(
                    f"intervals: number {i} has {len(interval.replicas)} counts for {len(self.kinds)} kinds"
                )
            if interval.lengths >= len(self.lengths):
                raise ValueError(f"intervals: number {i} has lengths {interval.lengths} of {len(self.lengths)}")
        for kind in self.kinds:
            if len(kind.rates_per_s) != len(self.lengths):
                raise ValueError(
                    f"kinds: {kind.name} has {len(kind.rates_per_s)} rates for {len(self.lengths)} lengths"
                )
            if kind.plan.replicas != 1:
                raise ValueError(f"kinds: {kind.name} has a plan of {kind.plan.replicas} replicas; it must be of one")
        return self
