"""Restart an engine when it is lost, and let its requests continue (`Handover`)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from xgpt.core.errors import MachineError, XgptError
from xgpt.core.policies import Request
from xgpt.core.processes import too_often
from xgpt.core.schema import Plan
from xgpt.core.schema.step_log import StepRecord
from xrunner.channel import ALIVE_S, EngineLost
from xrunner.channel.remote import RemoteEngine
from xrunner.generation import NO_TOKEN, Generation, Token
from xrunner.recovery import Ledger

RESTARTS, PERIOD_S = 3, 600.0
"""An engine is restarted at most `RESTARTS` times within `PERIOD_S`. The next loss ends the server. A start that fails
is a loss."""
AGAIN_S = 0.5


class Handover:
    """The requests that an engine has or will get, with their outputs so far.

    The first loss of an engine counts as an accident. A request that has been running at two losses is a suspect.
    Suspects are submitted one at a time, each after the previous one has generated a token. If an engine is lost
    meanwhile, the current suspect is taken as the cause and is not submitted again."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._waiting: deque[int] = deque()
        self._suspects: deque[int] = deque()
        self._tried: int | None = None
        """The suspect that was submitted and has not generated a token yet."""
        self._losses: Counter[int] = Counter()
        """By request, the number of lost engines that had it."""
        self._lost_s: list[float] = []

    def __len__(self) -> int:
        return len(self._ledger.generations)

    def accept(self, generation: Generation) -> None:
        self._ledger.generations[generation.id] = generation
        self._waiting.append(generation.id)

    def ready(self) -> Iterator[Generation]:
        while self._waiting:
            if (generation := self._ledger.generations.get(self._waiting.popleft())) is not None:
                yield generation
        while self._tried is None and self._suspects:
            if (generation := self._ledger.generations.get(self._suspects.popleft())) is not None:
                self._tried = generation.id
                yield generation

    def note(self, tokens: list[Token]) -> list[Token]:
        """Note a step's tokens, forget requests that have ended, and return the tokens that are new."""
        tokens = [token for token in tokens if token.id in self._ledger.generations]
        new = self._ledger.without_repeated(tokens)
        for token in tokens:
            if token.id == self._tried:
                self._tried = None
                del self._losses[token.id]
        for token in new:
            self._ledger.note(token)
            if token.finish is not None:
                self.forget(token.id)
        return new

    def forget(self, id_: int) -> None:
        self._ledger.forget(id_)
        del self._losses[id_]
        if self._tried == id_:
            self._tried = None

    def lose(self, error: MachineError, engine: RemoteEngine) -> list[Token]:
        """Make all requests wait for another engine. Return the last tokens of requests that cannot continue.

        If a request's output so far can be prefilled with its prompt without changing later tokens, the request
        continues from there. Otherwise the same tokens are generated again, but are not delivered twice.

        Raises:
            MachineError: the engine was lost too often."""
        self.note_loss(error)
        ended = [] if self._tried is None else [self._end(self._tried, f"the engine fails with this request: {error}")]
        return ended + self.take_back(engine, losses=1)

    def note_loss(self, error: MachineError) -> None:
        """Count a loss, or a start that has failed. Raises MachineError if there were too many."""
        if too_often(self._lost_s, RESTARTS, PERIOD_S):
            times, minutes = RESTARTS + 1, PERIOD_S / 60
            says = f"the engine was lost {times} times within {minutes:.0f} minutes, the last time: {error}"
            raise MachineError(says)

    def take_back(self, engine: RemoteEngine, losses: int = 0) -> list[Token]:
        """Make all requests wait for an engine that is restarted. `losses` is 0 if it is restarted on purpose."""
        ended, requests = [], {*self._waiting, *self._suspects}
        self._tried = None
        self._waiting.clear()
        self._suspects.clear()
        for id_, generation in list(self._ledger.generations.items()):
            if not self._prepare(generation, engine):
                ended.append(self._end(id_, "the engine was restarted, and would now sample other tokens"))
                continue
            self._losses[id_] += losses * (id_ not in requests)
            (self._suspects if self._losses[id_] > 1 else self._waiting).append(id_)
        return ended

    def _prepare(self, generation: Generation, engine: RemoteEngine) -> bool:
        """Return False if its tokens cannot be generated again."""
        begun = Request(
            generation.id, len(generation.prompt), generation.max_output, promised_output=generation.promised_output
        )
        begun.generated = generation.max_output
        resumes, fits = engine.resumes(generation), engine.pool.limits.can_ever_fit
        self._ledger.anew(begun, lambda request: resumes and fits(request))
        return engine.repeats(generation) or not self._ledger.has_begun(generation.id)

    def _end(self, id_: int, reason: str) -> Token:
        self.forget(id_)
        return Token(id_, NO_TOKEN, "error", error=reason)


STEPS_AT_ONCE = 8
"""Number of steps whose tokens are delivered before the event loop runs other tasks."""

logger = logging.getLogger(__name__)

OnStep = Callable[[list[Token], list[StepRecord]], None]


class LastingEngine:
    """Runs an engine from `start` to `stop`. `stop` closes the engine. All methods run in the event loop's thread.

    If the engine's process dies or hangs, the engine is restarted on the last plan under which a step has ended, and
    requests continue after their last tokens (`Handover`).

    Args:
        running: returns the plan to run.
        on_step: called with the tokens and the records of each step that ends, and with the last tokens of requests
            that cannot continue."""

    def __init__(
        self,
        engine: RemoteEngine,
        *,
        running: Callable[[], Plan],
        on_step: OnStep,
        on_return: Callable[[Plan], None],
        on_failed: Callable[[XgptError], None],
    ) -> None:
        self.engine = engine
        self._running = running
        self._on_step, self._on_return, self._on_failed = on_step, on_return, on_failed
        self._handover = Handover()
        self._good_plan = running()
        """The last plan under which a step has ended."""
        self._records: list[StepRecord] = []
        self._loop: asyncio.AbstractEventLoop
        self._looking: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._lost_s: float | None = None
        """Time at which the engine was lost. None means that the engine runs, or is being restarted for another plan.
        """
        self._is_over = False
        engine.listen(self._records.append)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.engine.fileno(), self._read)
        self._looking = self._loop.create_task(self._look())

    async def stop(self) -> None:
        self._end()
        if self._looking is not None:
            self._looking.cancel()
        await asyncio.to_thread(self.engine.close)
        if self._restarting is not None:
            await self._restarting

    def _end(self) -> None:
        if not self._is_over and not self.is_restarting:
            self._loop.remove_reader(self.engine.fileno())
        self._is_over = True

    @property
    def is_restarting(self) -> bool:
        """Return whether the engine was lost and is being restarted. Requests wait until it runs."""
        return self._restarting is not None and not self._restarting.done()

    def go_over_to(self, plan: Plan) -> None:
        """Follow another plan as soon as possible. The engine is restarted if the number of replicas changes.

        Raises:
            InputError: the engine cannot run the plan.
            MachineError: the engine is being restarted."""
        if self.is_restarting:
            raise MachineError("the engine is being restarted")
        if plan.replicas == self._good_plan.replicas:
            self.engine.go_over_to(plan)
            return
        self._start_anew(plan, self._handover.take_back(self.engine))

    def submit(self, generation: Generation) -> None:
        self._handover.accept(generation)
        self._hand_over()

    def cancel(self, id_: int) -> None:
        self._handover.forget(id_)
        if not self._is_over and not self.is_restarting:
            self.engine.cancel(id_)
            self._hand_over()

    def _hand_over(self) -> None:
        if not self._is_over and not self.is_restarting:
            for generation in self._handover.ready():
                self.engine.submit(generation)

    async def _look(self) -> None:
        """Check the engine regularly, even if no message has come, since an engine that hangs sends no messages."""
        while not self._is_over:
            await asyncio.sleep(ALIVE_S)
            if not self.is_restarting:
                self._read()

    def _read(self) -> None:
        try:
            for _ in range(STEPS_AT_ONCE):
                if self._is_over or self.is_restarting or (tokens := self.engine.step()) is None:
                    return
                records = self._records[:]
                self._records.clear()
                if records and not self.engine.is_changing:
                    self._good_plan = self._running()
                self._on_step(self._handover.note(tokens), records)
                self._hand_over()
            self._loop.call_soon(self._read)
        except EngineLost as error:
            self._lose(error)
        except Exception as error:
            # Whatever the error is, the requests must end.
            logger.debug("traceback", exc_info=True)
            self._fail(error)

    def _lose(self, error: MachineError) -> None:
        try:
            ended = self._handover.lose(error, self.engine)
        except MachineError as too_often:
            self._fail(too_often)
            return
        logger.error("the engine is lost: %s; restarting it with %d requests", error, len(self._handover))
        self._lost_s = time.monotonic()
        self._start_anew(self._good_plan, ended)

    def _start_anew(self, plan: Plan, ended: list[Token]) -> None:
        self._loop.remove_reader(self.engine.fileno())
        if ended:
            self._on_step(ended, [])
        self._restarting = self._loop.create_task(self._restart(plan))

    async def _restart(self, plan: Plan) -> None:
        refused = ""
        while True:
            try:
                await asyncio.to_thread(self.engine.restart, plan)
                break
            except Exception as error:
                if plan != self._good_plan:
                    refused, plan = str(error), self._good_plan
                    continue
                failed = error
                if isinstance(error, MachineError) and not self._is_over:
                    try:
                        self._handover.note_loss(error)
                        logger.error("%s; starting it again", error)
                        await asyncio.sleep(AGAIN_S)
                        continue
                    except MachineError as too_often:
                        failed = too_often
                self._restarting = None
                self._fail(failed)
                return
        self._restarting, self._good_plan = None, plan
        if self._lost_s is not None:
            logger.info("the engine is back after %.1f s", time.monotonic() - self._lost_s)
            self._lost_s = None
        self._records.clear()
        if self._is_over:
            return
        if not refused:
            self._on_return(plan)
        self._loop.add_reader(self.engine.fileno(), self._read)
        self._hand_over()
        if refused:
            self.engine.on_refused(refused)

    def _fail(self, error: Exception) -> None:
        if self._is_over:
            return
        with suppress(ValueError, OSError):  # closing the engine may have closed its descriptor
            self._end()
        self._is_over = True
        self._on_failed(error if isinstance(error, XgptError) else XgptError(f"{type(error).__name__}: {error}"))
