"""Build the schedule of a plan, for the simulated and the real engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from xgpt.core.errors import InputError
from xgpt.core.policies.admission import Queue, make_queue
from xgpt.core.policies.in_time import FirstTokens
from xgpt.core.policies.lane_settings import LaneSettings, as_run_by, lane_settings
from xgpt.core.policies.orders import SortedOrder
from xgpt.core.policies.pool import Pool
from xgpt.core.policies.row_pool import RowPool, RowSchedule
from xgpt.core.policies.rule import Rule
from xgpt.core.policies.schedule import OneLane, Schedule
from xgpt.core.policies.slack import Slack, StepClock
from xgpt.core.policies.waa import TwoLane, TwoLaneSettings
from xgpt.core.schema import Batching, ChunkedSettings, PlanDraft, Stage, WaaSettings
from xgpt.core.schema.policy import SingleLane
from xgpt.core.workload import decoding_share


def build(plan: PlanDraft, rule: Rule | None = None) -> Schedule:
    """Return the schedule, without requests, of one replica of a plan.

    Raises:
        InputError: the plan's stages do not match its policy, or the plan has two lanes, for which there is no `rule`.
    """
    lanes = {stage.lane for stage in plan.stages}
    wanted = set(plan.policy.lanes)
    if lanes != wanted:
        accepted = f"{plan.policy.kind} needs stages on lane {' and '.join(sorted(wanted))}: plan again"
        raise InputError("plan.stages.lane", ", ".join(sorted(lanes)), accepted)
    if isinstance(plan.policy, WaaSettings):
        if rule is not None:
            accepted = "waa has two lanes, and a rule of one's own decides the steps of one: plan with another `policy`"
            raise InputError("rule", type(rule).__name__, accepted)
        encode = [stage for stage in plan.stages if stage.lane == "encode"]
        settings = TwoLaneSettings(
            encode_tokens=plan.estimate.encode_tokens,
            encode_stages=len(encode),
            encode_blocks=_fewest_blocks(encode),
            max_decode_batch=plan.policy.max_decode_batch,
            decode_batch=plan.estimate.decode_batch,
            adjustment=plan.policy.adjustment_percent / 100,
            decode_microbatches=plan.policy.decode_microbatches,
            buffer_iterations=plan.policy.buffer_iterations,
            encoder_only=plan.model.is_encoder_decoder,
            reuse_is_planned=plan.estimate.reuse is not None,
        )
        return TwoLane(settings, _pool(plan, (stage for stage in plan.stages if stage.lane == "decode")), plan.stages)
    lane = settings_of(plan, plan.policy)
    pool = _pool(plan, plan.stages, holds_finished=lane.refill_when_empty, rule=rule)
    return OneLane(lane, pool, plan.stages, rule)


def build_rows(plan: PlanDraft, batching: Batching) -> OneLane:
    """Return the schedule, without requests, of a plan that runs whole batches in rows."""
    policy = plan.policy
    settings = None if isinstance(policy, WaaSettings) else settings_of(plan, policy)
    count = plan.num_devices
    parts = 1 if settings is None else settings.microbatches * settings.encode_parts
    if settings is None or not settings.refill_when_empty or count > 1 or parts > 1:
        found = f"{policy.kind} on {count} device{'s' if count > 1 else ''}"
        found += f", which encodes a batch in {parts} parts" if parts > 1 else ""
        accepted = f"the plan is {found}; rows need a plan of whole batches (`policy=static`) for one device"
        raise InputError("batching", batching, accepted)
    if (field := plan.model.special_attention) is not None:
        accepted = f"{plan.model.name} has model.{field}, which rows cannot run: use flat"
        raise InputError("batching", batching, accepted)
    if plan.precision.kv == "int8":
        accepted = "rows keep keys and values in float32 or bfloat16: use flat, or plan with one of these"
        raise InputError("plan.kv_dtype", plan.kv_dtype, accepted)
    if batching == "slots":
        settings = replace(settings, microbatches=_held(plan, "row_batches", 1))
    pool = RowPool(
        _fewest_blocks(plan.stages),
        plan.block_size,
        batching=batching,
        row_tokens=row_tokens(plan),
        max_running=plan.admission.max_running,
        waiting=queue_of(plan),
    )
    return RowSchedule(settings, pool, plan.stages)


def row_tokens(plan: PlanDraft) -> int:
    return _held(plan, "row_tokens", plan.workload.input.lengths[-1])


def _held(plan: PlanDraft, name: str, other: int) -> int:
    return other if plan.pinned is None else plan.pinned.fixed.get(name, other)


def settings_of(plan: PlanDraft, policy: SingleLane) -> LaneSettings:
    estimate = plan.estimate
    settings = lane_settings(policy, estimate.encode_tokens, estimate.decode_batch, decoding_share(plan.workload))
    return replace(
        as_run_by(plan.engine, settings, len(plan.stages)),
        reuse_is_planned=estimate.reuse is not None,
        slack=_slack(plan, policy),
        first_tokens=first_tokens(plan),
    )


def _slack(plan: PlanDraft, policy: SingleLane) -> Slack | None:
    budget = policy.slack if isinstance(policy, ChunkedSettings) else None
    if budget is None:
        return None
    times, tpot_ns = plan.estimate.step_times, plan.tpot_ns
    assert times is not None and tpot_ns is not None
    return Slack(budget, StepClock(times), round(budget.share * tpot_ns), len(plan.stages))


def first_tokens(plan: PlanDraft) -> FirstTokens | None:
    if plan.admission.order != "in-time":
        return None
    times, ttft_ns = plan.estimate.step_times, plan.ttft_ns
    assert times is not None and ttft_ns is not None
    at_once = min(len(plan.stages), getattr(plan.policy, "microbatches", 1))
    return FirstTokens(StepClock(times), ttft_ns, at_once)


def _pool(plan: PlanDraft, stages: Iterable[Stage], *, holds_finished: bool = False, rule: Rule | None = None) -> Pool:
    return pool_of(plan, _fewest_blocks(stages), plan.block_size, plan.admission.max_running, holds_finished, rule)


def pool_of(
    plan: PlanDraft,
    num_blocks: int,
    block_size: int,
    max_running: int | None,
    holds_finished: bool = False,
    rule: Rule | None = None,
) -> Pool:
    return Pool(
        num_blocks,
        block_size,
        kv=plan.admission.kv,
        max_running=max_running,
        holds_finished=holds_finished,
        waiting=queue_of(plan, rule),
        encoder=plan.model.is_encoder_decoder,
        spare=_spare(plan, block_size),
    )


def _spare(plan: PlanDraft, block_size: int) -> tuple[int, int]:
    engine = plan.engine
    if engine is None or plan.admission.kv != "quantile" or engine.scheduler != "own":
        return 0, 0
    return -(-engine.spare_tokens // block_size), -(-engine.spare_tokens_each // block_size)


def queue_of(plan: PlanDraft, rule: Rule | None = None) -> Queue:
    admission = plan.admission
    if rule is not None and type(rule).key is not Rule.key:
        return Queue(lambda: SortedOrder(rule.key), plan.patience_ns)
    return make_queue(admission.order, admission.row_tokens, plan.patience_ns, first_tokens(plan), admission.eta)


def _fewest_blocks(stages: Iterable[Stage]) -> int:
    """Return the smallest number of K/V blocks of a stage, since every request needs blocks on every stage."""
    return min(stage.kv_blocks for stage in stages)
