"""Fleets for tests: one kind of replica that holds a rate, over a day of given rates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import xgpt
from xgpt.core.schema import Plan
from xgpt.core.schema.fleet import ConstantFleet, FleetFigures, FleetInterval, FleetPlan, ReplicaKind


@cache
def _plan() -> Plan:
    return xgpt.plan(
        model="llama-3.1-8b", cluster="h200x1", workload="orca", latency_bound_s=8, policy="orca", fix={"max_batch": 16}
    )


def fleet_of(
    rates: Sequence[float], ready: Sequence[float] = (2.0,), *, start_s: float = 60.0, least_stay_s: float = 0.0
) -> FleetPlan:
    """A fleet of a kind for each rate that a replica holds, over five minutes for each rate of the day."""
    plan = _plan()
    kinds = tuple(
        ReplicaKind(
            name=f"kind{number}",
            plan=plan,
            price_per_hour=1.0 + 0.9 * number,
            rates_per_s=(rate,),
            start_s=start_s,
            drain_s=10.0,
        )
        for number, rate in enumerate(ready)
    )
    figures = FleetFigures(cost=1, device_hours=1, starts=0, share_kept=1, share_within=1)
    none = (0,) * (len(ready) - 1)
    return FleetPlan(
        name="test",
        constraint=plan.constraint,
        interval_s=300,
        least_stay_s=least_stay_s,
        least_replicas=1,
        load_factor=1.0,
        kinds=kinds,
        lengths=(plan.workload,),
        intervals=tuple(
            FleetInterval(
                rate_per_s=rate, peak_per_s=rate, lengths=0, replicas=(max(1, -int(-rate // ready[0])), *none)
            )
            for rate in rates
        ),
        planned=figures,
        constant=ConstantFleet(replicas=(1, *none), figures=figures),
        least_cost=1,
        gap=0,
        num_requests=1,
        planning_s=0,
        verifying_s=0,
    )
