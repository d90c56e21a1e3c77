"""Requests with a grammar: no step waits for the compiler, and what is compiled takes a bounded amount of memory."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from tests.fakes import FakeExecutor, eventually, expected_tokens, fake_engine
from xgpt.core.policies import LaneSettings, OneLane, Pool
from xgpt.core.schema import ANYONE, Account
from xrunner.engine import Engine
from xrunner.executor import Executor
from xrunner.generation import Generation, SamplingParams, Token
from xrunner.grammar_queue import AHEAD_BYTES
from xsimulator.events import replay

LONG = AHEAD_BYTES // 2


def queue(max_batch: int, blocks: int = 100) -> OneLane:
    return OneLane(LaneSettings(mix=True, max_batch=max_batch), Pool(blocks, 16))


class Compiled:
    """A compiled grammar that a test can watch."""


class Compiler(FakeExecutor):
    """Compiles a grammar when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_compile = threading.Semaphore(0)
        self.asked: list[str] = []
        self.alive: weakref.WeakSet[Compiled] = weakref.WeakSet()

    def prepare(self, grammar: str) -> object:
        self.asked.append(grammar)
        assert self.may_compile.acquire(timeout=10)
        if grammar == "refused":
            raise ValueError("no such rule")
        self.alive.add(compiled := Compiled())
        return compiled


class Run:
    """An engine, and what it has answered."""

    def __init__(self, max_batch: int = 4) -> None:
        self.executor = Compiler()
        self.engine = fake_engine(self.executor, max_batch=max_batch)
        self.tokens: dict[int, list[Token]] = {}

    def submit(self, id_: int, grammar: str | None = None, length: int = 3, account: Account = ANYONE) -> None:
        self.engine.submit(Generation(id_, (id_,), length, sampling=SamplingParams(grammar=grammar), account=account))

    def steps(self, count: int = 20) -> None:
        for _ in range(count):
            for token in self.engine.step() or ():
                self.tokens.setdefault(token.id, []).append(token)

    def has_answered(self, id_: int, length: int = 3) -> bool:
        self.steps()
        return [token.token for token in self.tokens.get(id_, ())] == expected_tokens((id_,), length)


@pytest.fixture
def run() -> Run:
    return Run()


def test_others_do_not_wait_for_a_grammar(run: Run) -> None:
    run.submit(1, "dear")
    run.submit(2)
    assert run.has_answered(2) and 1 not in run.tokens
    run.executor.may_compile.release()
    assert eventually(lambda: run.has_answered(1))


def test_a_request_that_was_compiled_for_some_steps_replays() -> None:
    executor, log = Compiler(), []
    engine = Engine(queue(4), executor, on_step=log.append)
    engine.submit(Generation(1, (1,), 5, sampling=SamplingParams(grammar="dear"), arrival_ns=0))
    engine.submit(Generation(2, (2,), 9, arrival_ns=0))
    for _ in range(3):
        engine.step()
    executor.may_compile.release()
    assert eventually(lambda: engine.step() is None)
    assert eventually(lambda: engine.step() is None and sum(len(record.finished) for record in log) == 2)
    assert [[arrival.id for arrival in record.arrivals] for record in log if record.arrivals] == [[2], [1]]
    assert [record[2:] for record in replay(queue(4), log)] == [record[2:] for record in log]


def test_equal_grammars_are_compiled_once_and_until_the_last_has_ended(run: Run) -> None:
    for id_ in (1, 2, 3):
        run.submit(id_, "dear", length=id_)
    run.executor.may_compile.release()
    assert eventually(lambda: all(run.has_answered(id_, id_) for id_ in (1, 2, 3)))
    assert run.executor.asked == ["dear"]
    assert eventually(lambda: not gc.collect() and not run.executor.alive)


def test_a_request_that_is_cancelled_while_it_is_compiled_never_begins(run: Run) -> None:
    run.submit(1, "dear")
    assert eventually(lambda: run.executor.asked == ["dear"])
    run.submit(2, "another")
    run.engine.cancel(1)
    run.executor.may_compile.release(2)
    assert eventually(lambda: run.has_answered(2))
    assert 1 not in run.tokens and run.engine.pool.is_idle


def test_a_cancelled_request_that_waits_to_begin_gives_its_grammar_back() -> None:
    run = Run(max_batch=1)
    run.submit(1, length=400)
    run.steps(1)
    run.submit(2, "dear")
    run.executor.may_compile.release()
    assert eventually(lambda: len(run.executor.alive) == 1)
    run.engine.cancel(2)
    run.steps(2)
    assert eventually(lambda: not run.executor.alive)


def test_only_the_request_whose_grammar_cannot_be_compiled_fails(run: Run) -> None:
    run.submit(1, "refused")
    run.submit(2, "good")
    run.executor.may_compile.release(2)
    assert eventually(lambda: run.has_answered(2))
    (token,) = run.tokens[1]
    assert token.finish == "error" and token.error == "its grammar cannot be compiled: no such rule"


def crowded(account: Account = ANYONE) -> Run:
    """Return a run in which one request runs and five with long grammars wait, two of these with a compiled grammar."""
    run = Run(max_batch=1)
    run.submit(0, length=400)
    run.steps(1)
    run.executor.may_compile.release(99)
    for id_ in range(1, 6):
        run.submit(id_, str(id_) * LONG, length=2, account=account)
    assert eventually(lambda: run.steps(1) or run.engine.pool.num_waiting == 2)
    return run


def test_what_is_compiled_for_requests_that_wait_is_bounded() -> None:
    run = crowded()
    assert len(run.executor.asked) == 2 and len(run.executor.alive) == 2
    run.engine.cancel(0)
    assert eventually(lambda: all(run.has_answered(id_, 2) for id_ in range(1, 6)))
    assert eventually(lambda: not run.executor.alive)


def test_schemas_of_one_account_do_not_hold_up_another_account() -> None:
    """One that is compiled but must wait to begin once held up the requests of all keys, whatever their priority."""
    run = crowded(Account("greedy"))
    run.submit(6, "small", account=Account("modest"))
    run.submit(7, "urgent", account=Account("urgent", priority=1))
    assert eventually(lambda: run.steps(1) or run.engine.pool.num_waiting == 4)
    assert len(run.executor.alive) == 4
    run.engine.cancel(0)
    assert eventually(lambda: run.has_answered(7))


def test_accounts_take_turns_at_the_compiler() -> None:
    run = Run(max_batch=9)
    for id_ in range(1, 5):
        run.submit(id_, f"greedy {id_}", account=Account("greedy"))
    assert eventually(lambda: bool(run.executor.asked))
    run.submit(5, "modest", account=Account("modest"))
    run.submit(6, "urgent", account=Account("urgent", priority=1))
    run.executor.may_compile.release(6)
    assert eventually(lambda: run.steps(1) or len(run.executor.asked) == 6)
    assert run.executor.asked == ["greedy 1", "urgent", "modest", "greedy 2", "greedy 3", "greedy 4"]


def test_a_parked_request_is_compiled_by_the_workers_of_the_other_plan() -> None:
    executors: list[Compiler] = [Compiler()]

    def deploy(_: object) -> Executor:
        executors.append(Compiler())
        executors[-1].may_compile.release(9)
        return executors[-1]

    engine = Engine(queue(1), executors[0], deploy=deploy)
    tokens: list[Token] = []
    engine.submit(Generation(1, (1,), 9))
    engine.step()
    engine.submit(Generation(2, (2,), 3, sampling=SamplingParams(grammar="dear")))
    executors[0].may_compile.release()
    assert eventually(lambda: engine.step() is not None and engine.pool.num_waiting == 1)
    engine.apply(queue(1, 200))

    def has_ended() -> bool:
        tokens.extend(token for token in engine.step() or () if token.id == 2)
        return len(tokens) == 3

    assert eventually(has_ended)
    assert [executor.asked for executor in executors] == [["dear"], ["dear"]]
    assert [token.token for token in tokens] == expected_tokens((2,), 3)


def test_a_parked_request_that_is_cancelled_gives_its_grammar_back() -> None:
    executor = Compiler()
    engine = Engine(queue(1), executor, deploy=lambda _: Compiler())
    engine.submit(Generation(1, (1,), 400))
    engine.step()
    engine.apply(queue(1, 200))
    engine.submit(Generation(2, (2,), 3, sampling=SamplingParams(grammar="dear")))
    executor.may_compile.release()
    assert eventually(lambda: engine.step() is not None and len(executor.alive) == 1)
    engine.step()
    engine.cancel(2)
    engine.step()
    assert engine.is_emptying and eventually(lambda: not executor.alive)
