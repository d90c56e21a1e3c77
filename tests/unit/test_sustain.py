"""Arrival rates: who sustains them, with how few devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.contract.scenarios import problem
from xgpt.errors import InfeasibleError
from xgpt.schema import Plan
from xscheduler.schedule import Scheduler

BOUND_S = 8.0
KINDS = ("chunked", "orca")


def sustaining(rate: float, max_devices: int | None = None) -> Plan:
    of = problem("opt-13b", "a40x4", "summarization", BOUND_S)
    plans = Scheduler(replace(of, max_devices=max_devices)).sustaining(KINDS, rate)
    return max(plans.values(), key=lambda plan: plan.estimate.throughput_rps)


def test_a_sustained_rate_is_under_the_highest_one() -> None:
    plan = sustaining(5.0)
    e = plan.estimate
    assert e.max_arrival_rate_per_s is not None
    assert 5.0 <= e.max_arrival_rate_per_s <= e.throughput_rps
    assert plan.search.method == "grid"


def test_more_devices_sustain_what_fewer_do_not() -> None:
    with pytest.raises(InfeasibleError, match="arrival_rate_per_s") as failure:
        sustaining(20.0, max_devices=1)
    assert failure.value.binding == "arrival_rate_per_s"
    plan = sustaining(20.0)
    assert plan.replicas * sum(stage.tp for stage in plan.stages) > 1


def test_the_plan_under_a_bound_knows_its_highest_rate() -> None:
    of = problem("llama-3.1-8b", "h200x1", "orca", 4.0)
    scheduler = Scheduler(of)
    plan = scheduler.with_max_arrival_rate(scheduler.best(("orca",)))
    rate = plan.estimate.max_arrival_rate_per_s
    assert rate is not None
    assert 0 < rate <= plan.estimate.throughput_rps
