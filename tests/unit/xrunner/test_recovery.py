"""Workers that are lost in mid-stream: no token comes twice, none is missing, whatever the policy."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest

from xgpt.core.errors import MachineError
from xgpt.core.policies import BlockTable, LaneSettings, OneLane, Pool, Schedule, Step, TwoLane, TwoLaneSettings
from xgpt.core.policies.admission import make_queue
from xgpt.core.schema.step_log import StepRecord
from xrunner.engine import Engine
from xrunner.executor import OneAtATime, WorkerLost
from xrunner.generation import NO_TOKEN, Generation
from xsimulator.events import replay

BLOCKS, BLOCK_SIZE = 40, 4


def one_lane(kv: str = "reserve", **settings: object) -> Schedule:
    pool = Pool(BLOCKS, BLOCK_SIZE, kv=kv, holds_finished=bool(settings.get("refill_when_empty")))  # type: ignore[arg-type]
    return OneLane(LaneSettings(**settings), pool)  # type: ignore[arg-type]


def two_lanes() -> Schedule:
    settings = TwoLaneSettings(encode_tokens=12.0, encode_stages=1, encode_blocks=8, max_decode_batch=6)
    return TwoLane(settings, Pool(BLOCKS, BLOCK_SIZE))


SCHEDULES = {
    "rra": lambda: one_lane(mix=False, encode_every=3, encode_tokens=12.0, carried_batch=2.0, decode_batch=4.0),
    "orca": lambda: one_lane(mix=True, max_batch=5, microbatches=2),
    "chunked": lambda: one_lane(mix=True, max_batch=5, token_budget=7),
    "quantile": lambda: one_lane("quantile", mix=True, max_batch=9),
    "static": lambda: one_lane(mix=False, max_batch=4, refill_when_empty=True),
    "waa": two_lanes,
}


class Counting(OneAtATime):
    """A request's tokens count up from its prompt's first number; workers die at given calls of `collect`."""

    def __init__(self, deaths: Collection[int], *, resumes: bool, comes_back: bool = True) -> None:
        super().__init__()
        self.logprobs = {}
        self.resumes = resumes
        self.running: dict[int, list[int]] = {}
        self._deaths = deaths
        self._comes_back = comes_back
        self._calls = 0

    def start(self, generation: Generation, table: BlockTable, moves_to: BlockTable | None = None) -> None:
        assert generation.id not in self.running
        assert self.resumes or not generation.num_resumed
        self.running[generation.id] = list(generation.prompt)

    def collect(self) -> tuple[Step, dict[int, int]]:
        self._calls += 1
        if self._calls in self._deaths:
            raise WorkerLost("worker 0 has died")
        return super().collect()

    def execute(self, step: Step) -> dict[int, int]:
        ended = [c.id for c in step.encode if c.start + c.length == len(self.running[c.id])]
        tokens = {}
        for id_ in [*ended, *step.decode]:
            tokens[id_] = self.running[id_][-1] + 1
            self.running[id_].append(tokens[id_])
        return tokens

    def release(self, ids: Collection[int]) -> None:
        for id_ in ids:
            self.running.pop(id_, None)

    def restart(self) -> None:
        if not self._comes_back:
            raise MachineError("workers have died 4 times within 60 s")
        self.running.clear()
        self._begun.clear()


def run(kind: str, executor: Counting, *, reuse: bool = False) -> tuple[dict[int, list[int]], list[StepRecord], Engine]:
    log: list[StepRecord] = []
    engine = Engine(SCHEDULES[kind](), executor, on_step=log.append, reuse=reuse)
    rng = np.random.default_rng(4)
    generations = [
        Generation(id_, (1000 * (id_ % 3),) * int(rng.integers(1, 20)), 12, output_length=int(rng.integers(1, 12)))
        for id_ in range(20)
    ]
    tokens: dict[int, list[int]] = {g.id: [] for g in generations}
    ended: set[int] = set()
    while generations or not engine.pool.is_idle:
        if generations:
            engine.submit(generations.pop())
        for token in engine.step() or ():
            assert token.id not in ended
            tokens[token.id].append(token.token)
            if token.finish:
                ended.add(token.id)
    assert len(ended) == 20
    return tokens, log, engine


@pytest.mark.parametrize(("resumes", "reuse"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_tokens_go_on_where_they_were(kind: str, resumes: bool, reuse: bool) -> None:
    if kind == "quantile" and not resumes:
        pytest.skip("a preempted request resumes, so such a model is refused this promise")
    undisturbed, _, _ = run(kind, Counting((), resumes=resumes))
    executor = Counting((1, 4, 5, 11, 30), resumes=resumes)
    tokens, log, engine = run(kind, executor, reuse=reuse)
    assert tokens == undisturbed
    shares = any(arrival.chain for record in log for arrival in record.arrivals)
    assert shares == (resumes and reuse)
    assert executor.running == {}
    assert engine.pool.reserved_blocks == 0


def test_a_log_begins_anew_and_replays() -> None:
    _, log, _ = run("orca", Counting((9,), resumes=True))
    begins = [i for i, record in enumerate(log) if record.number == 0]
    assert len(begins) == 2
    after = log[begins[1] :]
    assert [record[2:] for record in replay(SCHEDULES["orca"](), after)] == [record[2:] for record in after]


def test_deadlines_and_order_outlive_a_loss() -> None:
    def schedule() -> Schedule:
        return OneLane(LaneSettings(mix=True, max_batch=1), Pool(BLOCKS, BLOCK_SIZE, waiting=make_queue("edf")))

    log: list[StepRecord] = []
    engine = Engine(schedule(), Counting((2,), resumes=True), clock=lambda: 0, on_step=log.append)
    for id_, deadline_ns in ((0, 400), (1, 300), (2, 100), (3, 200)):
        engine.submit(Generation(id_, (1000 * id_,), 3, deadline_ns=deadline_ns))
    while engine.step() is not None:
        pass
    (again,) = [i for i, record in enumerate(log) if record.number == 0][1:]
    after = log[again:]
    assert [id_ for record in after for id_ in record.finished] == [2, 3, 1, 0]
    assert {arrival.id: arrival.deadline_ns for arrival in after[0].arrivals} == {0: 400, 1: 300, 2: 100, 3: 200}
    assert [record[2:] for record in replay(schedule(), after)] == [record[2:] for record in after]


def test_workers_that_do_not_come_back_end_the_engine() -> None:
    with pytest.raises(MachineError, match="4 times within 60 s"):
        run("rra", Counting((3,), resumes=True, comes_back=False))


class Poisoned(Counting):
    """Steps fail that have a request whose next token is this."""

    def __init__(self, token: int) -> None:
        super().__init__((), resumes=True)
        self._token = token
        self.num_restarts = 0

    def execute(self, step: Step) -> dict[int, int]:
        tokens = super().execute(step)
        if self._token in tokens.values():
            raise ValueError(f"{self._token} is bad luck")
        return tokens

    def restart(self) -> None:
        super().restart()
        self.num_restarts += 1


@pytest.mark.parametrize("kind", [kind for kind in SCHEDULES if kind != "quantile"])
def test_a_request_that_fails_its_steps_ends_alone(kind: str) -> None:
    undisturbed, _, _ = run(kind, Counting((), resumes=True))
    executor = Poisoned(7004)
    log: list[StepRecord] = []
    engine = Engine(SCHEDULES[kind](), executor, on_step=log.append)
    rng = np.random.default_rng(4)
    for id_ in reversed(range(20)):
        size, output = int(rng.integers(1, 20)), int(rng.integers(1, 12))
        id_ = 19 - id_
        engine.submit(Generation(id_, (1000 * id_,) * size, 12, output_length=output if id_ != 7 else 12))
    tokens: dict[int, list[int]] = {id_: [] for id_ in range(20)}
    errors = {}
    while (step := engine.step()) is not None or not engine.pool.is_idle:
        for token in step or ():
            if token.finish == "error":
                errors[token.id] = token.error
            else:
                tokens[token.id].append(token.token)
    assert errors == {7: "steps with it fail: ValueError: 7004 is bad luck"}
    assert tokens[7] == [7001, 7002, 7003]
    assert {id_: len(step) for id_, step in tokens.items() if id_ != 7} == {
        id_: len(step) for id_, step in undisturbed.items() if id_ != 7
    }
    assert executor.num_restarts == 2
    assert executor.running == {} and engine.pool.reserved_blocks == 0


def test_a_request_that_cannot_be_handed_over_ends_alone() -> None:
    class Strict(Counting):
        def accept(self, generation: Generation) -> None:
            if generation.max_output > 100:
                raise OverflowError("can't serialize ints >= 2**64")

    engine = Engine(SCHEDULES["orca"](), Strict((), resumes=True))
    engine.submit(Generation(0, (1,), 2))
    engine.submit(Generation(1, (2,), 101))
    engine.submit(Generation(2, (3,) * 90, 90))
    ended = {}
    while (step := engine.step()) is not None:
        ended |= {token.id: (token.finish, token.error) for token in step if token.finish}
    assert ended[0] == ("length", "")
    assert ended[1] == ("error", "it cannot be handed to a worker: OverflowError: can't serialize ints >= 2**64")
    assert ended[2] == ("error", "it does not fit in the K/V memory of the plan that runs now")


def test_a_token_that_cannot_be_chosen_ends_its_request_alone() -> None:
    class Choosy(Counting):
        def execute(self, step: Step) -> dict[int, int]:
            tokens = super().execute(step)
            self.failed = {id_: "no token can be chosen" for id_, token in tokens.items() if token == 1003}
            return tokens | dict.fromkeys(self.failed, NO_TOKEN)

    engine = Engine(SCHEDULES["orca"](), executor := Choosy((), resumes=True))
    for id_ in range(3):
        engine.submit(Generation(id_, (1000 * id_,), 6))
    tokens: dict[int, list[object]] = {id_: [] for id_ in range(3)}
    while (record := engine.step()) is not None:
        for token in record:
            tokens[token.id].append(token.error or token.token)
    assert tokens[1] == [1001, 1002, "no token can be chosen"]
    assert tokens[0] == [1, 2, 3, 4, 5, 6] and len(tokens[2]) == 6
    assert executor.running == {} and engine.pool.reserved_blocks == 0


def two_lane_plans(*encode_blocks: int) -> list[Schedule]:
    settings = [
        TwoLaneSettings(encode_tokens=12.0, encode_stages=1, encode_blocks=blocks, max_decode_batch=6)
        for blocks in encode_blocks
    ]
    return [TwoLane(of_plan, Pool(BLOCKS, BLOCK_SIZE)) for of_plan in settings]


def test_requests_that_another_plan_cannot_hold_end_when_it_comes() -> None:
    """They stalled all behind them."""
    before, then = two_lane_plans(8, 4)
    executor = Counting((), resumes=True)
    engine = Engine(before, executor, deploy=lambda schedule: executor)
    for id_, length in enumerate((5, 30, 5, 30, 16, 17)):
        engine.submit(Generation(id_, (1000 * id_,) * length, 3))
    first = engine.step() or []
    engine.apply(then)
    ended = {token.id: token.finish for token in first if token.finish}
    while (step := engine.step()) is not None:
        ended |= {token.id: token.finish for token in step if token.finish}
    assert set(ended) == set(range(6))
    assert ended[3] == ended[5] == "error" and ended[2] == ended[4] == "length"


def test_a_plan_that_cannot_be_deployed_is_gone_back_from() -> None:
    before, then = two_lane_plans(8, 4)
    deployed: list[Schedule] = []

    def deploy(schedule: Schedule) -> Counting:
        if schedule is then:
            raise RuntimeError("can't allocate memory: you tried to allocate 2 TiB")
        deployed.append(schedule)
        return Counting((), resumes=True)

    refused: list[str] = []
    engine = Engine(before, Counting((), resumes=True), deploy=deploy)
    engine.on_refused = refused.append
    for id_ in range(4):
        engine.submit(Generation(id_, (1000 * id_,) * 20, 3))
    engine.step()
    engine.apply(then)
    ended = {}
    while (step := engine.step()) is not None:
        ended |= {token.id: token.finish for token in step if token.finish}
    assert ended == dict.fromkeys(range(4), "length")
    assert len(deployed) == 1 and refused == ["RuntimeError: can't allocate memory: you tried to allocate 2 TiB"]
    assert not engine.is_emptying and engine.pool.prompt_blocks == 8


@pytest.mark.parametrize("resumes", [True, False])
def test_a_request_that_a_failing_rule_has_taken_is_not_lost(resumes: bool) -> None:
    """A rule failed between the queue and the batch: its requests were in neither, and waited for ever."""

    class Dropping(OneLane):
        failed = 0

        def next_step(self, lane: str = "both") -> Step | None:  # type: ignore[override]
            if not Dropping.failed and len(self.pool.waiting) and self.pool.num_running > 2:
                Dropping.failed += 1
                self.pool.waiting.pop()
                raise KeyError(5)
            return super().next_step()

    undisturbed, _, _ = run("chunked", Counting((), resumes=resumes))
    settings = LaneSettings(mix=True, max_batch=5, token_budget=7)
    SCHEDULES["dropping"] = lambda: Dropping(settings, Pool(BLOCKS, BLOCK_SIZE))
    try:
        tokens, _, _ = run("dropping", Counting((), resumes=resumes))
    finally:
        del SCHEDULES["dropping"]
    assert Dropping.failed and tokens == undisturbed
