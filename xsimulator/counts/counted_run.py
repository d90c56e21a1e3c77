"""Create the run by counts that simulates a plan. `python -m xsimulator.counts.counted_run` compiles all runs, and
stores them on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from xgpt.core import policies
from xgpt.core.policies.lane_settings import LaneSettings
from xgpt.core.schema import Curve, LayerTimes, PlanDraft, Profile, StageLane, Surface
from xgpt.core.trace_blocks import TracePrefixes
from xgpt.resolve import load_model
from xsimulator.costs.step_cost import LaneCost
from xsimulator.counts import homes, one_lane_arrivals, routed, two_lane_arrivals
from xsimulator.counts.arrivals import NONE, TURN, Kv, Run, Stream, TurnStream
from xsimulator.counts.chains import chains_of
from xsimulator.counts.compiled import is_kept
from xsimulator.counts.one_lane_arrivals import MANY, OneLaneRun
from xsimulator.counts.two_lane_arrivals import TwoLaneRun
from xsimulator.forecast import FORECASTS
from xsimulator.stages import whole

MOST_KEYS = 50_000_000
"""Runs in which requests share more blocks are not counted, since they would take more than a gigabyte."""


def is_compiled() -> bool:
    """Return whether the code for runs of one lane has been compiled."""
    return is_kept(one_lane_arrivals.run)


def counted_run(
    plan: PlanDraft,
    lanes: Mapping[StageLane, LaneCost],
    stream: Stream,
    prefixes: TracePrefixes | None = None,
    *,
    is_logged: bool = False,
) -> Run | None:
    """Return one replica's compiled run, or None if the plan cannot be simulated by counts (see `is_counted`).

    Args:
        prefixes: the blocks that requests share. They are counted under orca and chunked with order fcfs.
    """
    if (schedule := _counted_schedule(plan)) is None:
        return None
    pool, by_use = schedule.pool, plan.admission.kv == "quantile"
    kv = Kv(pool.kv_blocks, plan.block_size, by_use, *pool.spare)
    if isinstance(schedule, policies.TwoLane):
        if prefixes is not None:
            return None
        return TwoLaneRun(schedule.settings, lanes["encode"], lanes["decode"], kv, stream, is_logged=is_logged)
    settings = schedule.settings
    if by_use:
        settings = replace(settings, max_batch=min(settings.max_batch or MANY, pool.max_running or MANY))
    run = OneLaneRun(settings, lanes["both"], kv, stream, plan.patience_ns, is_logged=is_logged)
    if prefixes is not None:
        chains = chains_of(prefixes, np.asarray(stream.inputs), np.asarray(stream.outputs), plan.block_size)
        if max(chains.num_keys, chains.num_named) > MOST_KEYS or not settings.mix or plan.admission.order != "fcfs":
            return None
        run.in_chains(chains)
    return run


def is_counted(plan: PlanDraft) -> bool:
    """Return whether a plan can be simulated by counts and does not need the simulated engine.

    Runs by counts implement the rules of `policies.OneLane` and `policies.TwoLane` for the settings that
    `OneLaneRun.known` and `TwoLaneRun.known` name. The plan must also have order fcfs, and either reserved K/V memory,
    or a decoder-only model under orca or chunked with a single micro-batch. Under orca and chunked with reserved K/V
    memory, it may also have order in-time.
    """
    return _counted_schedule(plan) is not None


def _counted_schedule(plan: PlanDraft) -> policies.OneLane | policies.TwoLane | None:
    order = plan.admission.order
    if order not in ("fcfs", "in-time") or not _counts_kv(plan):
        return None
    schedule = policies.build(plan)
    if order == "in-time" and not _counts_in_time(plan, schedule):
        return None
    if type(schedule) is policies.OneLane and _knows(OneLaneRun.known, schedule.settings):
        return schedule
    if type(schedule) is policies.TwoLane and _knows(TwoLaneRun.known, schedule.settings):
        return schedule
    return None


def _counts_in_time(plan: PlanDraft, schedule: policies.Schedule) -> bool:
    if type(schedule) is not policies.OneLane or plan.admission.kv != "reserve" or plan.constraint.classes:
        return False
    settings = schedule.settings
    return settings.mix and not settings.whole_prompts and not settings.batch_wait_steps


def _knows(known: frozenset[str], settings: Any) -> bool:
    return all(field.name in known or getattr(settings, field.name) == field.default for field in fields(settings))


def _counts_kv(plan: PlanDraft) -> bool:
    if plan.admission.kv != "quantile":
        return plan.admission.kv == "reserve"
    return (
        FORECASTS[plan.policy.kind].stations.admits_each_step
        and getattr(plan.policy, "microbatches", None) == 1
        and not plan.model.is_encoder_decoder
    )


def main() -> None:
    entries = (one_lane_arrivals.run, two_lane_arrivals.run, routed.run_routed, homes.route)
    if all(map(is_kept, entries)):
        return
    spec = load_model("opt-125m")[0]
    curve = Curve(points=(1, 2), seconds=(1e-3, 2e-3))
    surface = Surface(batches=(1, 2), lengths=(1, 2), seconds=((1e-3, 2e-3), (2e-3, 4e-3)))
    profile = Profile(
        source="analytic",
        model=spec.shape,
        dtype="float32",
        device="cpu",
        layers=(LayerTimes(rest=curve, encode_attention=surface, decode_attention=surface),),
        embedding=curve,
        head=curve,
        overhead=curve,
        kv_transfer=curve,
        spread=0.0,
    )
    cost, request = LaneCost(spec, profile, whole(spec)), (Kv(8, 16), Stream([1], [1], 1, [0]))
    lane = LaneSettings(mix=True, max_batch=1)
    OneLaneRun(lane, cost, *request).run()
    TwoLaneRun(policies.TwoLaneSettings(1.0, 1, 8, 1), cost, cost, *request).run()
    number, none = np.ones(1, np.int64), np.zeros((2, 3), np.int32)
    homes.route(number, number - 1, number - 1, 1, 1, none, number, 0.0, 1, 1)
    turns = np.ones(1, TURN)
    turns["session"], turns["child"] = 0, NONE
    runs = [OneLaneRun(lane, cost, *request) for _ in range(2)]
    routed.RoutedRun(runs, TurnStream(turns, 0), routed.BY_SESSION, 0.0).run()


if __name__ == "__main__":
    main()
