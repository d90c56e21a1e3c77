"""Workers that are lost in mid-stream: no token comes twice, none is missing, whatever the policy."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest

from xgpt.errors import MachineError
from xgpt.policies import LaneSettings, OneLane, Pool, Schedule, Step, TwoLane, TwoLaneSettings
from xgpt.schema.step_log import StepRecord
from xrunner.engine import Engine
from xrunner.executor import OneAtATime, WorkerLost
from xrunner.generation import Generation
from xsimulator.events import replay

BLOCKS, BLOCK_SIZE = 40, 4


def one_lane(kv: str = "reserve", **settings: object) -> Schedule:
    pool = Pool(BLOCKS, BLOCK_SIZE, kv=kv, hold_finished=bool(settings.get("refill_when_empty")))  # type: ignore[arg-type]
    return OneLane(LaneSettings(**settings), pool)  # type: ignore[arg-type]


def two_lanes() -> Schedule:
    settings = TwoLaneSettings(
        encode_tokens=12.0, encode_stages=1, encode_blocks=8, max_decode_batch=6, decode_batch=4.0
    )
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

    def start(self, generation: Generation) -> None:
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


def run(kind: str, executor: Counting) -> tuple[dict[int, list[int]], list[StepRecord], Engine]:
    log: list[StepRecord] = []
    engine = Engine(SCHEDULES[kind](), executor, on_step=log.append)
    rng = np.random.default_rng(4)
    generations = [
        Generation(id_, (1000 * id_,) * int(rng.integers(1, 20)), 12, output_length=int(rng.integers(1, 12)))
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


@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_tokens_go_on_where_they_were(kind: str, resumes: bool) -> None:
    if kind == "quantile" and not resumes:
        pytest.skip("a preempted request resumes, so such a model is refused this promise")
    undisturbed, _, _ = run(kind, Counting((), resumes=resumes))
    executor = Counting((1, 4, 5, 11, 30), resumes=resumes)
    tokens, _, engine = run(kind, executor)
    assert tokens == undisturbed
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
        return OneLane(LaneSettings(mix=True, max_batch=1), Pool(BLOCKS, BLOCK_SIZE, order="edf"))

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
