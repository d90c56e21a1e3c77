"""The contract of an engine as the front has it: our own behind the channel, or vLLM."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Protocol

from xgpt.core.policies import Request
from xgpt.core.schema import Plan
from xgpt.core.schema.step_log import StepRecord
from xrunner.executor import Use
from xrunner.generation import Generation, Token


class ServedPool(Protocol):
    """The requests that an engine has, and their K/V memory, as far as it has told.

    Attributes:
        kv_blocks: those that one request can have, of `block_size` tokens each.
        running: ids of the requests inside.
    """

    @property
    def kv_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def prompt_blocks(self) -> int:
        """Those that one request can have where prompts are encoded."""

    @property
    def running(self) -> Container[int]: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def reserved_blocks(self) -> int: ...
    @property
    def kept_blocks(self) -> int:
        """Those that no request uses, and that hold what a later one may share."""

    @property
    def num_preemptions(self) -> int: ...
    def can_ever_fit(self, request: Request) -> bool:
        """Whether it could run by itself."""


class ServedEngine(Protocol):
    """The contract of `xrunner.channel`. Everything belongs to the front's one thread."""

    @property
    def pool(self) -> ServedPool: ...
    @property
    def is_emptying(self) -> bool:
        """Whether requests wait until another plan has been deployed."""

    @property
    def takes_seeds(self) -> bool:
        """Whether a request's seed decides its tokens."""

    @property
    def scores_prompts(self) -> bool:
        """Whether log probabilities of prompts are given."""

    def resumes(self, generation: Generation) -> bool:
        """Return whether the request's output so far can be encoded with its prompt, and the same tokens follow."""

    def repeats(self, generation: Generation) -> bool:
        """Return whether the request's tokens are the same ones if it begins anew."""

    @property
    def is_changing(self) -> bool:
        """Whether a plan was asked for that steps do not follow yet."""

    on_refused: Callable[[str], None]
    """Called with the reason where another plan could not be followed and the one before is."""

    def listen(self, on_step: Callable[[StepRecord], None]) -> None:
        """Have the records of further steps reported, before `step` returns their tokens."""

    def submit(self, generation: Generation) -> None:
        """Hand in a request."""

    def cancel(self, id_: int) -> None:
        """Take a request out; one that has ended already is ignored."""

    def go_over_to(self, plan: Plan) -> None:
        """Follow another plan as soon as can be. Raises InputError where the engine cannot run it."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `step` has something to do."""

    def step(self) -> list[Token] | None:
        """Return the tokens of the next step that has ended; None if none has since the last call.

        Raises:
            EngineLost: its process has ended or hangs; `restart` brings it back.
            XgptError: it has failed for good.
        """

    def uses(self) -> list[Use]:
        """Of the processes that run it, if others than this one do."""

    def restart(self, plan: Plan) -> None:
        """End the old engine, and start a new one with a plan and without requests. Blocks.

        Raises:
            XgptError: it does not start.
        """

    def close(self) -> None:
        """End it after the step that it executes. Blocks."""
