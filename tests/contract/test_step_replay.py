"""One rule, two clocks: a log of the real engine replays on the simulated one, step for step, for every policy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rings import examples
from xgpt.core.policies import BlockTable, LaneSettings, OneLane, Pool, Schedule, Step, TwoLane, TwoLaneSettings
from xgpt.core.policies.admission import make_queue
from xgpt.core.schema import ANYONE, Account, AdmissionOrder, KvPromise
from xgpt.core.schema.step_log import StepRecord
from xrunner.engine import Engine
from xrunner.executor import Use
from xrunner.generation import NO_TOKEN, Generation, Logprobs, SamplingParams
from xsimulator.events import replay

BLOCK_SIZE = 4
LONGEST_INPUT, LONGEST_OUTPUT = 20, 12
LARGEST = -(-(LONGEST_INPUT + LONGEST_OUTPUT) // BLOCK_SIZE)

LANES = {
    "rra": LaneSettings(mix=False, encode_every=3, encode_tokens=5.0, carried_batch=0.6, decode_batch=1.1),
    "orca": LaneSettings(mix=True, max_batch=5),
    "chunked": LaneSettings(mix=True, token_budget=12, max_batch=3),
    "static": LaneSettings(mix=False, max_batch=4, refill_when_empty=True),
    "rra, 3 micro-batches": LaneSettings(
        mix=False,
        encode_every=3,
        encode_tokens=30.0,
        carried_batch=3.0,
        decode_batch=5.0,
        microbatches=3,
        reuse_is_planned=True,
    ),
    "orca, 2 micro-batches": LaneSettings(mix=True, max_batch=5, microbatches=2),
    "chunked, 4 micro-batches": LaneSettings(mix=True, token_budget=40, max_batch=8, microbatches=4),
    "static, hybrid micro-batches": LaneSettings(
        mix=False, max_batch=9, refill_when_empty=True, microbatches=2, encode_parts=2
    ),
    "waa": TwoLaneSettings(
        encode_tokens=20.0, encode_stages=2, encode_blocks=15, max_decode_batch=9, decode_microbatches=2
    ),
    "waa, buffered": TwoLaneSettings(
        encode_tokens=20.0,
        encode_stages=1,
        encode_blocks=15,
        max_decode_batch=9,
        decode_microbatches=2,
        buffer_iterations=3,
    ),
}
OTHERS = {
    "rra": [replace(LANES["rra"], encode_every=4), replace(LANES["rra"], encode_tokens=9.0)],
    "orca": [replace(LANES["orca"], max_batch=4), LANES["chunked"]],
    "chunked": [replace(LANES["chunked"], token_budget=10), replace(LANES["chunked"], max_batch=2)],
    "static": [replace(LANES["static"], max_batch=3), replace(LANES["static"], refill_when_empty=False, mix=True)],
    "orca, 2 micro-batches": [LANES["orca"], replace(LANES["orca"], microbatches=3)],
    "static, hybrid micro-batches": [
        replace(LANES["static, hybrid micro-batches"], microbatches=3),
        replace(LANES["static, hybrid micro-batches"], encode_parts=1),
    ],
    "waa": [replace(LANES["waa"], max_decode_batch=5), replace(LANES["waa"], decode_microbatches=1)],
    "waa, buffered": [replace(LANES["waa, buffered"], buffer_iterations=number) for number in (0, 2)],
}
CASES = pytest.mark.parametrize(("kind", "kv"), [(kind, "reserve") for kind in LANES] + [
    (kind, "quantile") for kind in LANES if "static" not in kind
])  # fmt: skip


class Executor:
    """Answers every request with token 0; what it holds must be what the engine says.

    Steps overlap, and those of different lanes end in any order. At times a request arrives while one is waited for.

    Args:
        failures: how often a request fails instead.
    """

    resumes = True
    scores_prompts = False

    def __init__(self, rng: np.random.Generator, failures: float = 0.0) -> None:
        self._rng = rng
        self._failures = failures
        self._under_way: dict[str, list[Step]] = {}
        self.running: dict[int, Generation] = {}
        self.logprobs: dict[int, Logprobs] = {}
        self.failed: dict[int, str] = {}
        self.while_waiting: Callable[[], None] = lambda: None
        self._is_interrupted = False

    def accept(self, generation: Generation) -> None:
        assert generation.id not in self.running

    def start(self, generation: Generation, table: BlockTable, moves_to: BlockTable | None = None) -> None:
        assert generation.id not in self.running
        self.running[generation.id] = generation

    def begin(self, step: Step) -> None:
        assert self.running.keys() >= set(step.ids)
        self._under_way.setdefault(step.lane, []).append(step)

    def check(self) -> None:
        assert not any(self._under_way.values())

    def restart(self) -> None:
        raise AssertionError("no worker is ever lost here")

    def close(self) -> None:
        assert not self.running

    def interrupt(self) -> None:
        self._is_interrupted = True

    def uses(self) -> list[Use]:
        return []

    def collect(self) -> tuple[Step, dict[int, int]] | None:
        self._is_interrupted = False
        self.while_waiting()
        if self._is_interrupted:
            return None
        lanes = [steps for steps in self._under_way.values() if steps]
        step = lanes[self._rng.integers(len(lanes))].pop(0)
        assert self.running.keys() >= set(step.ids)
        ended = [c.id for c in step.encode if c.start + c.length == len(self.running[c.id].prompt)]
        sampled = dict.fromkeys([*ended, *step.decode], 0)
        if self._failures:
            sampled = {id_: NO_TOKEN if self._rng.random() < self._failures else 0 for id_ in sampled}
        return step, sampled

    def release(self, ids: Collection[int]) -> None:
        under_way = {id_ for steps in self._under_way.values() for step in steps for id_ in step.ids}
        assert under_way.isdisjoint(ids)
        for id_ in ids:
            self.running.pop(id_, None)


ACCOUNTS = (Account("a", 3.0), Account("b"), Account("c", 0.5, priority=1))
PATIENCE_NS = 5_000


def schedule_for(
    lane: LaneSettings | TwoLaneSettings,
    kv: KvPromise,
    blocks: int,
    order: AdmissionOrder = "fcfs",
    patience_ns: int | None = None,
) -> Schedule:
    row_tokens = 3 * LONGEST_INPUT if "das" in order else None
    hold = isinstance(lane, LaneSettings) and lane.refill_when_empty
    pool = Pool(blocks, BLOCK_SIZE, kv=kv, holds_finished=hold, waiting=make_queue(order, row_tokens, patience_ns))
    return TwoLane(lane, pool) if isinstance(lane, TwoLaneSettings) else OneLane(lane, pool)


def jittered_clock(rng: np.random.Generator) -> Iterator[int]:
    now = int(rng.integers(10**6))
    while True:
        now += int(rng.integers(1, 1000))
        yield now


def run_engine(
    lane: LaneSettings | TwoLaneSettings,
    kv: KvPromise,
    blocks: int,
    rng: np.random.Generator,
    order: AdmissionOrder = "fcfs",
    *,
    has_accounts: bool = False,
    reuse: bool = False,
    failures: float = 0.0,
) -> list[StepRecord]:
    """Requests that arrive, and are cancelled, between the steps of the real engine; at times there are none.

    Args:
        has_accounts: of three accounts with shares and a priority; some grow impatient, some outgrow their promise.
        reuse: they share what their prompts have in common.
        failures: how often a request fails instead of having its next token.
    """
    log: list[StepRecord] = []
    schedule = schedule_for(lane, kv, blocks, order, PATIENCE_NS if has_accounts else None)
    executor, clock = Executor(rng, failures), jittered_clock(rng)
    pool = schedule.pool
    engine = Engine(schedule, executor, clock=lambda: next(clock), on_step=log.append, reuse=reuse)
    num_requests, arrival_chance = int(rng.integers(5, 40)), rng.random()
    submitted = 0

    def arrive() -> None:
        nonlocal submitted
        while submitted < num_requests and rng.random() < arrival_chance:
            generation = random_generation(submitted, rng)
            if order != "fcfs" and rng.random() < 0.7:
                generation = replace(generation, deadline_ns=next(clock) + int(rng.integers(20_000)))
            if has_accounts:
                promised = None if pool.holds_finished or rng.random() < 0.3 else int(rng.integers(1, 6))
                generation = replace(generation, promised_output=promised, account=ACCOUNTS[rng.integers(3)])
            engine.submit(generation)
            submitted += 1

    executor.while_waiting = arrive
    while submitted < num_requests or not pool.is_idle:
        arrive()
        if submitted and rng.random() < 0.1:
            engine.cancel(int(rng.integers(submitted)))
        engine.step()
    while engine.step() is not None:
        pass  # a step that only preempts outlives the requests, and belongs to the log
    assert pool.num_running == pool.reserved_blocks == 0
    assert executor.running == {}
    return log


def random_generation(id_: int, rng: np.random.Generator) -> Generation:
    max_output = int(rng.integers(1, LONGEST_OUTPUT + 1))
    output = int(rng.integers(1, max_output + 1)) if rng.random() < 0.8 else None
    start = (int(rng.integers(3)),) * int(rng.integers(1, LONGEST_INPUT + 1))
    return Generation(id_, start, max_output, output_length=output)


def steps(log: list[StepRecord]) -> list[tuple[object, ...]]:
    """What was scheduled, when among everything else, and how it ended."""
    return [record[2:] for record in log]


@CASES
@settings(max_examples=examples(150, 10))
@given(
    seed=st.integers(0, 2**32),
    spare_blocks=st.sampled_from([0, 3, 10, 1000]),
    order=st.sampled_from(["fcfs", "sjf", "lpt", "edf", "das", "shuffled"]),
    has_accounts=st.booleans(),
    reuse=st.booleans(),
    failures=st.sampled_from([0.0, 0.1]),
)
def test_the_log_replays(
    kind: str,
    kv: KvPromise,
    seed: int,
    spare_blocks: int,
    order: AdmissionOrder,
    has_accounts: bool,
    reuse: bool,
    failures: float,
) -> None:
    """In every order, with deadlines that some requests miss, with and without shares, priorities, patience, promises,
    and shared blocks; and if some requests fail, whose blocks are shared no more."""
    lane, blocks, rng = LANES[kind], LARGEST + spare_blocks, np.random.default_rng(seed)
    log = run_engine(lane, kv, blocks, rng, order, has_accounts=has_accounts, reuse=reuse, failures=failures)
    patience_ns = PATIENCE_NS if has_accounts else None
    assert not log or steps(replay(schedule_for(lane, kv, blocks, order, patience_ns), log)) == steps(log)


@pytest.mark.parametrize("kind", LANES)
def test_blocks_are_shared_in_what_replays(kind: str) -> None:
    """And without them the steps are others."""
    logs = [run_engine(LANES[kind], "reserve", 1000, np.random.default_rng(seed), reuse=True) for seed in range(3)]
    assert sum(start > 0 for log in logs for record in log for _, start, _ in record.encode) > 3
    assert any(record.outputs for log in logs for record in log)
    alone = [
        [record._replace(arrivals=tuple(arrival._replace(chain=()) for arrival in record.arrivals)) for record in log]
        for log in logs
    ]
    again = [replay(schedule_for(LANES[kind], "reserve", 1000), log) for log in alone]
    assert list(map(steps, again)) != list(map(steps, alone))


@pytest.mark.parametrize("kind", LANES)
def test_what_a_failed_request_leaves_is_not_shared(kind: str) -> None:
    """Not its prompt, nor what it had found of it: logits that are not finite may come from either."""
    log: list[StepRecord] = []
    executor = Executor(np.random.default_rng(0))
    engine = Engine(schedule_for(LANES[kind], "reserve", 1000), executor, on_step=log.append, reuse=True)
    prompt = tuple(range(4 * BLOCK_SIZE + 1))
    for number, failures in enumerate((0.0, 0.0, 1.0, 0.0, 0.0)):
        executor._failures = failures
        engine.submit(Generation(number, prompt, 2))
        while engine.step() is not None:
            pass
    first = {id_: min(c[1] for r in log for c in r.encode if c[0] == id_) for id_ in range(5)}
    assert [first[id_] > 0 for id_ in range(5)] == [False, True, True, False, True]
    assert [id_ for record in log for id_ in record.failed] == [2]
    assert steps(replay(schedule_for(LANES[kind], "reserve", 1000), log)) == steps(log)


@pytest.mark.parametrize("kind", LANES)
def test_few_rows_are_scored_in_a_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a row of logits: eight prompts of 400 tokens once held up a stream for half a second."""
    monkeypatch.setattr("xgpt.core.policies.pool.MOST_SCORED", 12)
    rng, log = np.random.default_rng(0), []
    engine = Engine(schedule_for(LANES[kind], "reserve", 1000), Executor(rng), on_step=log.append)
    scored = {id_ for id_ in range(40) if rng.random() < 0.6}
    for id_ in range(40):
        sampling = SamplingParams(logprobs=1, prompt_logprobs=1) if id_ in scored else SamplingParams()
        engine.submit(replace(random_generation(id_, rng), sampling=sampling))
    while engine.step() is not None:
        pass
    cuts = getattr(LANES[kind], "mix", False)
    for record in log:
        lengths = [length for id_, _, length in record.encode if id_ in scored]
        assert sum(lengths) <= 12 or (len(lengths) == 1 and not cuts)
    assert sorted(id_ for record in log for id_ in record.finished) == list(range(40))
    assert any(len({id_ for id_, *_ in record.encode} & scored) > 1 for record in log) or kind == "rra"
    assert steps(replay(schedule_for(LANES[kind], "reserve", 1000), log)) == steps(log)


def test_what_the_orders_are_told_apart_by() -> None:
    """Requests expire in such logs, and another order gives another schedule."""
    log = run_engine(LANES["orca"], "reserve", LARGEST + 3, np.random.default_rng(4), "das")
    admitted = {chunk[0] for record in log for chunk in record.encode}
    arrived = {arrival.id for record in log for arrival in record.arrivals}
    cancelled = {id_ for record in log for id_ in record.cancelled}
    assert len(arrived - admitted - cancelled) > 3
    for other in ("fcfs", "sjf", "lpt", "edf"):
        assert steps(replay(schedule_for(LANES["orca"], "reserve", LARGEST + 3, other), log)) != steps(log)


def test_preemption_is_among_what_replays() -> None:
    for kv, has_accounts in (("quantile", False), ("reserve", True)):
        log = run_engine(LANES["orca"], kv, LARGEST + 3, np.random.default_rng(1), has_accounts=has_accounts)
        assert sum(len(record.preempted) for record in log) > 3


def test_shares_and_patience_are_among_what_replays() -> None:
    log = run_engine(LANES["orca"], "reserve", LARGEST + 3, np.random.default_rng(4), "sjf", has_accounts=True)
    alone = [
        record._replace(arrivals=tuple(arrival._replace(account=ANYONE) for arrival in record.arrivals))
        for record in log
    ]
    for other, patience_ns in ((alone, PATIENCE_NS), (log, None)):
        assert steps(replay(schedule_for(LANES["orca"], "reserve", LARGEST + 3, "sjf", patience_ns), other)) != steps(
            log
        )


@pytest.mark.parametrize(("kind", "index"), [(kind, i) for kind in OTHERS for i in range(2)])
def test_another_rule_does_not_replay(kind: str, index: int) -> None:
    other = OTHERS[kind][index]
    logs = [run_engine(LANES[kind], "reserve", 1000, np.random.default_rng(seed)) for seed in range(4)]
    again = [replay(schedule_for(other, "reserve", 1000), log) for log in logs]
    assert list(map(steps, again)) != list(map(steps, logs))
