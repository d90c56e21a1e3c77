"""Simulate TCB's systems and its baselines, each of which forms batches of waiting requests.

One loop serves all systems: add arrivals, drop requests that are too late, form batches, and run them. The machine has
the clock, and its cost model determines the time of each batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.tcb.layouts import BatchCost, length_sorted_batches, slotted_rows
from benchmarks.tcb.row_cost import RowCost
from xgpt.core.policies import LaneSettings, OneLane, Pool, Schedule, Step
from xgpt.core.policies.admission import Queue, make_queue
from xgpt.core.policies.orders import DasOrder, utility
from xgpt.core.policies.request import Request
from xgpt.core.policies.tcb import RowBatch, concatenated_rows, even_rows, padded_rows
from xgpt.core.schema import AdmissionOrder, TruncatedNormal
from xgpt.core.schema.step_log import StepRecord
from xgpt.core.workload import gamma_arrivals, histogram
from xsimulator.events import SimulatedEngine, SimulatedRequest

MEAN, SHORTEST, LONGEST = 20.0, 3, 100
"""Tokens. Source: TCB sec. 6.2.1."""


@dataclass(frozen=True, slots=True)
class Demand:
    requests: tuple[Request, ...]
    output_lengths: Mapping[int, int]


def draw(rate: float, seconds: float, variance: float, slack_s: tuple[float, float], seed: int = 0) -> Demand:
    """Return the paper's workload: normal lengths and Poisson arrivals. The paper does not state deadlines and answers.
    Here deadlines are uniform in `slack_s` after the arrival, and answers have the prompts' distribution of lengths,
    independently of the prompts.
    """
    rng = np.random.default_rng(seed)
    num = max(1, round(rate * seconds))
    lengths = histogram(TruncatedNormal(mean=MEAN, sd=variance**0.5, min=SHORTEST, max=LONGEST))
    inputs, outputs = rng.choice(lengths.lengths, (2, num), p=lengths.probabilities)
    arrivals = (1e9 * gamma_arrivals(rate, num, 1.0, rng)).astype(np.int64)
    deadlines = arrivals + (1e9 * rng.uniform(*slack_s, num)).astype(np.int64)
    requests = tuple(
        Request(i, int(n), int(out), int(a), int(d))
        for i, (n, out, a, d) in enumerate(zip(inputs, outputs, arrivals, deadlines, strict=True))
    )
    return Demand(requests, {one.id: one.max_output for one in requests})


class Machine:
    """A machine that runs batches, with a clock in nanoseconds."""

    def __init__(self, cost: RowCost) -> None:
        self._cost = cost
        self._now = 0

    def now(self) -> int:
        return self._now

    def skip_to(self, time_ns: int) -> None:
        self._now = max(self._now, time_ns)

    def run_rows(self, batch: RowBatch, output_lengths: Mapping[int, int], *, free_slots: bool = False) -> None:
        self._now += round(1e9 * self._cost.rows(batch, output_lengths, free_slots=free_slots))

    def run_flattened(self, requests: Sequence[Request], output_lengths: Mapping[int, int]) -> None:
        """Run one batch without padding to the end of its longest answer. A request that has ended computes nothing
        more."""
        prompts = np.array([one.input_length for one in requests])
        ends = np.array([output_lengths[one.id] for one in requests])
        seconds = self._cost.flattened(prompts, [], [])
        for step in range(1, int(ends.max())):
            running = ends > step
            seconds += self._cost.flattened([], [step + 1] * int(running.sum()), prompts[running])
        self._now += round(1e9 * seconds)

    def run_iterations(self, schedule: Schedule, demand: Demand) -> list[StepRecord]:
        """Run the serving engine, iteration by iteration, until the last request has arrived. Return its log from time
        0."""
        running = schedule.pool.running

        def end_ns(start_ns: int, step: Step) -> int:
            decoding = [running[id_] for id_ in step.decode]
            own_tokens, read = [one.generated + 1 for one in decoding], [one.input_length for one in decoding]
            return start_ns + round(
                1e9 * self._cost.flattened([chunk.length for chunk in step.encode], own_tokens, read)
            )

        requests = [
            SimulatedRequest(r.id, r.input_length, r.max_output, r.max_output, r.arrival_ns, r.deadline_ns)
            for r in demand.requests
        ]
        engine = SimulatedEngine(schedule, end_ns, requests)
        log = []
        while engine.now_ns < demand.requests[-1].arrival_ns and (record := engine.step()) is not None:
            log.append(record)
        return log

    def seconds(self, run: Callable[[], None]) -> float:
        start = self.now()
        run()
        return (self.now() - start) / 1e9


class PaddedCost:
    """Computes the seconds of a padded batch by interpolation between batches that a machine has run, for TTB's
    division."""

    def __init__(self, machine: Machine, steps: int, numbers: Sequence[int], lengths: Sequence[int]) -> None:
        self._numbers, self._lengths = np.asarray(numbers, float), np.asarray(lengths, float)
        seconds = [[self._run(machine, n, length, steps) for length in lengths] for n in numbers]
        self._seconds = np.array(seconds)

    def __call__(self, numbers: np.ndarray, length: int) -> np.ndarray:
        column = [np.interp(length, self._lengths, row) for row in self._seconds]
        slope = (column[-1] - column[-2]) / (self._numbers[-1] - self._numbers[-2])
        beyond = np.maximum(numbers - self._numbers[-1], 0.0)
        return np.interp(numbers, self._numbers, column) + slope * beyond

    @staticmethod
    def _run(machine: Machine, number: int, length: int, steps: int) -> float:
        batch = padded_rows([Request(-1 - i, length, steps) for i in range(number)])
        outputs = {place.id: steps for place in batch.places}
        return machine.seconds(lambda: machine.run_rows(batch, outputs))


Job = tuple[list[Request], Callable[[], None]]
"""Requests, and the function that runs them."""


@dataclass(frozen=True, slots=True)
class System:
    machine: Machine
    output_lengths: Mapping[int, int]
    num_rows: int
    row_tokens: int

    def rows(self, queue: Queue) -> list[list[Request]]:
        """Return the requests of one scheduling decision, row by row."""
        rows = (queue.fill_row(self.row_tokens) for _ in range(self.num_rows))
        return [row for row in rows if row]

    def run(self, batch: RowBatch, *, free_slots: bool = False) -> None:
        self.machine.run_rows(batch, self.output_lengths, free_slots=free_slots)


def form_tnb(system: System, queue: Queue) -> Iterable[Job]:
    chosen: list[Request] = []
    while len(chosen) < system.num_rows and (row := queue.fill_row(system.row_tokens)):
        chosen += row
    for one in chosen[system.num_rows :]:
        queue.push(one)
    del chosen[system.num_rows :]
    yield chosen, lambda: system.run(padded_rows(chosen))


def form_ttb(cost: BatchCost, largest: int | None = None) -> Callable[[System, Queue], Iterable[Job]]:
    """Form the cheapest batches from as many requests as TCB takes, sorted by length. `largest`: largest batch, or
    None."""

    def form(system: System, queue: Queue) -> Iterable[Job]:
        chosen = [one for row in system.rows(queue) for one in row]
        for batch in length_sorted_batches(chosen, cost, largest or len(chosen)):
            yield batch, lambda batch=batch: system.run(padded_rows(batch))

    return form


def form_tcb(system: System, queue: Queue) -> Iterable[Job]:
    rows = even_rows(system.rows(queue), system.row_tokens)
    yield [one for row in rows for one in row], lambda: system.run(concatenated_rows(rows))


def form_slotted(system: System, queue: Queue) -> Iterable[Job]:
    """Form batches by TCB's Algorithm 2: slots are as long as the longest request chosen by utility. Requests that fit
    in no slot wait again."""
    order = queue.order_of("")
    assert isinstance(order, DasOrder)
    rows, longest = [], 0
    for _ in range(system.num_rows):
        row = queue.fill_row(system.row_tokens)
        if row:
            longest = max(longest, *(one.input_length for one in row[: order.num_dominant]))
            rows.append(row)
    batch, left_over = slotted_rows(rows, system.row_tokens, longest)
    for one in left_over:
        queue.push(one)
    ids = {place.id for place in batch.places}
    yield [one for row in rows for one in row if one.id in ids], lambda: system.run(batch, free_slots=True)


def form_flattened(system: System, queue: Queue) -> Iterable[Job]:
    chosen = [one for row in system.rows(queue) for one in row]
    yield chosen, lambda: system.machine.run_flattened(chosen, system.output_lengths)


@dataclass(slots=True)
class Outcome:
    """The results of a system.

    Attributes:
        started: number of requests that were scheduled by their deadline, as the paper counts (constraint 12).
        answered: number of requests whose batch had also ended by their deadline.
        utility: utility of the scheduled requests (TCB sec. 5.1).
        scheduling_s: computing time of forming batches.
        running_s: time in batches.
    """

    seconds: float = 0.0
    started: int = 0
    answered: int = 0
    utility: float = 0.0
    batches: int = 0
    scheduling_s: float = 0.0
    running_s: float = 0.0

    @property
    def throughput_rps(self) -> float:
        return self.started / self.seconds

    @property
    def utility_per_s(self) -> float:
        return self.utility / self.seconds

    def add(self, requests: Iterable[Request], end_ns: int) -> None:
        for one in requests:
            assert one.deadline_ns is not None
            self.started += 1
            self.utility += utility(one)
            self.answered += one.deadline_ns >= end_ns


def serve(
    form: Callable[[System, Queue], Iterable[Job]], system: System, order: AdmissionOrder, demand: Demand
) -> Outcome:
    """Serve until the last request has arrived. The batch that runs then is counted to its end."""
    machine, requests, outcome = system.machine, demand.requests, Outcome()
    queue = make_queue(order, system.row_tokens)
    origin, arrived, last = machine.now(), 0, requests[-1].arrival_ns
    while machine.now() - origin < last:
        now = machine.now() - origin
        while arrived < len(requests) and requests[arrived].arrival_ns <= now:
            queue.push(requests[arrived])
            arrived += 1
        queue.expire(now)
        if not len(queue):
            machine.skip_to(origin + requests[arrived].arrival_ns)
            continue
        clock = time.process_time()  # the time of other processes on the machine is no cost of scheduling
        jobs = list(form(system, queue))
        outcome.scheduling_s += time.process_time() - clock
        for chosen, run in jobs:
            start = machine.now()
            run()
            end = machine.now()
            outcome.batches += 1
            outcome.running_s += (end - start) / 1e9
            outcome.add(chosen, end - origin)
    outcome.seconds = (machine.now() - origin) / 1e9
    return outcome


def serve_iterations(machine: Machine, order: AdmissionOrder, most: int, row_tokens: int, demand: Demand) -> Outcome:
    """Serve by flattened batches, iteration by iteration (ORCA's settings), with at most `most` running requests."""
    pool = Pool(10**6, 16, waiting=make_queue(order, row_tokens if order == "das" else None))
    log = machine.run_iterations(OneLane(LaneSettings(mix=True, max_batch=most), pool), demand)
    outcome = Outcome(seconds=log[-1].end_ns / 1e9, batches=len(log))
    requests = {one.id: one for one in demand.requests}
    for record in log:
        outcome.running_s += (record.end_ns - record.start_ns) / 1e9
        entered = [requests[id_] for id_, start, _ in record.encode if start == 0]
        outcome.started += len(entered)
        outcome.utility += sum(utility(one) for one in entered)
        outcome.answered += sum(record.end_ns <= (requests[id_].deadline_ns or 0) for id_ in record.finished)
    return outcome
