"""Run an engine at its end of the channel: one thread executes its steps, another reads the front's messages."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from xgpt.core.errors import XgptError
from xgpt.core.schema import Plan
from xgpt.core.schema.step_log import StepRecord
from xrunner.channel import ALIVE_S
from xrunner.channel.ends import EngineEnd
from xrunner.channel.messages import (
    Alive,
    Began,
    Cancel,
    Down,
    Failed,
    Follow,
    Followed,
    Ready,
    Refused,
    Rested,
    Room,
    Stepped,
    Submit,
)
from xrunner.executor import Use
from xrunner.generation import Generation, Token

IDLE_S = 0.5
NOBODY = -1
"""An id that no request has. Cancelling this id wakes the engine."""

logger = logging.getLogger(__name__)


class HostedPool(Protocol):
    @property
    def reserved_blocks(self) -> int: ...
    @property
    def kept_blocks(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...


class HostedEngine(Protocol):
    """The interface of a hosted engine. See `xrunner.engine.Engine`. `step`, `wait` and `close` belong to one thread.
    Any thread may call the other methods.
    """

    takes_seeds: bool
    on_refused: Callable[[str], None]
    on_begin: Callable[[list[int]], None]

    @property
    def pool(self) -> HostedPool: ...
    @property
    def is_emptying(self) -> bool: ...
    @property
    def is_changing(self) -> bool: ...
    @property
    def scores_prompts(self) -> bool: ...
    @property
    def resumes(self) -> bool: ...
    def submit(self, generation: Generation) -> None: ...
    def cancel(self, id_: int) -> None: ...
    def go_over_to(self, plan: Plan) -> None: ...
    def step(self) -> list[Token] | None: ...
    def wait(self, timeout_s: float) -> None: ...
    def uses(self) -> list[Use]: ...
    def close(self) -> None: ...


Build = Callable[[Callable[[StepRecord], None]], HostedEngine]
"""Builds an engine that passes each step's record to a function. The builder is called in the thread that executes
steps, because OpenMP has a team of threads for each thread that uses OpenMP, and two teams on the same cores slow down
each other's barriers.
"""


class EngineHost:
    """An engine at its end of a channel.

    Call `run` in one thread and `read` in another. Both return when the front has closed the channel, or when the
    engine has failed.
    """

    def __init__(self, end: EngineEnd[Down], build: Build) -> None:
        self._end = end
        self._build = build
        self._engine: HostedEngine
        self._is_ready = False
        self._stopping = threading.Event()
        self._records: list[StepRecord] = []
        self._num_plans = self._num_followed = 0
        self._told = Room()

    def run(self) -> None:
        try:
            self._engine = engine = self._build(lambda record: self._records.append(record))
            try:
                engine.on_refused = self._refuse
                engine.on_begin = lambda ids: self._end.send(Began(ids))
                self._is_ready = True
                self._end.send(Ready(engine.takes_seeds, engine.scores_prompts, engine.resumes))
                self._end.send(Alive(engine.uses()))
                while not self._stopping.is_set():
                    self._step(engine)
            finally:
                engine.close()
        except Exception as error:
            # Whatever the error is, the front must learn that the engine has ended.
            logger.debug("the engine has failed", exc_info=True)
            self._end.send(Failed.of(error))
        finally:
            self._stopping.set()
            self._end.end()

    def _step(self, engine: HostedEngine) -> None:
        num_plans = self._num_plans
        tokens = engine.step()
        if num_plans > self._num_followed and not engine.is_changing:
            self._num_followed = num_plans
            self._end.send(Followed())
        room = self._room(engine)
        if tokens is not None:
            records, self._records = self._records, []
            self._told = room
            self._end.send(Stepped(tokens, records, room))
            return
        if room != self._told:
            self._told = room
            self._end.send(Rested(room))
        engine.wait(IDLE_S)

    @staticmethod
    def _room(engine: HostedEngine) -> Room:
        pool = engine.pool
        return Room(pool.reserved_blocks, pool.kept_blocks, pool.num_preemptions, engine.is_emptying)

    def _refuse(self, reason: str) -> None:
        self._num_followed = self._num_plans
        self._end.send(Refused(reason))

    def read(self) -> None:
        alive_s = time.monotonic()
        while not self._stopping.is_set():
            try:
                message = self._end.receive(max(0.0, alive_s + ALIVE_S - time.monotonic()))
            except EOFError:
                self._stopping.set()
                if self._is_ready:
                    self._engine.cancel(NOBODY)
                return
            if message is not None:
                self._take(message)
            if time.monotonic() >= alive_s + ALIVE_S:
                alive_s = time.monotonic()
                self._end.send(Alive(self._engine.uses() if self._is_ready else []))

    def _take(self, message: Down) -> None:
        match message:
            case Submit():
                self._engine.submit(message.generation)
            case Cancel():
                self._engine.cancel(message.id)
            case Follow():
                try:
                    self._engine.go_over_to(Plan.model_validate_json(message.plan))
                except XgptError as error:
                    self._end.send(Refused(str(error)))
                else:
                    self._num_plans += 1
