"""Define the contract between the engine and the workers that execute its steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple, Protocol

from xgpt.core.errors import XgptError
from xgpt.core.policies import BlockTable, Schedule, Step
from xrunner.generation import Generation, Logprobs

if TYPE_CHECKING:
    from xrunner.grammar import Grammars


class WorkerLost(XgptError):
    """A worker has died or does not respond. The steps and K/V of all workers are lost."""


class Use(NamedTuple):
    """How many bytes one process of a replica has sent, and for how many seconds it has executed steps, since its
    start.
    """

    process: str
    control_bytes: int
    tensor_bytes: int
    busy_s: float


class Executor(Protocol):
    """Executes an engine's steps on workers.

    Attributes:
        failed: the reasons why requests got no token (NO_TOKEN) in the last step, by request id. Requests whose logits
            are not finite are left out.
        resumes: whether a request can continue by prefilling its prompt and output so far.
    """

    logprobs: dict[int, Logprobs]
    failed: dict[int, str]
    resumes: bool
    scores_prompts: bool

    def accept(self, generation: Generation) -> None:
        """Raise an error if the workers cannot execute a request. The engine calls this before it schedules the
        request."""

    def prepare(self, grammar: str) -> object:
        """Compile a grammar in every process that chooses tokens, and wait until this is done. Any thread may call
        this.

        The grammar stays compiled as long as the result is referenced. `start` compiles a grammar that is not compiled.

        Raises:
            MachineError: the grammar cannot be compiled in one of the processes.
        """

    def start(self, generation: Generation, table: BlockTable, moves_to: BlockTable | None = None) -> None:
        """Add a request whose prompt is encoded next.

        Args:
            table: the request's blocks in the lane that encodes it. Its first `table.found` blocks already contain K/V.
                Later blocks are passed with steps (`Step.grown`).
            moves_to: the request's blocks in the lane that decodes it. None means the same blocks.
        """

    def begin(self, step: Step) -> None:
        """Start a step after the earlier steps of its lane, and return without waiting for it."""

    def collect(self) -> tuple[Step, dict[int, int]] | None:
        """Wait until a step ends. Return the step, and the next token of each request that decoded or finished its
        prefill.

        Steps of one lane end in the order in which they began. Return None if `interrupt` was called before a step
        ended.

        Raises:
            WorkerLost: the current steps will not end, and all K/V are lost.
        """

    def interrupt(self) -> None:
        """Make `collect` return immediately. If `collect` is not waiting, its next call returns immediately. Any thread
        may call this.

        If `collect` itself executes steps, do nothing, since no step could begin earlier.
        """

    def check(self) -> None:
        """Check that no worker is lost. The engine calls this while no step is being executed.

        Raises:
            WorkerLost: a worker is lost.
        """

    def restart(self) -> None:
        """Restart the workers without requests, after `WorkerLost` or a failed step.

        Raises:
            MachineError: the workers cannot be restarted.
        """

    def uses(self) -> list[Use]:
        """Return the use of each process, the engine's own first, or [] if there is only one process. Any thread may
        call this.
        """

    def close(self) -> None:
        """Free all resources. The executor cannot be used afterwards."""

    def release(self, ids: Collection[int]) -> None:
        """Forget these requests. No current step uses them, and the schedule may give their blocks to other
        requests.
        """


class OneAtATime(ABC):
    """An executor in the engine's own process. Its `collect` executes a step."""

    resumes = True
    scores_prompts = False
    grammars: Grammars | None = None

    def __init__(self) -> None:
        self.logprobs: dict[int, Logprobs] = {}
        self.failed: dict[int, str] = {}
        self._begun: deque[Step] = deque()

    def accept(self, generation: Generation) -> None:  # noqa: B027
        """Accept any request."""

    def prepare(self, grammar: str) -> object:
        return None if self.grammars is None else self.grammars.compiled(grammar)

    @abstractmethod
    def execute(self, step: Step) -> dict[int, int]:
        """Run one step. Return the next token of each request that decoded or finished its prefill."""

    def begin(self, step: Step) -> None:
        self._begun.append(step)

    def collect(self) -> tuple[Step, dict[int, int]]:
        step = self._begun.popleft()
        return step, self.execute(step)

    def interrupt(self) -> None:  # noqa: B027
        """Do nothing, since a step blocks the thread that executes it."""

    def check(self) -> None:  # noqa: B027
        """Do nothing, since there is no other process to check."""

    def restart(self) -> None:
        self._begun.clear()

    def uses(self) -> list[Use]:
        return []

    def close(self) -> None:  # noqa: B027
        """Do nothing, since there is no other process to end."""


class Vacant(OneAtATime):
    """The executor while no plan is deployed. It accepts requests but runs nothing."""

    def start(self, generation: Generation, table: BlockTable, moves_to: BlockTable | None = None) -> None:
        raise AssertionError("nothing is deployed")

    def release(self, ids: Collection[int]) -> None:
        assert not ids

    def execute(self, step: Step) -> dict[int, int]:
        raise AssertionError("nothing is deployed")


Deployer = Callable[[Schedule], Executor]
"""Builds the executor of another plan's schedule, after the previous executor was closed."""
