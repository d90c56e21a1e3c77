"""Simulate an engine, by running the real engine's schedule on a simulated clock.

Times are whole nanoseconds, so a log of the real engine replays without rounding.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import NamedTuple

from xgpt.core.policies import MicroBatch, Request, Schedule, Step
from xgpt.core.policies.request import Begun
from xgpt.core.schema import LaneName
from xgpt.core.schema.step_log import ANYONE, Account, Arrival, Chain, StepRecord


class SimulatedRequest(NamedTuple):
    """A request with the keys of K/V blocks that requests can share. The schedule must not see the output length.

    Attributes:
        output_chain: keys of the blocks after the prompt. They stay cached when the request ends.
    """

    id: int
    input_length: int
    max_output: int
    output_length: int
    arrival_ns: int = 0
    deadline_ns: int | None = None
    promised_output: int | None = None
    account: Account = ANYONE
    chain: Chain = ()
    output_chain: Chain = ()


SimulatedClock = Callable[[int, Step], int]
"""A function from (time of scheduling in ns, step) to the step's end in ns, called once for each step, in order."""

Outputs = tuple[tuple[int, Chain], ...]


class SimulatedEngine:
    def __init__(self, schedule: Schedule, clock: SimulatedClock, requests: Sequence[SimulatedRequest]) -> None:
        self.schedule = schedule
        self._clock = clock
        self._requests = list(requests)
        self._endings = _Endings(schedule)
        for request in requests:
            self._endings.submit(request)
        self._output_chain = {request.id: request.output_chain for request in requests if request.output_chain}
        self._num_arrived = 0
        self._journal = _Journal(schedule)
        self._ends: list[tuple[int, int]] = []
        """(end in ns, number) of the running steps."""
        self.now_ns = 0

    def step(self) -> StepRecord | None:
        while True:
            self._take_in()
            for lane in self.schedule.lanes:
                while (step := self._journal.begin(lane, self.now_ns)) is not None:
                    self._endings.begin(step)
                    heapq.heappush(self._ends, (self._clock(self.now_ns, step), self._journal.num_begun - 1))
            arrival_ns = self._next_arrival_ns()
            if self._ends and (arrival_ns is None or self._ends[0][0] <= arrival_ns):
                self.now_ns, number = heapq.heappop(self._ends)
                finished = self._endings.settle(self._journal.step(number), self._journal.encoded(number))
                return self._journal.settle(number, finished, self.now_ns, self._outputs(finished))
            if arrival_ns is None:
                return None
            self.now_ns = arrival_ns

    def submit(self, request: SimulatedRequest) -> None:
        """Submit a request that arrives now or later, as a closed loop does after a request has ended."""
        insort(self._requests, request, lo=self._num_arrived, key=attrgetter("arrival_ns"))
        self._endings.submit(request)
        if request.output_chain:
            self._output_chain[request.id] = request.output_chain

    def run(self) -> list[StepRecord]:
        return list(iter(self.step, None))

    def _next_arrival_ns(self) -> int | None:
        return self._requests[self._num_arrived].arrival_ns if self._num_arrived < len(self._requests) else None

    def _take_in(self) -> None:
        while (arrival_ns := self._next_arrival_ns()) is not None and arrival_ns <= self.now_ns:
            request = self._requests[self._num_arrived]
            lengths = request.input_length, request.max_output
            self._journal.submit(
                Arrival(
                    request.id,
                    *lengths,
                    arrival_ns,
                    request.deadline_ns,
                    request.promised_output,
                    request.account,
                    request.chain,
                )
            )
            self._num_arrived += 1

    def _outputs(self, finished: Sequence[int]) -> Outputs:
        chains = self._output_chain
        return tuple((id_, chains.pop(id_)) for id_ in finished if id_ in chains) if chains else ()


class _Endings:
    """Computes from the output lengths which requests have their last token in a step."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._whole: dict[int, int] = {}
        self._left: dict[int, int] = {}
        """Number of output tokens still to compute, for requests that do not decode yet."""
        self._counted: dict[int, tuple[MicroBatch, int]] = {}
        """For each request, the micro-batch in which it decodes, and the number of the decode step in which it ends."""
        self._num_steps: defaultdict[MicroBatch, int] = defaultdict(int)
        self._ends: defaultdict[MicroBatch, dict[int, list[int]]] = defaultdict(dict)

    def submit(self, request: SimulatedRequest) -> None:
        self._whole[request.id] = self._left[request.id] = request.output_length

    def begin(self, step: Step) -> None:
        for id_ in step.preempted:
            if (counted := self._counted.pop(id_, None)) is not None:
                batch, end = counted
                self._left[id_] = end - self._num_steps[batch]
            if self._schedule.pool.encoder:
                self._left[id_] = self._whole[id_]
        if step.lane == "decode":
            batch = self._schedule.batch_of(step)
            for id_ in reversed(step.decode):  # requests that have just joined come last
                if id_ in self._counted:
                    break
                self._count(id_, batch)

    def settle(self, step: Step, encoded: Sequence[int]) -> list[int]:
        """Return the requests that have their last token in a step, and record the requests that begin to decode."""
        if step.lane == "transfer":
            return []
        batch, finished = self._schedule.batch_of(step), []
        if self._schedule.pool.encode_emits:
            for id_ in encoded:
                self._left[id_] -= 1
                if not self._left[id_]:
                    finished.append(id_)
        if step.decode:
            self._num_steps[batch] += 1
            end = batch, self._num_steps[batch]
            ended = self._ends[batch].pop(self._num_steps[batch], ())
            # A request that was preempted and encoded again may be listed twice.
            finished += [id_ for id_ in dict.fromkeys(ended) if self._counted.get(id_) == end and id_ in step.decode]
        if step.lane == "both":
            for id_ in encoded:
                if self._left[id_]:
                    self._count(id_, batch)
        return finished

    def _count(self, id_: int, batch: MicroBatch) -> None:
        end = self._num_steps[batch] + self._left[id_]
        self._counted[id_] = batch, end
        self._ends[batch].setdefault(end, []).append(id_)


class _Journal:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._under_way: dict[int, tuple[Begun, Sequence[int]]] = {}
        self._arrivals: list[Arrival] = []
        self._cancelled: list[tuple[int, int]] = []
        self._now_ns = -1
        """Time up to which expired requests have been removed."""
        self.num_begun = 0
        self.num_settled = 0

    def submit(self, arrival: Arrival) -> None:
        self._schedule.submit(Request(*arrival))
        self._arrivals.append(arrival)

    def cancel(self, id_: int) -> None:
        self._schedule.cancel(id_)
        self._cancelled.append((id_, self.num_settled))

    def begin(self, lane: LaneName, now_ns: int) -> Step | None:
        if now_ns != self._now_ns or self._arrivals:
            self._schedule.expire(now_ns)
            self._now_ns = now_ns
        step = self._schedule.next_step(lane)
        if step is not None:
            before = self.num_settled, tuple(self._arrivals), tuple(self._cancelled)
            begun = Begun(step, self.num_begun, now_ns, *before)
            self._under_way[self.num_begun] = begun, self._schedule.encoded(step)
            self.num_begun += 1
            self._arrivals.clear()
            self._cancelled.clear()
        return step

    def step(self, number: int) -> Step:
        return self._under_way[number][0].step

    def encoded(self, number: int) -> Sequence[int]:
        return self._under_way[number][1]

    def settle(
        self, number: int, finished: Sequence[int], end_ns: int, outputs: Outputs = (), failed: Sequence[int] = ()
    ) -> StepRecord:
        begun, _ = self._under_way.pop(number)
        self._schedule.settle(begun.step, finished, dict(outputs), failed)
        self.num_settled += 1
        return begun.record(end_ns, finished, outputs, failed)


def replay(
    schedule: Schedule, log: Sequence[StepRecord], on_begin: Callable[[StepRecord, Step], None] | None = None
) -> list[StepRecord]:
    """Replay a log: give its arrivals, cancellations, endings and times to a schedule, and return the schedule's
    steps.
    """
    journal = _Journal(schedule)
    steps: list[StepRecord] = []

    def settle(record: StepRecord) -> bool:
        step = journal.step(record.number)
        if (step.encode, step.decode, step.transfer) != (record.encode, record.decode, record.transfer):
            return False
        settled = journal.settle(record.number, record.finished, record.end_ns, record.outputs, record.failed)
        steps.append(settled._replace(core_wait_ns=record.core_wait_ns))
        return True

    for number, record in enumerate(sorted(log, key=lambda record: record.number)):
        if number != record.number:
            break
        # The order of cancellations matters, since cached blocks are evicted in the order in which they were released.
        cancelled = deque(zip(record.cancelled, record.cancelled_after or repeat(record.settled), strict=False))
        while journal.num_settled < record.settled:
            while cancelled and cancelled[0][1] == journal.num_settled:
                journal.cancel(cancelled.popleft()[0])
            if not settle(log[journal.num_settled]):
                return steps
        for arrival in record.arrivals:
            journal.submit(arrival)
        for id_, _ in cancelled:
            journal.cancel(id_)
        if (step := journal.begin(record.lane, record.start_ns)) is None:
            return steps
        if on_begin is not None:
            on_begin(record, step)
    while journal.num_settled < len(log) and log[journal.num_settled].number < journal.num_begun:
        if not settle(log[journal.num_settled]):
            break
    return steps
