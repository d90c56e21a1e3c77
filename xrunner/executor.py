"""The contract between the engine and the workers that compute for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from xgpt.core.errors import XgptError
from xgpt.core.policies import BlockTable, Schedule, Step
from xrunner.generation import Generation, Logprobs


class WorkerLost(XgptError):
    """A worker has died or is silent; what all of them were doing is lost."""


class Use(NamedTuple):
    """What a process of a replica has done since its start: bytes that it has sent, seconds that it has computed."""

    process: str
    control_bytes: int
    tensor_bytes: int
    busy_s: float


class Executor(Protocol):
    """The workers behind the engine: they hold weights and K/V, and execute steps.

    Attributes:
        logprobs: of the last step's tokens, for the requests that ask for them.
        failed: why no token (NO_TOKEN) was chosen for some of the last step's requests, where logits do not say it.
        resumes: whether what a request has generated can be encoded with its prompt.
        scores_prompts: whether it gives log probabilities of prompts.
    """

    logprobs: dict[int, Logprobs]
    failed: dict[int, str]
    resumes: bool
    scores_prompts: bool

    def accept(self, generation: Generation) -> None:
        """Look at a request before anything is planned for it; raise any error if it cannot be handed on."""

    def start(self, generation: Generation, table: BlockTable, moves_to: BlockTable | None = None) -> None:
        """Take in a request that is about to be encoded.

        Args:
            table: its blocks where it is encoded; the first `found` hold what they should already. Those that it is
                given later come with steps (`Step.grown`).
            moves_to: its blocks where it is decoded; None: it stays.
        """

    def begin(self, step: Step) -> None:
        """Start a step after the earlier steps of its lane, without waiting for it."""

    def collect(self) -> tuple[Step, dict[int, int]] | None:
        """Wait for the next step to end; with the next token of each request that decoded or whose prompt ended.

        Steps of one lane end in the order in which they began. None: `interrupt` came first.

        Raises:
            WorkerLost: the steps under way will not end, and no request has K/V any more.
        """

    def interrupt(self) -> None:
        """Have `collect` return at once, this time or, if it is not waiting, the next. Callable from any thread.

        Where steps are executed while they are waited for, nothing could begin earlier for it: nothing happens.
        """

    def check(self) -> None:
        """While nothing is under way: see whether all workers are well.

        Raises:
            WorkerLost: one is not.
        """

    def restart(self) -> None:
        """After `WorkerLost`, or a step that has failed: bring the workers back, with no request in them.

        Raises:
            MachineError: they do not come back.
        """

    def uses(self) -> list[Use]:
        """Of each of its processes, the engine's first; none where that is the only one. May be asked by any thread."""

    def close(self) -> None:
        """Give everything back; nothing may be asked of it afterwards."""

    def release(self, ids: Collection[int]) -> None:
        """Forget these requests; no step under way touches them. Their blocks are the schedule's to give out."""


class OneAtATime(ABC):
    """An executor in the engine's own process: each step is executed while it is waited for."""

    resumes = True
    scores_prompts = False

    def __init__(self) -> None:
        self.logprobs: dict[int, Logprobs] = {}
        self.failed: dict[int, str] = {}
        self._begun: deque[Step] = deque()

    def accept(self, generation: Generation) -> None:  # noqa: B027
        """Take a request over: no other executor is given it."""

    @abstractmethod
    def execute(self, step: Step) -> dict[int, int]:
        """Run one step; returns the next token of each request that decoded or whose prompt ended."""

    def begin(self, step: Step) -> None:
        self._begun.append(step)

    def collect(self) -> tuple[Step, dict[int, int]]:
        step = self._begun.popleft()
        return step, self.execute(step)

    def interrupt(self) -> None:  # noqa: B027
        """Do nothing: a step blocks the thread that executes it."""

    def check(self) -> None:  # noqa: B027
        """Do nothing: there is no other process to check."""

    def restart(self) -> None:
        """Forget steps and requests, whatever state a failed step has left them in."""
        self._begun.clear()

    def uses(self) -> list[Use]:
        return []

    def close(self) -> None:  # noqa: B027
        """Do nothing: there is no other process to end."""


class Vacant(OneAtATime):
    """Between two deployments, when requests may be handed in but nothing runs."""

    def start(self, generation: Generation, table: BlockTable, moves_to: BlockTable | None = None) -> None:
        raise AssertionError("nothing is deployed")

    def release(self, ids: Collection[int]) -> None:
        assert not ids

    def execute(self, step: Step) -> dict[int, int]:
        raise AssertionError("nothing is deployed")


Deployer = Callable[[Schedule], Executor]
"""Makes the executor of another plan's schedule, once the one before has been given up."""
