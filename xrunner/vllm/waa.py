"""Run WAA on several vLLMs, one for each lane or, if several groups encode side by side, one for each group: each
request moves from the encode lane to the decode lane.

The two-lane rule decides which prompts the encode lane encodes together, and holds them back until the decode lane can
decode all of them. vLLM's connector moves a request's K/V. When the prompt has been encoded, the encode lane passes the
K/V to the connector. The connector reports where the K/V are, unless the decode lane can find them from the prompt.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xgpt.core import policies
from xgpt.core.errors import InputError
from xgpt.core.policies import Request, Step
from xgpt.core.processes import free_port
from xgpt.core.schema import LaneName, Plan
from xrunner.channel.messages import Began, Cancel, Down, Follow, Refused, Rested, Room, Stepped, Submit, Up
from xrunner.generation import Generation, Token
from xrunner.vllm.channel import Host, Lanes
from xrunner.vllm.command import NIXL_PORT_VARIABLE, Launch, launch_lane

NIXL = {"kv_connector": "NixlConnector"}
"""Connector that sends K/V from GPU to GPU. Each request contains the encode lane's address."""
FILES = "kv"
PRUNE_S = 10.0


@dataclass(slots=True)
class _Inside:
    """A request from its arrival to its end.

    Attributes:
        transfer: where the request's K/V are, as the encode lane's connector reports to the decode lane's. None means
            that the connector has reported nothing.
    """

    request: Generation
    arrived_s: float
    lane: LaneName | None = None
    group: int = 0
    transfer: dict[str, Any] | None = None
    has_token: bool = False


@dataclass(slots=True)
class _Batch:
    step: Step
    missing: set[int]


def hosts_of(plan: Plan) -> list[Host]:
    encode: list[Host] = [("encode", group) for group in range(plan.prefill_groups)]
    return [*encode, ("decode", 0)]


def check_waa(plan: Plan) -> None:
    if plan.admission.kv != "reserve":
        says = "a vLLM for each lane can only reserve K/V: plan with `kv=reserve`"
        raise InputError("plan.admission.kv", plan.admission.kv, says)
    if plan.replicas > 1:
        says = f"vLLM runs only one replica of waa: plan for {plan.devices_per_replica} devices, and start several"
        raise InputError("plan.replicas", plan.replicas, says)
    for lane, group in hosts_of(plan):
        launch_lane(plan, lane, NIXL, group)


def connector_of(plan: Plan, directory: Path) -> dict[str, Any]:
    """Return the connector that moves K/V: from GPU to GPU on GPUs, and through files on CPUs, which are only for
    trials.
    """
    if plan.cluster.device.type == "gpu":
        return NIXL
    at = {"shared_storage_path": str(directory / FILES)}
    return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": at}


def waa_launches(plan: Plan, directory: Path) -> list[Launch]:
    commands = []
    for lane, group in hosts_of(plan):
        config = {"front": str(directory), "lane": lane}
        started = launch_lane(plan, lane, connector_of(plan, directory), group, config=config)
        commands.append(replace(started, variables=started.variables | {NIXL_PORT_VARIABLE: str(free_port())}))
    return commands


class WaaLanes(Lanes):
    def __init__(self, plan: Plan, directory: str, has_ended: Callable[[], bool]) -> None:
        super().__init__(directory, hosts_of(plan), 0, has_ended)
        self._schedule, self._has_groups = policies.build(plan), plan.prefill_groups > 1
        self._inside: dict[int, _Inside] = {}
        self._batches: list[_Batch] = []
        self._untold: deque[Up] = deque()
        self._files = Path(directory) / FILES
        self._pruned_s = 0.0

    def send(self, message: Down, lane: LaneName = "both", group: int = 0) -> None:
        if lane != "both":
            super().send(message, lane, group)
            return
        match message:
            case Submit():
                self._submit(message.generation)
            case Cancel():
                self._take_out(message.id)
                self._untold.append(Rested(self._room_taken))  # there may be no later step to report this
            case Follow():
                self._untold.append(Refused("vLLM cannot change to another plan on several devices"))
        self._advance()

    @property
    def _room_taken(self) -> Room:
        pool = self._schedule.pool
        return Room(pool.reserved_blocks, 0, pool.num_preemptions)

    def receive(self) -> Up | None:
        return self._untold.popleft() if self._untold else super().receive()

    def _submit(self, request: Generation) -> None:
        now_ns = time.perf_counter_ns()
        # Memory is reserved for the longest output, since this rule cannot see how the decode lane uses its memory.
        size = len(request.prompt), request.max_output
        known = Request(request.id, *size, now_ns, request.deadline_ns, account=request.account)
        if not self._schedule.pool.can_ever_fit(known):  # the encode lane's memory is too small for the prompt
            self._untold.append(Stepped([Token(request.id, 0, "error")], [], None))
            return
        self._inside[request.id] = _Inside(request, now_ns / 1e9)
        self._schedule.submit(known)

    def stepped(self, lane: LaneName, message: Stepped) -> Stepped:
        tokens: list[Token] = []
        for token in message.tokens:
            if (inside := self._inside.get(token.id)) is None:
                continue
            if lane == "encode" and token.finish == "length":
                # The encode lane's token is not used, since the decode lane generates it again.
                inside.lane, inside.transfer = None, message.transfers.get(token.id)
                self._has_been_encoded(token.id)
                continue
            inside.has_token = True
            if token.finish is not None or lane == "encode":
                inside.lane = None
                self._take_out(token.id)
            tokens.append(token if lane == "decode" else Token(token.id, 0, "error", error=token.error))
        # Both lanes report a request's arrival and end, but the record must have each only once.
        once: dict[str, Any] = {"finished": ()} if lane == "encode" else {"arrivals": ()}
        records = [record._replace(**once) for record in message.records]
        self._advance()
        return Stepped(tokens, records, self._room_taken)

    def _has_been_encoded(self, id_: int) -> None:
        for batch in list(self._batches):
            batch.missing.discard(id_)
            if not batch.missing:
                self._batches.remove(batch)
                self._schedule.settle(batch.step, ())

    def _take_out(self, id_: int) -> None:
        inside = self._inside.pop(id_, None)
        if inside is None:
            return
        if inside.lane is not None:
            self.send(Cancel(id_), inside.lane, inside.group)
        self._schedule.cancel(id_)
        self._has_been_encoded(id_)

    def _advance(self) -> None:
        schedule = self._schedule
        for id_ in schedule.expire(time.perf_counter_ns()):
            del self._inside[id_]
        while (step := schedule.next_step("transfer")) is not None:
            schedule.settle(step, ())
            for id_ in step.transfer:
                if (inside := self._inside.get(id_)) is not None:
                    inside.lane, inside.group = "decode", 0
                    # Only the encode lane's connector, never a client, states where K/V are.
                    self.send(Submit(inside.request, inside.transfer), "decode")
        while (step := schedule.next_step("encode")) is not None:
            ids = [chunk.id for chunk in step.encode]
            self._batches.append(_Batch(step, set(ids)))
            self._untold.append(Began(ids))
            for id_ in ids:
                inside = self._inside[id_]
                inside.lane, inside.group = "encode", step.microbatch if self._has_groups else 0
                # NixlConnector stores K/V only for requests with this parameter.
                only_first = Submit(Generation(id_, inside.request.prompt, 1), {"do_remote_decode": True})
                self.send(only_first, "encode", inside.group)
        self._prune()

    def _prune(self) -> None:
        now_s = time.perf_counter()
        if now_s < self._pruned_s + PRUNE_S or not self._files.is_dir():
            return
        self._pruned_s = now_s
        waiting = (inside.arrived_s for inside in self._inside.values() if not inside.has_token)
        oldest = time.time() - (now_s - min(waiting, default=now_s)) - PRUNE_S
        with suppress(OSError):
            for path in self._files.iterdir():
                if path.stat().st_mtime < oldest:
                    shutil.rmtree(path, ignore_errors=True)
