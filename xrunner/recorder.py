"""Record when steps begin and end, so that the schedule can be replayed."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from operator import itemgetter

from xgpt.core.policies import Request, Step
from xgpt.core.policies.blocks import NO_CHAINS
from xgpt.core.policies.request import Begun
from xgpt.core.schema.step_log import Arrival, Chain, LaneName, StepRecord

logger = logging.getLogger(__name__)

OnStep = Callable[[StepRecord], None]


class Recorder:
    def __init__(self, listeners: Collection[OnStep]) -> None:
        self._listeners = list(listeners)
        self.clear()

    def listen(self, on_step: OnStep) -> None:
        self._listeners.append(on_step)

    def clear(self) -> None:
        self._arrivals: list[Arrival] = []
        self._cancelled: list[tuple[int, int]] = []
        """Requests removed since the last step began, each with the number of steps settled before."""
        self._under_way: dict[tuple[LaneName, int], deque[Begun]] = defaultdict(deque)
        self._num_begun = self._num_settled = 0

    @property
    def is_idle(self) -> bool:
        return self._num_begun == self._num_settled

    def arrive(self, request: Request) -> None:
        size = request.input_length, request.max_output
        self._arrivals.append(
            Arrival(
                request.id,
                *size,
                request.arrival_ns,
                request.deadline_ns,
                request.promised_output,
                request.account,
                request.chain,
                request.is_scored,
            )
        )

    def cancel(self, id_: int) -> None:
        self._cancelled.append((id_, self._num_settled))

    def begin(self, step: Step, start_ns: int) -> None:
        """Note that a step begins. `start_ns`: when the step was scheduled."""
        arrived, settled = {arrival.id for arrival in self._arrivals}, self._num_settled
        # A request that has just arrived must be in the log before the log can record its removal.
        cancelled = [(id_, settled if id_ in arrived else after) for id_, after in self._cancelled]
        in_order = tuple(sorted(cancelled, key=itemgetter(1)))
        begun = Begun(step, self._num_begun, start_ns, settled, tuple(self._arrivals), in_order)
        self._under_way[step.lane, step.microbatch].append(begun)
        self._num_begun += 1
        self._arrivals.clear()
        self._cancelled.clear()

    def end(
        self,
        step: Step,
        clock: Callable[[], int],
        finished: Collection[int],
        outputs: Mapping[int, Chain] = NO_CHAINS,
        failed: Collection[int] = (),
    ) -> None:
        begun = self._under_way[step.lane, step.microbatch].popleft()
        self._num_settled += 1
        if not self._listeners:
            return
        record = begun.record(clock(), finished, outputs.items(), failed)
        for listener in list(self._listeners):
            try:
                listener(record)
            except Exception as error:  # an error in a listener must not lose the step's tokens
                logger.error("steps are no longer reported to %r: %s", listener, error)
                self._listeners.remove(listener)
