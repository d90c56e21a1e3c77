"""The simulated engine: the same rule and pool as the real one, on a simulated clock.

Time stands in whole nanoseconds, so that a log of the real engine replays without rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from xgpt.policies import OneLaneRule, Pool, Request, Step
from xgpt.schema.step_log import Arrival, StepRecord
from xsimulator.cost import CostModel


class SimulatedRequest(NamedTuple):
    """A request with the output length that the rule must not see."""

    id: int
    input_length: int
    max_output: int
    output_length: int
    arrival_ns: int = 0


StepClock = Callable[[int, Step], int]
"""(start of the step in ns, step) -> its end in ns."""


class SimulatedEngine:
    """Runs requests through a rule; `clock` says how long each step takes.

    Args:
        requests: in the order of their arrival.
        cancellations: step number -> requests taken out before that step.
    """

    def __init__(
        self,
        rule: OneLaneRule,
        pool: Pool,
        clock: StepClock,
        requests: Sequence[SimulatedRequest],
        cancellations: dict[int, tuple[int, ...]] | None = None,
    ) -> None:
        self._rule = rule
        self.pool = pool
        self._clock = clock
        self._requests = requests
        self._cancellations = cancellations or {}
        self._output_length = {request.id: request.output_length for request in requests}
        self._next_arrival = 0
        self._num_steps = 0
        self.now_ns = 0

    def step(self) -> StepRecord | None:
        """Run one step; None when every request has finished."""
        arrivals = self._take_in()
        for id_ in self._cancellations.get(self._num_steps, ()):
            self.pool.cancel(id_)
        step = self._rule.next_step(self.pool)
        while step is None:
            if self._next_arrival == len(self._requests):
                return None
            self.now_ns = self._requests[self._next_arrival].arrival_ns
            arrivals += self._take_in()
            step = self._rule.next_step(self.pool)
        start_ns, self.now_ns = self.now_ns, self._clock(self.now_ns, step)
        finished = self._finished(step)
        self.pool.settle(step, finished)
        cancelled = self._cancellations.get(self._num_steps, ())
        self._num_steps += 1
        return StepRecord(
            start_ns,
            self.now_ns,
            step.encode,
            step.decode,
            tuple(finished),
            tuple(arrivals),
            cancelled,
            step.preempted,
        )

    def run(self) -> list[StepRecord]:
        """Run to the end."""
        return list(iter(self.step, None))

    def _take_in(self) -> list[Arrival]:
        arrivals = []
        requests = self._requests
        while self._next_arrival < len(requests) and requests[self._next_arrival].arrival_ns <= self.now_ns:
            request = requests[self._next_arrival]
            self.pool.submit(Request(request.id, request.input_length, request.max_output, request.arrival_ns))
            arrivals.append(Arrival(request.id, request.input_length, request.max_output, request.arrival_ns))
            self._next_arrival += 1
        return arrivals

    def _finished(self, step: Step) -> list[int]:
        lengths, decoding, encoding = self._output_length, self.pool.decoding, self.pool.encoding
        finished = [
            chunk.id
            for chunk in step.encode
            if chunk.start + chunk.length == encoding[chunk.id].context
            and lengths[chunk.id] == encoding[chunk.id].generated + 1
        ]
        finished += [id_ for id_ in step.decode if id_ in decoding and decoding[id_].generated + 1 == lengths[id_]]
        return finished


def cost_clock(cost: CostModel, pool: Pool) -> StepClock:
    """A clock that takes each step's time from a cost model."""

    def end_ns(start_ns: int, step: Step) -> int:
        encode = []
        for chunk in step.encode:
            end = chunk.start + chunk.length
            encode.append((chunk.start, end, int(end == pool.encoding[chunk.id].context)))
        running = pool.decoding if not pool.held else {**pool.decoding, **pool.held}
        contexts = [running[id_].context for id_ in step.decode]
        sampled = len(contexts) + sum(done for _, _, done in encode)
        return start_ns + max(1, round(cost.step(encode, contexts, sampled) * 1e9))

    return end_ns


def replay(rule: OneLaneRule, pool: Pool, log: Sequence[StepRecord]) -> list[StepRecord]:
    """Feed a real engine's arrivals, endings and clock readings to the simulated engine.

    The steps that come out equal the log's, or the two engines have drifted apart.
    """
    lengths = output_lengths(log)
    requests = [
        SimulatedRequest(a.id, a.input_length, a.max_output, lengths.get(a.id, a.max_output + 1), a.arrival_ns)
        for record in log
        for a in record.arrivals
    ]
    # A step ends where the next begins: arrivals in between belong to the next.
    ends = [record.start_ns for record in log[1:]] + [log[-1].end_ns]
    clock = iter(ends)
    cancellations = {i: record.cancelled for i, record in enumerate(log) if record.cancelled}
    engine = SimulatedEngine(rule, pool, lambda _start, _step: next(clock), requests, cancellations)
    engine.now_ns = log[0].start_ns
    steps = []
    for _ in log:
        record = engine.step()
        if record is None:
            break
        steps.append(record)
    return steps


def output_lengths(log: Iterable[StepRecord]) -> dict[int, int]:
    """Output tokens of each request that finished in the log."""
    counts: dict[int, int] = {}
    prompts: dict[int, int] = {}
    lengths: dict[int, int] = {}
    for record in log:
        for arrival in record.arrivals:
            prompts[arrival.id] = arrival.input_length
        for id_, start, length in record.encode:
            if start + length == prompts[id_] + counts.get(id_, 0):
                counts[id_] = counts.get(id_, 0) + 1
        for id_ in record.decode:
            counts[id_] += 1
        for id_ in record.finished:
            lengths[id_] = counts[id_]
    return lengths
