"""WAA on two vLLMs as the engine of our endpoint: each request moves from the encode lane's to the decode lane's.

Our two-lane rule decides which prompts the encode lane takes together, and holds them back until all of them fit under
the decode lane's cap. A request's K/V moves by vLLM's connector: the encode lane leaves it there when it ends the
prompt, and says where, unless the decode lane finds it by the prompt alone.
"""

from __future__ import annotations

import logging
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from xgpt.core import policies
from xgpt.core.errors import InputError
from xgpt.core.policies import Request, Step
from xgpt.core.schema import LaneName, Plan
from xrunner.executor import Use
from xrunner.generation import Generation, Token
from xrunner.vllm.channel import Up, VllmFailed, VllmOutput, VllmStepped, VllmSubmit
from xrunner.vllm.command import NIXL_PORT_VARIABLE, Launch, launch_lane
from xrunner.vllm.engine import InsideVllm, OnStep, repeats, request_of, resumes, takes_seeds, tokens_of
from xrunner.vllm.instance import Instances

logger = logging.getLogger(__name__)

NIXL = {"kv_connector": "NixlConnector"}
"""From GPU to GPU; the address of the encode lane is told with each request."""
LANES: tuple[LaneName, ...] = ("encode", "decode")
FILES = "kv"
PRUNE_S = 10.0
"""Between two looks at files of K/V that no request waits for any more."""


@dataclass(slots=True)
class _Inside:
    """A request from its arrival to its end.

    Attributes:
        lane: whose vLLM has it; None: neither.
        transfer: what the encode lane's connector says of its K/V, for that of the decode lane; None: nothing.
    """

    request: VllmSubmit
    arrived_s: float
    lane: LaneName | None = None
    transfer: dict[str, Any] | None = None
    has_token: bool = False


@dataclass(slots=True)
class _Batch:
    """An encode step under way, and those of its prompts that have not ended."""

    step: Step
    missing: set[int]


def check_waa(plan: Plan) -> None:
    """Refuse what two vLLMs cannot run.

    Raises:
        InputError: says why.
    """
    if len(plan.policy.lanes) == 1:
        raise InputError("plan.policy", plan.policy.kind, "only waa has two lanes")
    if plan.admission.kv != "reserve":
        raise InputError("plan.admission.kv", plan.admission.kv, "on two vLLMs memory is promised by reserve")
    if plan.replicas > 1:
        says = f"two vLLMs are one replica of waa; plan for {plan.devices_per_replica} devices, and start one for each"
        raise InputError("plan.replicas", plan.replicas, says)
    for lane in LANES:
        launch_lane(plan, lane, NIXL)


def connector_of(plan: Plan, directory: Path) -> dict[str, Any]:
    """What K/V goes by: from GPU to GPU, and on CPUs, to try it, through files."""
    if plan.cluster.device.type == "gpu":
        return NIXL
    at = {"shared_storage_path": str(directory / FILES)}
    return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": at}


def launches(plan: Plan, directory: Path) -> list[Launch]:
    """How to start both lanes."""
    commands = []
    for lane in LANES:
        config = {"front": str(directory), "lane": lane}
        started = launch_lane(plan, lane, connector_of(plan, directory), config=config)
        commands.append(replace(started, variables=started.variables | {NIXL_PORT_VARIABLE: str(_free_port())}))
    return commands


def _free_port() -> int:
    """Return a port of this machine alone that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class WaaEngine:
    """A WAA plan in two vLLMs.

    Raises:
        InputError: vLLM cannot run the plan.
        MachineError: vLLM is not here, or does not start.
    """

    is_emptying = is_changing = scores_prompts = False

    def __init__(self, plan: Plan, *, on_step: OnStep | None = None) -> None:
        check_waa(plan)
        self.takes_seeds = takes_seeds(plan)
        self._listeners = [] if on_step is None else [on_step]
        self.on_refused: Callable[[str], None] = lambda reason: None
        self._start(plan)

    def _start(self, plan: Plan) -> None:
        self._schedule = policies.build(plan)
        self._inside: dict[int, _Inside] = {}
        self._batches: list[_Batch] = []
        self._broken: list[int] = []
        """Requests that a lane has given up, and that are to be told so."""
        self._vllm = Instances(lambda directory: launches(plan, directory))
        self._files = self._vllm.directory / FILES
        self._pruned_s = 0.0
        self.pool = InsideVllm(self._schedule.pool.kv_blocks, self._schedule.pool.block_size)

    def listen(self, on_step: OnStep) -> None:
        self._listeners.append(on_step)

    def resumes(self, generation: Generation) -> bool:
        return resumes(generation, seeded=self.takes_seeds)

    def repeats(self, generation: Generation) -> bool:
        return repeats(generation, seeded=self.takes_seeds)

    def submit(self, generation: Generation) -> None:
        request = request_of(generation, seeded=self.takes_seeds)
        now_ns = time.perf_counter_ns()
        # Memory is set aside for all that may come: what the decode lane does with it this rule does not see.
        size = len(request.prompt), request.max_output
        known = Request(request.id, *size, now_ns, request.deadline_ns, account=request.account)
        if not self._schedule.pool.can_ever_fit(known):
            self._broken.append(request.id)  # the encode lane's memory is too small for the prompt
            return
        self._inside[request.id] = _Inside(request, now_ns / 1e9)
        self.pool.waiting[request.id] = None
        self._schedule.submit(known)
        self._advance()

    def cancel(self, id_: int) -> None:
        self._leave(id_)
        self._advance()

    def go_over_to(self, plan: Plan) -> None:
        """Refuses: vLLM keeps a plan for several devices as it is."""
        raise InputError("plan", plan.policy.kind, "vLLM keeps a plan for several devices as it is")

    def fileno(self) -> int:
        return self._vllm.fileno()

    def wait(self, timeout_s: float) -> None:
        self._vllm.wait(timeout_s)

    def step(self) -> list[Token] | None:
        """Return the tokens of the decode lane's next step that has ended; None: none has since the last call.

        Raises:
            EngineLost: a vLLM has ended, or hangs.
        """
        while True:
            message = self._vllm.receive(is_busy=bool(self.pool.num_running or self.pool.num_waiting))
            if (tokens := self._take(message)) is not None or message is None:
                return tokens

    def _take(self, message: Up | None) -> list[Token] | None:
        """Note what a vLLM tells; return the tokens of a step, and the ends of requests."""
        broken, self._broken = self._broken, []
        tokens = [Token(id_, 0, "error") for id_ in broken]
        match message:
            case VllmStepped():
                tokens += self._settle(message)
            case VllmFailed():
                logger.error("vLLM has given up request %d: %s", message.id, message.reason)
                tokens += self._break(message.id)
            case _ if not tokens:
                return None
        self._advance()
        if isinstance(message, VllmStepped):
            for record in message.records:
                # A request arrives and ends once, though both lanes see it come and go.
                is_first = record.lane == "encode"
                part = record._replace(finished=()) if is_first else record._replace(arrivals=())
                for listener in self._listeners:
                    listener(part)
        return tokens

    def uses(self) -> list[Use]:
        return []

    def restart(self, plan: Plan) -> None:
        """End what is left of both vLLMs, and start them anew without requests. Raises MachineError."""
        self._vllm.close()
        self._start(plan)

    def close(self) -> None:
        self._vllm.close()

    def _settle(self, stepped: VllmStepped) -> list[Token]:
        tokens: list[Token] = []
        for output in stepped.outputs:
            if stepped.lane == "encode":
                tokens += self._encoded(output)
            elif (inside := self._inside.get(output.id)) is not None:
                inside.has_token = True
                tokens += tokens_of(output)
                if output.finish is not None:
                    inside.lane = None
                    self._leave(output.id)
        return tokens

    def _encoded(self, output: VllmOutput) -> list[Token]:
        """The encode lane has ended a prompt; its token is not used, as the decode lane makes it once more."""
        if output.finish is None or (inside := self._inside.get(output.id)) is None:
            return []
        inside.lane = None
        if output.finish != "length":
            return self._break(output.id)
        inside.transfer = output.transfer
        self._has_been_encoded(output.id)
        return []

    def _has_been_encoded(self, id_: int) -> None:
        for batch in list(self._batches):
            batch.missing.discard(id_)
            if not batch.missing:
                self._batches.remove(batch)
                self._schedule.settle(batch.step, ())

    def _break(self, id_: int) -> list[Token]:
        if id_ not in self._inside:
            return []
        self._inside[id_].lane = None
        self._leave(id_)
        return [Token(id_, 0, "error")]

    def _leave(self, id_: int) -> None:
        """A request has ended, or is taken out."""
        inside = self._inside.pop(id_, None)
        if inside is None:
            return
        if inside.lane is not None:
            self._vllm.cancel(inside.lane, id_)
        self.pool.leave(id_)
        self._schedule.cancel(id_)
        self._has_been_encoded(id_)

    def _advance(self) -> None:
        """Begin every step that can; those that have been transferred go on by themselves."""
        schedule = self._schedule
        for id_ in schedule.expire(time.perf_counter_ns()):
            del self._inside[id_]
            self.pool.leave(id_)
        while (step := schedule.next_step("transfer")) is not None:
            schedule.settle(step, ())
            for id_ in step.transfer:
                if (inside := self._inside.get(id_)) is not None:
                    inside.lane = "decode"
                    # Where its K/V is, is not the client's to say.
                    self._vllm.submit("decode", structs.replace(inside.request, transfer=inside.transfer))
        while (step := schedule.next_step("encode")) is not None:
            self._batches.append(_Batch(step, {chunk.id for chunk in step.encode}))
            for chunk in step.encode:
                inside = self._inside[chunk.id]
                inside.lane = "encode"
                self.pool.begin([chunk.id])
                # NixlConnector keeps no other K/V.
                params = {"do_remote_decode": True}
                self._vllm.submit("encode", VllmSubmit(chunk.id, inside.request.prompt, 1, transfer=params))
        self.pool.take(0, schedule.pool.reserved_blocks, schedule.pool.num_preemptions)
        self._prune()

    def _prune(self) -> None:
        """Remove K/V from the files of which every request has its first token."""
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
