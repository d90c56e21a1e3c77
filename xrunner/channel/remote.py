"""Let the front (the HTTP server's process) use an engine at the other end of the channel."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from xgpt.core.errors import MachineError
from xgpt.core.policies import KvLimits
from xgpt.core.processes import children_of, cpu_s, end, is_at_work
from xgpt.core.schema import Plan
from xgpt.core.schema.step_log import StepRecord
from xrunner.channel import BUSY_S, LONG_STEP_S, SILENCE_S, START_CPU_S, START_SILENCE_S, STEP_S, EngineLost
from xrunner.channel.ends import FrontEnd, pair
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
    Up,
    decode_up,
)
from xrunner.executor import Use
from xrunner.generation import Generation, Token

END_S = 30.0
"""Seconds in which an engine must end its step and its workers. An engine that takes longer is killed."""
HUNG_S = 5.0
POLL_S = 0.5

logger = logging.getLogger(__name__)

OnStep = Callable[[StepRecord], None]


class Inside:
    def __init__(self, limits: KvLimits) -> None:
        self.limits = limits
        self.room = Room()
        self.waiting: dict[int, None] = {}
        self.running: dict[int, None] = {}

    def begin(self, ids: Sequence[int]) -> None:
        for id_ in ids:
            if id_ in self.waiting:
                del self.waiting[id_]
                self.running[id_] = None

    def note(self, records: Sequence[StepRecord], tokens: Sequence[Token]) -> None:
        for record in records:
            for id_ in record.preempted:
                if id_ in self.running:
                    del self.running[id_]
                    self.waiting[id_] = None
            self.begin([id_ for id_, _, _ in record.encode])
        self.begin([token.id for token in tokens])
        for token in tokens:
            if token.finish is not None:
                self.leave(token.id)

    def leave(self, id_: int) -> None:
        self.waiting.pop(id_, None)
        self.running.pop(id_, None)

    def clear(self) -> None:
        self.waiting.clear()
        self.running.clear()
        self.room = Room()


class FrontConnection(Protocol):
    @property
    def has_gone(self) -> bool: ...
    def fileno(self) -> int: ...
    def wait(self, timeout_s: float) -> None: ...
    def send(self, message: Down) -> None: ...
    def receive(self) -> Up | None: ...
    def close(self) -> None: ...


class FarEnd(Protocol):
    """Runs an engine at the far end of a channel: a process, several vLLM processes, or in tests a thread."""

    @property
    def front(self) -> FrontConnection:
        """Return the connection to the engine."""

    def why_ended(self) -> str | None:
        """Return how the far end has ended, or None if it is running."""

    def is_at_work(self) -> bool:
        """Return whether the far end runs or waits for a processor, according to the operating system."""

    def cpu_s(self) -> float:
        """Return the processor seconds that the far end has used."""

    def end(self, within_s: float) -> None:
        """Wait until the far end has ended. Kill it after `within_s` seconds."""


class EngineProcess:
    """A process that runs `python -m MODULE FD`, where FD is its end of the channel. The process reads `order` from
    standard input.

    The process has a separate process group, so that Ctrl-C in a terminal reaches only the front.
    """

    def __init__(self, command: Sequence[str], order: bytes) -> None:
        ours, theirs = pair()
        self.front: FrontConnection = FrontEnd(ours, decode_up)
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())], stdin=subprocess.PIPE, pass_fds=[theirs.fileno()], process_group=0
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as to:
            to.write(order)

    def why_ended(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def is_at_work(self) -> bool:
        """An engine with several processes sleeps while its children work."""
        return any(map(is_at_work, (self._process.pid, *children_of(self._process.pid))))

    def cpu_s(self) -> float:
        return sum(map(cpu_s, (self._process.pid, *children_of(self._process.pid))))

    def end(self, within_s: float) -> None:
        end(self._process, within_s)


class _Start:
    def __init__(self) -> None:
        self._moved_s = self._looked_s = time.monotonic()
        self._before_s: float | None = None
        self._used_s = 0.0

    def check(self, used_s: float) -> None:
        now_s = time.monotonic()
        if self._before_s is None:
            self._before_s = used_s
        if used_s != self._used_s or now_s - self._looked_s > SILENCE_S / 4:  # it works, or this process was suspended
            self._moved_s, self._used_s = now_s, used_s
        self._looked_s = now_s
        if now_s - self._moved_s > START_SILENCE_S:
            raise EngineLost(f"its process has reported and done nothing for {now_s - self._moved_s:.0f} s")
        if used_s - self._before_s > START_CPU_S:
            raise EngineLost(f"its process has reported nothing for {used_s - self._before_s:.0f} processor seconds")


class RemoteEngine:
    """An engine at the other end of the channel.

    Raises:
        XgptError: the engine does not start. The error is the engine's own.
    """

    def __init__(
        self, far_end: FarEnd, limits: KvLimits, launch: Callable[[Plan], FarEnd], limits_of: Callable[[Plan], KvLimits]
    ) -> None:
        self.on_refused: Callable[[str], None] = lambda reason: None
        self._launch = launch
        self._limits_of = limits_of
        self._listeners: list[OnStep] = []
        self.pool = Inside(limits)
        self._next: list[Plan] = []
        self._uses: list[Use] = []
        self._is_closed = False
        self._begin(far_end)

    def _begin(self, far_end: FarEnd) -> None:
        self._far_end, self._front = far_end, far_end.front
        start = _Start()
        try:
            while not isinstance(ready := self._receive(), Ready):
                if self._is_closed:
                    raise MachineError("the engine was closed while it was starting")
                if isinstance(ready, Alive):
                    start = _Start()
                start.check(far_end.cpu_s())
                self._front.wait(POLL_S)
        except BaseException as error:
            self._close(0.0)
            if isinstance(error, EngineLost):
                raise EngineLost(f"the engine does not start: {error}") from None
            raise
        self._heard_s = self._looked_s = self._stepped_s = time.monotonic()
        self.takes_seeds, self.scores_prompts, self._resumes = ready.takes_seeds, ready.scores_prompts, ready.resumes

    def _receive(self) -> Ready | Alive | Began | Stepped | Rested | Followed | Refused | None:
        """Raises EngineLost, or the error that the engine has reported."""
        message = self._front.receive()
        if isinstance(message, Failed):
            raise message.error
        if message is None and self._front.has_gone:
            raise EngineLost(f"its process has ended: {self._ended()}")
        return message

    def _ended(self) -> str:
        """Wait until the process has ended, and return how. Its sockets close a little earlier."""
        end_s = time.monotonic() + POLL_S
        while (why := self._far_end.why_ended()) is None and time.monotonic() < end_s:
            time.sleep(0.01)
        return why or "it has closed its connection"

    def listen(self, on_step: OnStep) -> None:
        self._listeners.append(on_step)

    @property
    def is_emptying(self) -> bool:
        return self.pool.room.is_emptying

    @property
    def is_changing(self) -> bool:
        return bool(self._next)

    def resumes(self, generation: Generation) -> bool:
        return self._resumes

    def repeats(self, generation: Generation) -> bool:
        return True

    def submit(self, generation: Generation) -> None:
        self.pool.waiting[generation.id] = None
        self._front.send(Submit(generation))

    def cancel(self, id_: int) -> None:
        self.pool.leave(id_)
        self._front.send(Cancel(id_))

    def go_over_to(self, plan: Plan) -> None:
        """Raises InputError if the plan's schedule cannot be built."""
        self._limits_of(plan)
        self._next.append(plan)
        self._front.send(Follow(plan.model_dump_json()))

    def fileno(self) -> int:
        return self._front.fileno()

    def wait(self, timeout_s: float) -> None:
        self._front.wait(timeout_s)

    def step(self) -> list[Token] | None:
        """Return the tokens of the next step that has ended, or None if no step has ended since the last call."""
        while (message := self._receive()) is not None:
            match message:
                case Stepped():
                    self._stepped_s = time.monotonic()
                    if message.room is not None:
                        self.pool.room = message.room
                    self.pool.note(message.records, message.tokens)
                    for record in message.records:
                        for listener in self._listeners:
                            listener(record)
                    return message.tokens
                case Began():
                    self.pool.begin(message.ids)
                case Rested():
                    self.pool.room = message.room
                case Alive():
                    self._heard_s, self._uses = time.monotonic(), message.uses
                case Followed():
                    if self._next:
                        self.pool.limits = self._limits_of(self._next[-1])
                    self._next.clear()
                case Refused():
                    self._next.clear()
                    self.on_refused(message.reason)
        self._check_alive()
        return None

    def _check_alive(self) -> None:
        now_s = time.monotonic()
        # This process itself was suspended, so it cannot tell how long the engine was silent.
        if now_s - self._looked_s > SILENCE_S / 4:
            self._heard_s = self._stepped_s = now_s
        if not self.pool.running or self.is_emptying or self._uses:
            self._stepped_s = now_s
        self._looked_s = now_s
        silent_s, stepless_s = now_s - self._heard_s, now_s - self._stepped_s
        if silent_s > SILENCE_S and (silent_s > BUSY_S or not self._far_end.is_at_work()):
            raise EngineLost(f"its process has reported nothing for {silent_s:.0f} s")
        if stepless_s > STEP_S and (stepless_s > LONG_STEP_S or not self._far_end.is_at_work()):
            raise EngineLost(f"it has requests, but has completed no step for {stepless_s:.0f} s")

    def uses(self) -> list[Use]:
        return self._uses

    def restart(self, plan: Plan) -> None:
        """End the old engine, and start a new one on this plan, without requests.

        Raises:
            XgptError: the new engine does not start.
        """
        self._close(0.0)
        self.pool.clear()
        self.pool.limits = self._limits_of(plan)
        self._next.clear()
        self._begin(self._launch(plan))

    def close(self) -> None:
        """End the engine after its current step, or at once if it hangs. If another thread is restarting the engine,
        the other thread ends it.
        """
        self._is_closed = True
        is_silent = time.monotonic() - self._heard_s > HUNG_S and not self._far_end.is_at_work()
        self._close(0.0 if is_silent else END_S)

    def _close(self, within_s: float) -> None:
        self._front.close()
        self._far_end.end(within_s)
