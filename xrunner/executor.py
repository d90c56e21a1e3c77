"""The contract between the engine and the workers that compute for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

from xgpt.errors import XgptError
from xgpt.policies import Schedule, Step
from xrunner.generation import Generation, Logprobs


class WorkerLost(XgptError):
    """A worker has died or is silent; what all of them were doing is lost."""


class Executor(Protocol):
    """The workers behind the engine: they hold weights and K/V, and execute steps.

    Attributes:
        logprobs: of the last step's tokens, for the requests that ask for them.
        resumes: whether what a request has generated can be encoded with its prompt.
    """

    logprobs: dict[int, Logprobs]
    resumes: bool

    def start(self, generation: Generation) -> None:
        """Set aside the K/V blocks of a request that is about to be encoded."""

    def begin(self, step: Step) -> None:
        """Send a step on its way, behind those of its lane that are under way. Does not wait for it."""

    def collect(self) -> tuple[Step, dict[int, int]]:
        """Wait for the next step to end; with the next token of each request that decoded or whose prompt ended.

        Steps of one lane end in the order in which they began.

        Raises:
            WorkerLost: the steps under way will not end, and no request has K/V any more.
        """

    def check(self) -> None:
        """While nothing is under way: see whether all workers are well.

        Raises:
            WorkerLost: one is not.
        """

    def restart(self) -> None:
        """After `WorkerLost`: bring the workers back, with nobody in them.

        Raises:
            MachineError: they do not come back.
        """

    def close(self) -> None:
        """Give everything back; nothing may be asked of it afterwards."""

    def release(self, ids: Collection[int]) -> None:
        """Free the K/V blocks of these requests; no step under way touches them."""


class OneAtATime(ABC):
    """An executor in the engine's own process: each step is executed while it is waited for."""

    resumes = True

    def __init__(self) -> None:
        self._begun: deque[Step] = deque()

    @abstractmethod
    def execute(self, step: Step) -> dict[int, int]:
        """Run one step; returns the next token of each request that decoded or whose prompt ended."""

    def begin(self, step: Step) -> None:
        self._begun.append(step)

    def collect(self) -> tuple[Step, dict[int, int]]:
        step = self._begun.popleft()
        return step, self.execute(step)

    def check(self) -> None:  # noqa: B027
        """This process is well."""

    def restart(self) -> None:
        raise AssertionError("this process cannot be lost but with the engine")

    def close(self) -> None:  # noqa: B027
        """Nothing outlives this process."""


Deploy = Callable[[Schedule], Executor]
"""Makes the executor of another plan's schedule, once the one before has been given up."""
