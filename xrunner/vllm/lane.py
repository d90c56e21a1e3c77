"""The lane of a plan that vLLM runs, and how it changes while requests run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xgpt.core.errors import InputError
from xgpt.core.policies import OneLane, Pool
from xgpt.core.policies.build import queue_of
from xgpt.core.policies.build import settings_of as lane_settings_of
from xgpt.core.policies.lane_settings import LaneSettings
from xgpt.core.schema import Plan, WaaSettings
from xrunner.channel.messages import Followed, Refused, Room

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


class PlannedLane:
    """The lane of the plan that runs, and of one that waits until no request is inside.

    Args:
        plan, room: as of `build_lane`.
        send: tells the front.
    """

    def __init__(self, plan: Plan, room: VllmRoom, send: Callable[[Followed | Refused], None]) -> None:
        self.lane = build_lane(plan, room)
        self._room, self._send = room, send
        self._next: OneLane | None = None

    @property
    def is_emptying(self) -> bool:
        """Whether a plan waits: no further request is to be submitted to the lane."""
        return self._next is not None

    def go_over_to(self, plan: Plan) -> None:
        """Follow another plan: from the next step on with all requests, or once those inside have ended."""
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
        """Change to the lane that waits if no request is in the one that runs."""
        if self._next is not None and self.lane.pool.is_idle:
            self.lane, self._next = self._next, None
            self._send(Followed())

    @property
    def taken(self) -> Room:
        """What the requests inside have taken."""
        pool = self.lane.pool
        return Room(pool.reserved_blocks, pool.kept_blocks, pool.num_preemptions, self.is_emptying)
