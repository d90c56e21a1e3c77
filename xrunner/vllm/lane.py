"""Build the lane of a plan that runs in vLLM, and change the plan while requests run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xgpt.core.errors import InputError
from xgpt.core.policies import OneLane
from xgpt.core.policies.build import pool_of
from xgpt.core.policies.build import settings_of as lane_settings_of
from xgpt.core.policies.lane_settings import LaneSettings
from xgpt.core.schema import Plan, WaaSettings
from xrunner.channel.messages import Followed, Refused, Room

LEAST_KV = 0.95
"""Least share of a plan's K/V memory with which vLLM may run the plan. vLLM itself chooses the size of its memory."""


def settings_of(plan: Plan) -> LaneSettings:
    policy = plan.policy
    if isinstance(policy, WaaSettings):
        says = "its two lanes need two vLLMs, and this is one; plan with another policy"
        raise InputError("plan.policy", policy.kind, says)
    if policy.holds_finished:
        says = "vLLM frees a slot as soon as its request ends; plan with another policy"
        raise InputError("plan.policy", policy.kind, says)
    return lane_settings_of(plan, policy)


@dataclass(frozen=True, slots=True)
class VllmRoom:
    """vLLM's limits on requests.

    Attributes:
        num_blocks: number of K/V blocks. A block has `block_size` tokens, whatever the plan's block size.
    """

    num_blocks: int
    block_size: int
    max_running: int


def build_lane(plan: Plan, room: VllmRoom, blocks: int | None = None) -> OneLane:
    """Return the schedule of a plan over vLLM's K/V memory, without requests.

    Args:
        blocks: number of blocks for requests. By default it is the plan's number, or slightly less if vLLM has fewer.

    Raises:
        InputError: vLLM cannot run the plan's policy, or has too little K/V memory (`LEAST_KV`).
    """
    if blocks is None:
        blocks = min(stage.kv_blocks for stage in plan.stages) * plan.block_size // room.block_size
        blocks = min(blocks, max(room.num_blocks, int(LEAST_KV * blocks)))
    if room.num_blocks < blocks:
        raise InputError(
            "plan.stages.kv_blocks",
            blocks,
            f"vLLM has only {room.num_blocks} K/V blocks of {room.block_size} tokens: "
            "plan with a smaller share of the memory, or let vLLM use more",
        )
    most = min(room.max_running, plan.admission.max_running or room.max_running)
    return OneLane(settings_of(plan), pool_of(plan, blocks, room.block_size, most))


class PlannedLane:
    def __init__(self, plan: Plan, room: VllmRoom, send: Callable[[Followed | Refused], None]) -> None:
        self.lane = build_lane(plan, room)
        self._room, self._send = room, send
        self._next: OneLane | None = None

    @property
    def is_emptying(self) -> bool:
        return self._next is not None

    def go_over_to(self, plan: Plan) -> None:
        try:
            lane = build_lane(plan, self._room)
        except InputError as error:
            self._send(Refused(str(error)))
            return
        self._next = lane
        if not self.lane.pool.is_idle and self.lane.apply(build_lane(plan, self._room, self.lane.pool.kv_blocks)):
            self._next = None
            self._send(Followed())
        self.go_on_if_empty()

    def go_on_if_empty(self) -> None:
        if self._next is not None and self.lane.pool.is_idle:
            self.lane, self._next = self._next, None
            self._send(Followed())

    @property
    def taken(self) -> Room:
        pool = self.lane.pool
        return Room(pool.reserved_blocks, pool.kept_blocks, pool.num_preemptions, self.is_emptying)
