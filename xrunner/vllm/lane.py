"""The lane of a plan that vLLM runs, and how it changes while requests run."""

from __future__ import annotations

from dataclasses import dataclass

from xgpt.core.errors import InputError
from xgpt.core.policies import OneLane, Pool
from xgpt.core.policies.build import queue_of
from xgpt.core.policies.build import settings_of as lane_settings_of
from xgpt.core.policies.lane_settings import LaneSettings
from xgpt.core.schema import Plan, WaaSettings

LEAST_KV = 0.95
"""Share of a plan's K/V memory that vLLM must have to run it: it sizes that memory itself."""


def settings_of(plan: Plan) -> LaneSettings:
    """The rule's settings.

    Raises:
        InputError: vLLM cannot run the plan's policy.
    """
    policy = plan.policy
    if isinstance(policy, WaaSettings):
        raise InputError("plan.policy", policy.kind, "each of its lanes is a vLLM of its own, by vLLM's own scheduler")
    if policy.holds_finished:
        raise InputError(
            "plan.policy", policy.kind, "vLLM frees a slot as soon as its request ends; take another policy"
        )
    return lane_settings_of(plan, policy)


@dataclass(frozen=True, slots=True)
class VllmRoom:
    """What vLLM has for requests.

    Attributes:
        num_blocks: K/V blocks; block_size: tokens each, whatever it is in the plan.
        max_running: requests that run at once at most.
    """

    num_blocks: int
    block_size: int
    max_running: int


def build_lane(plan: Plan, room: VllmRoom, blocks: int | None = None) -> OneLane:
    """Return the schedule of a plan over the K/V memory that vLLM has, with no request in it.

    Args:
        blocks: those that requests share; by default as many as the plan counts on, or a few less if vLLM has no more.

    Raises:
        InputError: vLLM cannot run the plan's policy, or has too little K/V memory (`LEAST_KV`).
    """
    if blocks is None:
        blocks = min(stage.kv_blocks for stage in plan.stages) * plan.block_size // room.block_size
        blocks = min(blocks, max(room.num_blocks, int(LEAST_KV * blocks)))
    if room.num_blocks < blocks:
        raise InputError("plan.stages.kv_blocks", blocks, f"vLLM has {room.num_blocks} of {room.block_size} tokens")
    most = min(room.max_running, plan.admission.max_running or room.max_running)
    admission = plan.admission
    pool = Pool(
        blocks,
        room.block_size,
        kv=admission.kv,
        max_running=most,
        waiting=queue_of(plan),
    )
    return OneLane(settings_of(plan), pool)


def change_lane(lane: OneLane, plan: Plan, room: VllmRoom) -> OneLane:
    """Follow another plan from the next step on; all running and waiting requests stay.

    Returns:
        The lane that the steps come from now: the same one, or where no request is in it, that of the new plan.

    Raises:
        InputError: the plan differs in what cannot change while requests run; nothing has changed then.
    """
    if lane.pool.is_idle:
        return build_lane(plan, room)
    if not lane.apply(build_lane(plan, room, lane.pool.kv_blocks)):
        raise InputError("plan", plan.policy.kind, "other micro-batches or another promise of K/V take an empty engine")
    return lane
