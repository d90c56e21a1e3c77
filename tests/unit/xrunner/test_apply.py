"""Another plan in mid-run: no token is lost or wrong, running requests stay or are waited for."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import FakeExecutor, expected_tokens
from tests.rings import examples
from xgpt.core.errors import MachineError
from xgpt.core.policies import LaneSettings, OneLane, Pool, Schedule, TwoLane, TwoLaneSettings
from xgpt.core.schema import Stage
from xrunner.engine import Engine
from xrunner.executor import Executor
from xrunner.generation import Generation, Token

ORCA = LaneSettings(mix=True, max_batch=4)
CHUNKED = LaneSettings(mix=True, token_budget=6, max_batch=5)
RRA = LaneSettings(mix=False, encode_every=3, encode_tokens=12, carried_batch=2, decode_batch=4)
STATIC = LaneSettings(mix=False, max_batch=3, refill_when_empty=True)
WAA = TwoLaneSettings(encode_tokens=12.0, encode_stages=1, encode_blocks=20, max_decode_batch=5)


def schedule(settings: LaneSettings, blocks: int = 60) -> OneLane:
    return OneLane(settings, Pool(blocks, 4, holds_finished=settings.refill_when_empty))


def two_lanes(settings: TwoLaneSettings) -> TwoLane:
    return TwoLane(settings, Pool(60, 4))


def prompt(id_: int) -> tuple[int, ...]:
    return tuple(range(id_ % 9 + 1))


class Run:
    """An engine whose tokens are gathered."""

    def __init__(self, first: Schedule, *, can_deploy: bool = True) -> None:
        self.deployed: list[Schedule] = []
        self.tokens: dict[int, list[int]] = {}
        self.finished: set[int] = set()
        self.engine = Engine(first, FakeExecutor(), deploy=self._deploy if can_deploy else None)

    def _deploy(self, schedule: Schedule) -> Executor:
        self.deployed.append(schedule)
        return FakeExecutor()

    def submit(self, *ids: int, length: int = 7) -> None:
        for id_ in ids:
            self.engine.submit(Generation(id_, prompt(id_), 12, output_length=length + id_ % 4))

    def step(self) -> list[Token] | None:
        tokens = self.engine.step()
        for token in tokens or ():
            self.tokens.setdefault(token.id, []).append(token.token)
            if token.finish:
                self.finished.add(token.id)
        return tokens

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def drain(self) -> None:
        for _ in range(500):
            if self.step() is None and self.engine.pool.is_idle:
                return
        raise AssertionError("the engine does not come to rest")

    def check(self, ids: range, length: int = 7) -> None:
        assert self.finished == set(ids)
        for id_ in ids:
            assert self.tokens[id_] == expected_tokens(prompt(id_), length + id_ % 4), id_
        assert self.engine.pool.reserved_blocks == 0


@settings(max_examples=examples(60, 15))
@given(st.lists(st.tuples(st.integers(0, 8), st.sampled_from([ORCA, CHUNKED, RRA])), min_size=1, max_size=6))
def test_a_swap_between_two_steps_loses_no_request(changes: list[tuple[int, LaneSettings]]) -> None:
    run = Run(schedule(CHUNKED))
    for number, (num_steps, to) in enumerate(changes):
        run.submit(*range(5 * number, 5 * number + 5))
        run.steps(num_steps)
        run.engine.apply(schedule(to))
    run.drain()
    run.check(range(5 * len(changes)))
    assert run.deployed == []


def test_a_swap_takes_effect_with_the_next_step() -> None:
    run = Run(schedule(ORCA))
    run.submit(*range(10))
    run.steps(2)
    assert run.engine.pool.num_running == 4
    run.engine.apply(schedule(LaneSettings(mix=True, max_batch=8)))
    run.step()
    assert run.engine.pool.num_running == 8


@settings(max_examples=examples(30, 10))
@given(st.integers(0, 8), st.integers(0, 8))
def test_both_lanes_go_over_between_two_steps(num_before: int, num_between: int) -> None:
    run = Run(two_lanes(WAA))
    run.submit(*range(8))
    run.steps(num_before)
    run.engine.apply(two_lanes(replace(WAA, encode_tokens=30.0, max_decode_batch=9)))
    run.submit(*range(8, 16))
    run.steps(num_between)
    run.engine.apply(two_lanes(WAA))
    run.drain()
    run.check(range(16))
    assert run.deployed == []


def test_lanes_with_other_micro_batches_wait_for_who_runs() -> None:
    run = Run(two_lanes(WAA))
    run.submit(*range(8))
    run.steps(3)
    run.engine.apply(two_lanes(replace(WAA, decode_microbatches=2)))
    run.drain()
    run.check(range(8))
    assert len(run.deployed) == 1


def test_the_same_settings_on_other_stages_are_another_placement() -> None:
    first, second = (Stage(devices=(n,), decode_layers=(0, 1), kv_blocks=60) for n in range(2))
    run = Run(OneLane(ORCA, Pool(60, 4), (first,)))
    run.submit(*range(5))
    run.steps(2)
    run.engine.apply(OneLane(CHUNKED, Pool(60, 4), (first,)))
    run.steps(2)
    assert not run.engine.is_emptying
    run.engine.apply(OneLane(CHUNKED, Pool(60, 4), (second,)))
    run.drain()
    run.check(range(5))
    assert [schedule.stages for schedule in run.deployed] == [(second,)]


@settings(max_examples=examples(30, 10))
@given(st.integers(0, 12), st.sampled_from([schedule(STATIC), schedule(RRA, blocks=40)]))
def test_another_placement_waits_for_who_runs_and_keeps_who_waits(num_steps: int, then: OneLane) -> None:
    then = OneLane(then.settings, Pool(then.pool.kv_blocks, 4, holds_finished=then.pool.holds_finished))
    run = Run(schedule(ORCA))
    run.submit(*range(9))
    run.steps(num_steps)
    running = set(run.engine.pool.running)
    run.engine.apply(then)
    run.submit(*range(9, 12))
    run.engine.submit(Generation(99, (1,), 5))
    run.engine.cancel(99)
    while not run.deployed:
        if run.step() is not None and not run.deployed:
            assert set(run.engine.pool.running) <= running
            assert run.engine.is_emptying
    assert running <= run.finished
    run.drain()
    run.check(range(12))
    assert run.engine.pool is then.pool


def test_without_means_to_deploy_another_placement_is_an_error() -> None:
    run = Run(schedule(ORCA), can_deploy=False)
    run.engine.apply(schedule(STATIC))
    with pytest.raises(MachineError, match="another placement"):
        run.step()
