"""The run by counts of a plan's requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from xgpt.core import policies
from xgpt.core.schema import Plan, StageLane
from xsimulator.costs.step_cost import LaneCost
from xsimulator.counts import one_lane_arrivals
from xsimulator.counts.arrivals import Kv, Run, Stream
from xsimulator.counts.compiled import is_kept
from xsimulator.counts.one_lane_arrivals import MANY, OneLaneRun
from xsimulator.counts.two_lane_arrivals import TwoLaneRun
from xsimulator.forecast import FORECASTS


def is_compiled() -> bool:
    """Whether runs of one lane begin at once: the first ones on a machine are compiled."""
    return is_kept(one_lane_arrivals.run)


def counted_run(
    plan: Plan, lanes: Mapping[StageLane, LaneCost], stream: Stream, *, is_logged: bool = False
) -> Run | None:
    """Return one replica's compiled run; None: counts do not tell, or its rule goes by the clock.

    Args:
        lanes: what the plan's lanes cost.
        is_logged: keep what each step did.
    """
    if not is_counted(plan):
        return None
    schedule = policies.build(plan)
    pool, by_use = schedule.pool, plan.admission.kv == "quantile"
    kv = Kv(pool.kv_blocks, plan.block_size, by_use)
    if isinstance(schedule, policies.TwoLane):
        return TwoLaneRun(schedule.settings, lanes["encode"], lanes["decode"], kv, stream, is_logged=is_logged)
    assert isinstance(schedule, policies.OneLane)
    settings = schedule.settings
    if by_use:
        settings = replace(settings, max_batch=min(settings.max_batch or MANY, pool.max_running or MANY))
    return OneLaneRun(settings, lanes["both"], kv, stream, is_logged=is_logged)


def is_counted(plan: Plan) -> bool:
    """Whether a plan has a compiled run."""
    if plan.admission.order != "fcfs" or getattr(plan.policy, "slack", None) is not None:
        return False
    if plan.admission.kv == "reserve":
        return True
    mixes = plan.engine is None or plan.engine.mixes
    return (
        FORECASTS[plan.policy.kind].stations.admits_each_step
        and mixes
        and getattr(plan.policy, "microbatches", None) == 1
        and not plan.model.is_encoder_decoder
    )
