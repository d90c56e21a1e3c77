"""Replicas as one engine: every token comes, requests spread, an error in one ends all."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.fakes import FakeExecutor, eventually, fake_engine, fake_plan
from tests.rings import examples
from xgpt.core.errors import MachineError
from xgpt.core.policies import Step
from xgpt.core.schema import OrcaSettings
from xgpt.core.schema.step_log import StepRecord
from xrunner.channel.host import EngineHost
from xrunner.channel.messages import Follow, Followed
from xrunner.engine import Engine
from xrunner.generation import Generation
from xrunner.recovery import EngineFailed
from xrunner.replicas import Replicas


def tokens_of(replicas: Replicas, num_requests: int) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {id_: [] for id_ in range(num_requests)}
    ended = 0
    while ended < num_requests:
        for token in replicas.step() or ():
            tokens[token.id].append(token.token)
            ended += token.finish is not None
        replicas.wait(0.01)
    return tokens


def test_requests_spread_and_all_tokens_come() -> None:
    engines: list[Engine] = []
    logs: list[StepRecord] = []

    def build(number: int, on_step: object) -> Engine:
        engine = fake_engine(FakeExecutor(step_s=0.001))
        engine.listen(on_step)  # type: ignore[arg-type]
        engines.append(engine)
        return engine

    before = threading.active_count()
    replicas = Replicas(build, 2, on_step=logs.append)
    for id_ in range(10):
        replicas.submit(Generation(id_, (id_,), 6))
    assert replicas._router.load == [5, 5]
    assert tokens_of(replicas, 10) == {id_: [id_ + i for i in range(6)] for id_ in range(10)}
    assert replicas.pool.num_waiting == replicas.pool.num_running == 0 and replicas._router.load == [0, 0]
    assert sum(len(record.finished) for record in logs) == 10
    for number in range(2):
        of_one = [record for record in logs if record.replica == number]
        assert sorted(record.number for record in of_one) == list(range(len(of_one)))
        assert sum(len(record.finished) for record in of_one) == 5
    assert len({id(engine) for engine in engines}) == 2
    replicas.close()
    assert threading.active_count() == before


def test_one_that_is_cancelled_makes_room_where_it_was() -> None:
    replicas = Replicas(lambda number, on_step: fake_engine(FakeExecutor(step_s=0.001)), 2)
    for id_ in range(4):
        replicas.submit(Generation(id_, (1,), 500))
    replicas.cancel(0)
    replicas.cancel(0)
    assert replicas._router.load == [1, 2]
    replicas.submit(Generation(4, (1,), 1))
    assert replicas._router.load[0] >= 1
    replicas.close()


def test_each_goes_over_to_other_settings() -> None:
    engines: list[Engine] = []

    def build(number: int, on_step: object) -> Engine:
        engines.append(fake_engine(FakeExecutor(step_s=0.001), max_batch=1))
        return engines[-1]

    replicas = Replicas(build, 2)
    for id_ in range(8):
        replicas.submit(Generation(id_, (id_,), 6))
    replicas.go_over_to(fake_plan(policy=OrcaSettings(max_batch=3)))
    assert tokens_of(replicas, 8) == {id_: [id_ + i for i in range(6)] for id_ in range(8)}
    assert not replicas.is_emptying
    assert [engine._schedule.settings.max_batch for engine in engines] == [3, 3]  # type: ignore[attr-defined]
    replicas.close()


def test_a_plan_is_followed_once_every_replica_has_it() -> None:
    """The front counted a plan as deployed while a replica's step, which began before, still ran."""
    gate = threading.Event()

    class Held(FakeExecutor):
        def execute(self, step: Step) -> dict[int, int]:
            gate.wait()
            return super().execute(step)

    sent: list[object] = []
    host = EngineHost(cast(Any, SimpleNamespace(send=sent.append)), cast(Any, None))
    replicas = Replicas(lambda number, on_step: fake_engine(Held() if number else FakeExecutor()), 2)
    for id_ in range(2):
        replicas.submit(Generation(id_, (id_,), 6))
    assert eventually(lambda: replicas.pool.num_running > 0)
    host._engine = replicas
    host._take(Follow(fake_plan(policy=OrcaSettings(max_batch=3)).model_dump_json()))
    for _ in range(10):
        host._step(replicas)
    assert Followed() not in sent
    gate.set()
    assert eventually(lambda: host._step(replicas) or Followed() in sent)
    assert [engine._schedule.settings.max_batch for engine in replicas._engines] == [3, 3]  # type: ignore[attr-defined]
    replicas.close()


def test_a_request_that_fails_in_one_ends_alone() -> None:
    replicas = Replicas(
        lambda number, on_step: fake_engine(FakeExecutor(fail_at=3 if number else None, comes_back=True)), 2
    )
    for id_ in range(4):  # 1 and 3 are the second replica's
        replicas.submit(Generation(id_, (id_,), 2))
    ended: dict[int, str | None] = {}
    while len(ended) < 4:
        ended |= {token.id: token.finish for token in replicas.step() or () if token.finish}
        replicas.wait(0.01)
    assert ended == {0: "length", 1: "length", 2: "length", 3: "error"}
    assert replicas._router.load == [0, 0]
    replicas.close()


def test_an_engine_that_goes_on_failing_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def collect(self: FakeExecutor) -> None:
        raise RuntimeError("the device has gone")

    monkeypatch.setattr(FakeExecutor, "collect", collect)
    replicas = Replicas(lambda number, on_step: fake_engine(FakeExecutor(comes_back=True)), 2)
    for id_ in range(8):
        replicas.submit(Generation(id_, (1,), 9))
    with pytest.raises(EngineFailed, match="4 steps have failed within 60 s, the last: RuntimeError: the device has"):
        tokens_of(replicas, 8)
    replicas.close()


def test_a_replica_that_cannot_be_built_takes_the_others_down() -> None:
    closed: list[int] = []

    class Closing(FakeExecutor):
        def close(self) -> None:
            closed.append(1)

    def build(number: int, on_step: object) -> Engine:
        if number:
            raise MachineError("no such device")
        return fake_engine(Closing())

    with pytest.raises(MachineError, match="no such device"):
        Replicas(build, 2)
    assert closed == [1]


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns a thousand times as often as they do."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_what_others_ask_meanwhile_is_told_at_once(hasty: None) -> None:
    """Listing what a replica's thread changed raised RuntimeError, which ended the engine."""
    replicas = Replicas(lambda number, on_step: fake_engine(FakeExecutor(), max_batch=4), 2)
    errors: list[Exception] = []
    number, stop = examples(600, 200), threading.Event()

    def ask() -> None:
        pool = replicas.pool
        while not stop.is_set():
            try:
                assert min(pool.num_running, pool.num_waiting, pool.num_preemptions, pool.reserved_blocks) >= 0
            except Exception as error:
                errors.append(error)
                return

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for asker in askers:
        asker.start()
    for id_ in range(number):
        replicas.submit(Generation(id_, (id_,), 3))
    try:
        assert all(len(tokens) == 3 for tokens in tokens_of(replicas, number).values())
    finally:
        stop.set()
        for asker in askers:
            asker.join()
        replicas.close()
    assert errors == []
