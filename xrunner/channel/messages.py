"""Define the messages of the channel, and their encoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from xgpt.core.errors import InputError, MachineError, XgptError
from xgpt.core.schema.step_log import StepRecord
from xrunner.executor import Use
from xrunner.generation import Generation, Token


class Submit(msgspec.Struct, tag="submit", array_like=True):
    """A request for the engine.

    Attributes:
        transfer: where the prompt's K/V are, as reported by the other lane's connector. Set only if each lane is a vLLM
            instance.
        same_prompt, same_rules: whether the message leaves out the prompt, and whether it leaves out the biases and the
            grammar, because they equal those of the previous request.
    """

    generation: Generation
    transfer: dict[str, Any] | None = None
    same_prompt: bool = False
    same_rules: bool = False


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    id: int


class Follow(msgspec.Struct, tag="follow", array_like=True):
    plan: str


class Room(NamedTuple):
    """State of the K/V memory: numbers of reserved and of cached blocks, and of preemptions so far. `is_emptying`:
    whether requests wait for another plan to be deployed.
    """

    reserved_blocks: int = 0
    kept_blocks: int = 0
    num_preemptions: int = 0
    is_emptying: bool = False


class Ready(msgspec.Struct, tag="ready", array_like=True):
    takes_seeds: bool
    scores_prompts: bool
    resumes: bool


class Alive(msgspec.Struct, tag="alive", array_like=True):
    """The engine's process is running. `uses`: how many bytes each process of the engine has sent, and for how many
    seconds it has executed steps, since its start.
    """

    uses: list[Use]


class Began(msgspec.Struct, tag="began", array_like=True):
    ids: list[int]


class Stepped(msgspec.Struct, tag="stepped", array_like=True):
    """A step has ended, or a request has ended outside a step.

    Attributes:
        transfers: where the K/V of requests are, by request id. Set only if each lane is a vLLM instance.
    """

    tokens: list[Token]
    records: list[StepRecord]
    room: Room | None
    transfers: dict[int, dict[str, Any]] = {}


class Rested(msgspec.Struct, tag="rested", array_like=True):
    room: Room


class Followed(msgspec.Struct, tag="followed", array_like=True):
    """From now on, steps follow the last plan that was sent."""


class Refused(msgspec.Struct, tag="refused", array_like=True):
    reason: str


class Failed(msgspec.Struct, tag="failed", array_like=True):
    reason: str
    exit_code: int = XgptError.exit_code
    input: tuple[str, Any, str] | None = None

    @classmethod
    def of(cls, error: Exception) -> Failed:
        if isinstance(error, InputError):
            return cls(str(error), error.exit_code, (error.field, error.value, error.accepted))
        if isinstance(error, XgptError):
            return cls(str(error), error.exit_code)
        return cls(f"{type(error).__name__}: {error}")

    @property
    def error(self) -> XgptError:
        if self.input is not None:
            return InputError(*self.input)
        return (MachineError if self.exit_code == MachineError.exit_code else XgptError)(self.reason)


Down = Submit | Cancel | Follow
Up = Ready | Alive | Began | Stepped | Rested | Followed | Refused | Failed


class _Before:
    def __init__(self) -> None:
        self.prompt: tuple[int, ...] = ()
        self.biases: tuple[tuple[int, float], ...] = ()
        self.grammar: str | None = None

    def take(self, generation: Generation) -> None:
        self.prompt = generation.prompt
        self.biases, self.grammar = generation.sampling.logit_bias, generation.sampling.grammar


class Shortening:
    """Leaves out of each request the parts that equal those of the previous request. Otherwise a request with a
    thousand choices would have a thousand copies of its prompt in the engine's memory. Each connection has one such
    object.
    """

    def __init__(self) -> None:
        self._before = _Before()

    def __call__(self, message: object) -> object:
        if not isinstance(message, Submit):
            return message
        generation, before = message.generation, self._before
        sampling = generation.sampling
        has_rules = bool(sampling.logit_bias) or sampling.grammar is not None
        same_prompt = generation.prompt is before.prompt
        same_rules = has_rules and sampling.logit_bias is before.biases and sampling.grammar is before.grammar
        before.take(generation)
        if same_prompt:
            generation = replace(generation, prompt=())
        if same_rules:
            generation = replace(generation, sampling=replace(sampling, logit_bias=(), grammar=None))
        return Submit(generation, message.transfer, same_prompt, same_rules)


class DecodeDown:
    def __init__(self) -> None:
        self._before = _Before()

    def __call__(self, content: bytes) -> Down:
        message = _decode_down(content)
        if isinstance(message, Submit):
            generation, before = message.generation, self._before
            if message.same_prompt:
                generation = replace(generation, prompt=before.prompt)
            if message.same_rules:
                sampling = replace(generation.sampling, logit_bias=before.biases, grammar=before.grammar)
                generation = replace(generation, sampling=sampling)
            before.take(generation)
            return Submit(generation, message.transfer)
        return message


encode = msgspec.msgpack.Encoder(enc_hook=str).encode
_decode_down = msgspec.msgpack.Decoder(Down).decode
decode_up = msgspec.msgpack.Decoder(Up).decode
