"""vLLM as the engine of our endpoint: requests in, the tokens of its steps out, like `xrunner.engine.Engine`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from xgpt.core.io import dump_json
from xgpt.core.policies import Request
from xgpt.core.schema import Plan
from xrunner.channel.messages import Began, Room
from xrunner.channel.remote import Inside, OnStep
from xrunner.executor import Use
from xrunner.generation import FinishReason, Generation, Logprobs, SamplingParams, Token
from xrunner.vllm.channel import Accepted, Up, VllmFailed, VllmOutput, VllmRefused, VllmStepped, VllmSubmit
from xrunner.vllm.command import Launch, launch
from xrunner.vllm.instance import Instances
from xrunner.vllm.lane import settings_of

logger = logging.getLogger(__name__)


class Memory(NamedTuple):
    """vLLM's K/V memory, as a request finds it that is alone."""

    kv_blocks: int
    block_size: int

    @property
    def prompt_blocks(self) -> int:
        return self.kv_blocks

    def can_ever_fit(self, request: Request) -> bool:
        return -(-request.longest // self.block_size) <= self.kv_blocks


class InsideVllm(Inside):
    """The requests that vLLM has, as far as its steps have told."""

    def __init__(self, kv_blocks: int, block_size: int) -> None:
        super().__init__(Memory(kv_blocks, block_size))
        self._rooms: dict[int, Room] = {}
        """As each engine core has told."""

    def take(self, core: int, reserved_blocks: int, num_preemptions: int, kept_blocks: int = 0) -> None:
        """Note how the schedule of an engine core stands."""
        self._rooms[core] = Room(reserved_blocks, kept_blocks, num_preemptions)
        reserved, kept, preempted = (sum(room[at] for room in self._rooms.values()) for at in range(3))
        self.room = Room(reserved, kept, preempted)

    @property
    def reserved_blocks(self) -> int:
        """As of the last step; an idle engine tells nothing, and holds none."""
        return super().reserved_blocks if self.running else 0


class VllmEngine:
    """A plan of a single lane in vLLM, whose scheduler follows it (`scheduler`).

    Args:
        reuse: requests of the same API key share the K/V of what their prompts have in common.

    Raises:
        InputError: vLLM cannot run the plan.
        MachineError: vLLM is not here, or does not start.
    """

    scores_prompts = False

    def __init__(self, plan: Plan, *, on_step: OnStep | None = None, reuse: bool = True) -> None:
        self._listeners = [] if on_step is None else [on_step]
        self.on_refused: Callable[[str], None] = lambda reason: None
        self._reuse = reuse
        self._start(plan)

    def _start(self, plan: Plan) -> None:
        self._asked = self._accepted = plan
        self.takes_seeds = takes_seeds(plan)
        self._next: Plan | None = None
        """What vLLM's scheduler can adopt only when no request runs: those that arrive until then are parked."""
        self._parked: dict[int, VllmSubmit] = {}

        def launches(directory: Path) -> list[Launch]:
            path = directory / "plan.json"
            path.write_text(dump_json(plan), encoding="utf-8")
            config = {"front": str(directory), "lane": "both"}
            return [launch(plan, plan_path=str(path), config=config, reuse=self._reuse)]

        self._vllm = Instances(launches, num_cores=plan.replicas)
        (started,) = self._vllm.launches
        self.pool = InsideVllm(started.kv_blocks, started.block_size)

    def listen(self, on_step: OnStep) -> None:
        self._listeners.append(on_step)

    def resumes(self, generation: Generation) -> bool:
        return resumes(generation, seeded=self.takes_seeds)

    def repeats(self, generation: Generation) -> bool:
        return repeats(generation, seeded=self.takes_seeds)

    @property
    def is_emptying(self) -> bool:
        return self._next is not None

    @property
    def is_changing(self) -> bool:
        return self._accepted is not self._asked

    def submit(self, generation: Generation) -> None:
        request = request_of(generation, seeded=self.takes_seeds)
        if self._next is None:
            self._hand_over(request)
        else:
            self._parked[request.id] = request

    def cancel(self, id_: int) -> None:
        if self._parked.pop(id_, None) is None and self.pool.leave(id_):
            self._vllm.cancel("both", id_)
            self._go_on_if_empty()

    def go_over_to(self, plan: Plan) -> None:
        """Have steps follow another plan on the same stages: the next one, or once all that run have ended.

        Raises:
            InputError: vLLM cannot run it.
        """
        settings_of(plan)
        self._vllm.change_plan(plan)
        self._asked = plan

    def fileno(self) -> int:
        return self._vllm.fileno()

    def wait(self, timeout_s: float) -> None:
        self._vllm.wait(timeout_s)

    def step(self) -> list[Token] | None:
        """Return the tokens of the next step that has ended; None: none has since the last call.

        Raises:
            EngineLost: vLLM has ended, or hangs.
        """
        while (message := self._vllm.receive(is_busy=bool(self.pool.num_running or self.pool.num_waiting))) is not None:
            if (tokens := self._take(message)) is not None:
                return tokens
        return None

    def _take(self, message: Up) -> list[Token] | None:
        """Note what vLLM tells; return the tokens of a step, or the end of a request."""
        match message:
            case VllmStepped() as stepped:
                return self._settle(stepped)
            case Began() as began:
                self.pool.begin(began.ids)
            case VllmFailed() as failed:
                logger.error("vLLM has given up request %d: %s", failed.id, failed.reason)
                self.pool.leave(failed.id)
                self._go_on_if_empty()
                return [Token(failed.id, 0, "error")]
            case Accepted() as accepted:
                self._accepted = self._asked
                logger.info("vLLM follows a plan", extra={"fields": {"plan_sha256": accepted.plan_sha256}})
            case VllmRefused() as refused:
                logger.info("vLLM's plan waits until no request runs", extra={"fields": {"reason": refused.reason}})
                self._next = self._asked
                self._go_on_if_empty()
        return None

    def uses(self) -> list[Use]:
        return []

    def restart(self, plan: Plan) -> None:
        """End what is left of vLLM, and start it anew without requests. Raises MachineError: it does not start."""
        self._vllm.close()
        self._start(plan)

    def close(self) -> None:
        self._vllm.close()

    def _settle(self, stepped: VllmStepped) -> list[Token]:
        tokens = [token for output in stepped.outputs for token in tokens_of(output)]
        self.pool.take(stepped.core, stepped.reserved_blocks, stepped.num_preemptions, stepped.kept_blocks)
        self.pool.begin([output.id for output in stepped.outputs])
        self.pool.note(stepped.records, tokens)
        self._go_on_if_empty()
        for record in stepped.records:
            for listener in self._listeners:
                listener(record)
        return tokens

    def _hand_over(self, request: VllmSubmit) -> None:
        self.pool.waiting[request.id] = None
        self._vllm.submit("both", request)

    def _go_on_if_empty(self) -> None:
        """Where a plan waits and no request is inside: send it once more, then the requests that came meanwhile."""
        if self._next is None or self.pool.waiting or self.pool.running:
            return
        self._vllm.change_plan(self._next)
        self._next = None
        parked, self._parked = self._parked, {}
        for request in parked.values():
            self._hand_over(request)


def takes_seeds(plan: Plan) -> bool:
    """Whether vLLM can draw a request's tokens from a generator of its own.

    Where a prompt is executed in pieces it sets the generator back, which torch cannot do on CPUs: its engine ends.
    """
    return plan.cluster.device.type != "cpu"


def resumes(generation: Generation, *, seeded: bool) -> bool:
    """Return whether vLLM goes on as before if the output so far is encoded with the prompt: it has no part in
    penalties then, and draws begin anew from the seed."""
    sampling = generation.sampling
    is_penalised = sampling.presence_penalty or sampling.frequency_penalty
    return not is_penalised and not (sampling.temperature and seeded)


def repeats(generation: Generation, *, seeded: bool) -> bool:
    """Return whether vLLM makes the same tokens if a request begins anew."""
    return seeded or not generation.sampling.temperature


def request_of(generation: Generation, *, seeded: bool) -> VllmSubmit:
    """A request as a host takes it; not `seeded`: its tokens are drawn from what all requests share."""
    return VllmSubmit(
        generation.id,
        generation.prompt,
        generation.max_output,
        tuple(sorted(generation.stop_token_ids)),
        _sampling(generation.sampling, seeded=seeded),
        generation.output_length,
        generation.deadline_ns,
        generation.promised_output,
        generation.account,
    )


def _sampling(sampling: SamplingParams, *, seeded: bool) -> dict[str, Any]:
    """In vLLM's names. Greedy is as greedy whatever else is said, so no generator is kept for it."""
    given: dict[str, Any] = {"temperature": sampling.temperature}
    if sampling.temperature:
        given |= {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
        if seeded:
            given["seed"] = sampling.seed % 2**63
    given |= {"presence_penalty": sampling.presence_penalty, "frequency_penalty": sampling.frequency_penalty}
    given["repetition_penalty"] = sampling.repetition_penalty
    if sampling.logit_bias:
        given["logit_bias"] = dict(sampling.logit_bias)
    if sampling.logprobs is not None:
        given["logprobs"] = sampling.logprobs
    return given


def tokens_of(output: VllmOutput) -> list[Token]:
    """What a step has added to a request, token by token; the last says how it ended."""
    finish: FinishReason | None = None
    if output.finish is not None:
        finish = "stop" if output.finish == "stop" else "length" if output.finish == "length" else "error"
        if finish == "error" or not output.tokens:
            return [Token(output.id, 0, "error")]
    tokens = [Token(output.id, token, None) for token in output.tokens]
    if output.logprobs is not None:
        logprobs = [Logprobs(chosen, tuple(top)) for chosen, top in output.logprobs]
        tokens = [token._replace(logprobs=each) for token, each in zip(tokens, logprobs, strict=True)]
    if tokens:
        tokens[-1] = tokens[-1]._replace(finish=finish)
    return tokens
