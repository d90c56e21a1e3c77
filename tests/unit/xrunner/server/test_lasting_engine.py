"""An engine that is started anew for another number of replicas goes on with its requests."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.fakes import fake_plan
from xgpt.core.errors import MachineError, XgptError
from xgpt.core.schema import Plan
from xrunner.channel import EngineLost
from xrunner.channel.remote import RemoteEngine
from xrunner.generation import Generation, Token
from xrunner.server.lasting_engine import LastingEngine

TOKENS = 6


class CountingEngine:
    """Makes the tokens 0, 1, 2, ... of each request; starts anew with any plan but one of `bad` replicas."""

    def __init__(self, bad: int) -> None:
        self.plans: list[Plan] = []
        self.refused: list[str] = []
        self.is_changing = False
        self._bad = bad
        self._made: dict[int, int] = {}
        self._near, self._far = socket.socketpair()
        self.pool = SimpleNamespace(limits=SimpleNamespace(can_ever_fit=lambda request: True))
        self.on_refused = self.refused.append
        self._listeners: list[Any] = []

    def listen(self, on_step: Any) -> None:
        self._listeners.append(on_step)

    def fileno(self) -> int:
        return self._near.fileno()

    def resumes(self, generation: Generation) -> bool:
        return False

    def repeats(self, generation: Generation) -> bool:
        return True

    def submit(self, generation: Generation) -> None:
        self._made[generation.id] = 0
        self._far.send(b"x")

    def step(self) -> list[Token] | None:
        if not self._made:
            return None
        for listener in self._listeners:
            listener("record")
        tokens = [Token(id_, n, "length" if n == TOKENS - 1 else None) for id_, n in self._made.items()]
        self._made = {id_: n + 1 for id_, n in self._made.items() if n < TOKENS - 1}
        return tokens

    def restart(self, plan: Plan) -> None:
        self._made.clear()
        if plan.replicas == self._bad:
            raise MachineError("out of memory")
        self.plans.append(plan)

    def close(self) -> None:
        self._near.close()
        self._far.close()


def served(
    engine: CountingEngine,
    running: Plan,
    note: Callable[[LastingEngine, list[Token]], None] = lambda lasting, tokens: None,
    on_return: Callable[[Plan], None] = lambda plan: None,
    failures: list[str] | None = None,
) -> None:
    """Serve one request to its end, or until the engine has failed; `note` is called with the tokens of each step."""
    done = asyncio.Event()

    def on_step(tokens: list[Token], records: object) -> None:
        note(lasting, tokens)
        if any(token.finish for token in tokens):
            done.set()

    failed = [] if failures is None else failures

    def on_failed(error: XgptError) -> None:
        failed.append(str(error))
        done.set()

    async def run() -> None:
        lasting.start()
        lasting.submit(Generation(0, prompt=(1,), max_output=TOKENS))
        await asyncio.wait_for(done.wait(), 5)
        await lasting.stop()

    lasting = LastingEngine(
        cast(RemoteEngine, engine), running=lambda: running, on_step=on_step, on_return=on_return, on_failed=on_failed
    )
    asyncio.run(run())
    assert failed == [] or failures is not None


@pytest.mark.parametrize("bad", [0, 2])
def test_another_number_of_replicas_loses_no_request(bad: int) -> None:
    one = fake_plan()
    two = one.model_copy(update={"replicas": 2})
    engine, tokens_out, returned, asked = CountingEngine(bad), list[int](), list[Plan](), list[Plan]()

    def note(lasting: LastingEngine, tokens: list[Token]) -> None:
        tokens_out.extend(token.token for token in tokens)
        if len(tokens_out) == 2 and not asked:
            asked.append(two)
            lasting.go_over_to(two)

    served(engine, one, note, returned.append)
    assert tokens_out == list(range(TOKENS))
    assert engine.plans == ([one] if bad else [two])
    assert (returned, engine.refused) == (([], ["out of memory"]) if bad else ([two], []))


class MortalEngine(CountingEngine):
    """Is lost once, after two steps."""

    num_steps = 0

    def step(self) -> list[Token] | None:
        self.num_steps += bool(self._made)
        if self.num_steps == 3:
            self.num_steps += 1
            raise EngineLost("its process has ended")
        return super().step()


class LateEngine(MortalEngine):
    """Is lost once, and then fails to start some times."""

    def restart(self, plan: Plan) -> None:
        if self._bad:
            self._bad -= 1
            raise EngineLost("the engine does not start: its process has ended: signal 9")
        super().restart(plan)


def test_a_start_that_fails_is_one_loss_and_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """Once it ended the server with all requests."""
    tokens: list[int] = []
    served(LateEngine(2), fake_plan(), lambda _, step: tokens.extend(token.token for token in step))
    assert tokens == list(range(TOKENS))
    assert sum("starting it again" in record.getMessage() for record in caplog.records) == 2


def test_an_engine_that_does_not_start_any_more_ends_the_server() -> None:
    failures: list[str] = []
    served(LateEngine(9), fake_plan(), failures=failures)
    (failure,) = failures
    assert "lost 4 times within 10 minutes" in failure and failure.endswith("signal 9")


def test_the_log_says_when_a_lost_engine_is_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    served(MortalEngine(0), fake_plan())
    lost, back = (record.getMessage() for record in caplog.records if record.name.endswith("lasting_engine"))
    assert lost == "the engine is lost: its process has ended; restarting it with 1 requests"
    assert re.fullmatch(r"the engine is back after \d\.\d s", back)
