"""Run the real engine. It schedules, executes and settles steps on real workers and the real clock."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from xgpt.core import policies
from xgpt.core.errors import XgptError
from xgpt.core.policies import Pool, Request, Schedule, Step
from xgpt.core.schema import Plan
from xgpt.core.schema.step_log import Chain, StepRecord
from xrunner.executor import Deployer, Executor, Use, Vacant, WorkerLost
from xrunner.generation import NO_TOKEN, Generation, Token
from xrunner.grammar_queue import GrammarQueue
from xrunner.prefixes import Prefixes
from xrunner.recorder import Recorder
from xrunner.recovery import Ledger, Suspects
from xrunner.redeploy import Redeployment

HandedIn = Generation | int | Schedule | Token
"""A new request, the id of a request to cancel, another plan's schedule, or the end of a request that cannot begin."""


class Inbox:
    """A queue that wakes the engine's thread. `interrupt` wakes the thread if it is waiting for its workers."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._queue: SimpleQueue[HandedIn] = SimpleQueue()
        self._wake = threading.Event()

    def put(self, handed_in: HandedIn) -> None:
        self._queue.put(handed_in)
        self._wake.set()
        self._interrupt()

    def wait(self, timeout_s: float) -> None:
        self._wake.wait(timeout_s)

    def drain(self) -> Iterator[HandedIn]:
        self._wake.clear()
        while not self._queue.empty():
            yield self._queue.get()


logger = logging.getLogger(__name__)


class Engine:
    """Runs a schedule: any thread may submit requests, and `step` returns their tokens.

    Any thread may also call `cancel`, `apply`, `go_over_to` and `uses`. Only the thread that calls `step` may call the
    other methods.

    If a worker is lost or a step fails, all workers are restarted. The requests are prefilled again together with the
    tokens that they had generated, and continue from there. In the step log, these requests arrive again, and steps are
    counted from 0 again. A request ends with the finish reason "error" if it makes steps fail or does not fit another
    plan's memory.

    Args:
        deploy: builds the workers of another plan. None means that only plans with the same placement can be applied.

    Attributes:
        on_refused: called in `step`'s thread with the reason if another plan cannot be deployed.
        on_begin: called in `step`'s thread when a step begins, with the requests that start in it.
    """

    def __init__(
        self,
        schedule: Schedule,
        executor: Executor,
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
        on_step: Callable[[StepRecord], None] | None = None,
        deploy: Deployer | None = None,
        reuse: bool = False,
    ) -> None:
        self.on_refused: Callable[[str], None] = lambda reason: None
        self.on_begin: Callable[[list[int]], None] = lambda ids: None
        self._given_up: list[Token] = []
        self._suspects = Suspects()
        self._redeployment = Redeployment(deploy)
        self._progress = Ledger()
        self.scores_prompts = executor.scores_prompts
        self._schedule = schedule
        self.executor = executor
        self._clock = clock
        self._prefixes = Prefixes(reuse)
        self._recorder = Recorder([] if on_step is None else [on_step])
        self._inbox = Inbox(lambda: self.executor.interrupt())
        self._grammars = GrammarQueue(lambda grammar: self.executor.prepare(grammar), self._inbox.put)
        self._now_ns = 0

    def listen(self, on_step: Callable[[StepRecord], None]) -> None:
        self._recorder.listen(on_step)

    @property
    def pool(self) -> Pool:
        return self._schedule.pool

    def submit(self, generation: Generation) -> None:
        """Submit a request. Its id must be new, and `Pool.can_ever_fit` must be true for it."""
        self._grammars.submit(generation)

    def cancel(self, id_: int) -> None:
        if not self._grammars.cancel(id_):
            self._inbox.put(id_)

    def apply(self, schedule: Schedule) -> None:
        """Adopt another plan's schedule before the next step. If the plan has another placement, adopt it once no
        request runs.
        """
        self._redeployment.announce()
        self._inbox.put(schedule)

    def go_over_to(self, plan: Plan) -> None:
        self.apply(policies.build(plan))

    takes_seeds = True

    @property
    def resumes(self) -> bool:
        return self.executor.resumes

    @property
    def is_emptying(self) -> bool:
        return self._redeployment.is_pending

    @property
    def is_changing(self) -> bool:
        return self._redeployment.is_changing

    def wait(self, timeout_s: float) -> None:
        """Wait until another thread hands something in, for at most `timeout_s`. Call this when `step` has returned
        None."""
        self._inbox.wait(timeout_s)

    def step(self) -> list[Token] | None:
        """Begin every step that can begin, then wait until a step ends.

        Returns:
            The tokens of the step that ended, and a last token for each request that ended in an error. None if nothing
            could run.

        Raises:
            MachineError: lost workers cannot be restarted.
            EngineFailed: one step after another fails.
        """
        try:
            tokens = self._step()
        except XgptError:
            raise
        except Exception as error:
            tokens = []
            self._go_on_after(error)
        if self._given_up:
            tokens = [*self._given_up, *(tokens or ())]
            self._given_up = []
        return tokens

    def _step(self) -> list[Token] | None:
        ended = None
        while ended is None:
            self._take_in(self._clock())
            try:
                self._begin_all()
                if self._recorder.is_idle:
                    self.executor.check()
                    return None
                ended = self.executor.collect()
            except WorkerLost as lost:
                self._recover(str(lost))
                return []
        return self._settle(*ended)

    def _take_in(self, now_ns: int) -> None:
        self._now_ns = now_ns
        for handed_in in self._inbox.drain():
            match handed_in:
                case Token() as end:
                    self._given_up.append(end)
                case Generation() as generation if self.is_emptying:
                    self._redeployment.park(generation)
                case Generation() as generation:
                    self._enter(generation)
                case Schedule() as schedule:
                    self._go_over(schedule)
                case int() as id_ if self._suspects.forget(id_):
                    self._forget([id_])
                case int() as id_ if id_ in self._progress.generations:
                    self._recorder.cancel(id_)
                    self._forget(self._schedule.cancel(id_))
                case int() as id_:
                    self._redeployment.forget(id_)
                    self._grammars.forget([id_])
        self._forget(self._schedule.expire(now_ns))
        if (request := self._suspects.next()) is not None:
            self._take_in_again(request)
        is_empty = self._schedule.pool.is_idle and not self._suspects
        if self.is_emptying and is_empty and self._recorder.is_idle:
            self._redeploy()

    def _enter(self, generation: Generation) -> None:
        chain = self._prefixes.of_prompt(generation, self.pool.block_size) if self.executor.resumes else ()
        request = _request_of(generation, self._now_ns, chain)
        if not self.pool.can_ever_fit(request):
            self._give_up(generation.id, "it does not fit in the K/V memory of the plan that runs now")
            return
        try:
            self.executor.accept(generation)
        except Exception as error:
            self._give_up(generation.id, f"it cannot be handed to a worker: {type(error).__name__}: {error}")
            return
        self._progress.generations[generation.id] = generation
        self._schedule.submit(request)
        self._recorder.arrive(request)

    def _go_over(self, schedule: Schedule) -> None:
        if self._redeployment.adopt(schedule, self._schedule):
            return
        for request in list(self.pool.waiting):
            if not self._progress.has_begun(request.id):  # otherwise it was preempted, and ends here
                self._redeployment.park(self._progress.generations[request.id])
                self._recorder.cancel(request.id)
                self._forget(self._schedule.cancel(request.id))

    def _redeploy(self) -> None:
        self.executor = Vacant()  # the old executor's memory is freed before the next one allocates
        self._schedule, self.executor, refused = self._redeployment.run(self._schedule)
        if refused is not None:
            self.on_refused(refused)
        for generation in self._redeployment.finish():
            if not self._grammars.compile_again(generation):
                self._enter(generation)

    def _begin_all(self) -> None:
        for lane in self._schedule.lanes:
            while (step := self._schedule.next_step(lane)) is not None:
                self._begin(step)

    def _begin(self, step: Step) -> None:
        self.executor.release(step.preempted)
        if not self.executor.resumes:
            self._progress.repeat(step.preempted)
        taken_up = []
        for chunk in step.encode:
            request = self.pool.running[chunk.id]
            if chunk.start == request.cached:
                taken_up.append(chunk.id)
                tables = [table for table in (request.prompt_table, request.table) if table is not None]
                self.executor.start(self._progress.resumed(request), *tables)
        self.executor.begin(step)
        self._recorder.begin(step, self._now_ns)
        if taken_up:
            self._grammars.begin(taken_up)
            self.on_begin(taken_up)

    def _settle(self, step: Step, sampled: dict[int, int]) -> list[Token]:
        pool, executor = self.pool, self.executor
        tokens = self._progress.tokens(sampled, pool, executor.logprobs, executor.failed)
        finished = [token.id for token in tokens if token.finish]
        ended_in_error = [token.id for token in tokens if token.finish == "error"]
        ended = [pool.running[id_] for id_ in finished if id_ not in ended_in_error]
        outputs = self._prefixes.of_outputs(ended, self._progress.sequence, pool.block_size) if executor.resumes else {}
        freed = self._schedule.settle(step, finished, outputs, ended_in_error)
        for token in tokens:
            self._progress.note(token)
        self._suspects.clear(sampled)
        self._forget(freed)
        self._recorder.end(step, self._clock, finished, outputs, ended_in_error)
        return tokens

    def _go_on_after(self, error: Exception) -> None:
        """Restart after a failed step. If it is known which request makes steps fail, end it."""
        under_way = [id_ for id_ in self._progress.generations if self.pool.under_way.touches(id_)]
        culprit = self._suspects.fail(error, under_way)
        logger.error("a step has failed", exc_info=error)
        if culprit is not None:
            self._give_up(culprit, f"steps with it fail: {type(error).__name__}: {error}")
        self._recover("a step has failed")

    def _give_up(self, id_: int, reason: str) -> None:
        self._progress.forget(id_)
        self._suspects.forget(id_)
        self._grammars.forget([id_])
        self._given_up.append(Token(id_, NO_TOKEN, "error", error=reason))

    def _recover(self, why: str) -> None:
        logger.warning("%s; restarting with %d requests", why, len(self._progress.generations))
        self.executor.restart()
        old = self._schedule.pool
        self._forget([request.id for request in old.running.values() if old.is_silent(request.id)])
        self._schedule = self._schedule.fresh()
        self._recorder.clear()
        recalled = self._suspects.recall(old)
        lost = self._progress.generations.keys() - {request.id for request in recalled} - self._suspects.held
        for request in [*recalled, *map(self._found_again, sorted(lost))]:
            if request.id in self._progress.generations:
                self._take_in_again(request)

    def _found_again(self, id_: int) -> Request:
        """Return a request that a rule had taken out of the queue but not admitted when it failed."""
        generation = self._progress.generations[id_]
        request = _request_of(generation, self._now_ns, ())
        request.generated = len(self._progress.sequence(id_)) - len(generation.prompt)
        return request

    def _take_in_again(self, request: Request) -> None:
        again = self._progress.anew(request, lambda r: self.executor.resumes and self.pool.can_ever_fit(r))
        self._schedule.submit(again)
        self._recorder.arrive(again)

    def _forget(self, ids: list[int]) -> None:
        for id_ in ids:
            self._progress.forget(id_)
            self._suspects.forget(id_)
        self._grammars.forget(ids)
        self.executor.release(ids)

    def uses(self) -> list[Use]:
        return self.executor.uses()

    def close(self) -> None:
        self._grammars.close()
        self.executor.close()


def _request_of(generation: Generation, now_ns: int, chain: Chain) -> Request:
    return Request(
        generation.id,
        len(generation.prompt),
        generation.max_output,
        now_ns if generation.arrival_ns is None else min(generation.arrival_ns, now_ns),
        generation.deadline_ns,
        generation.promised_output,
        generation.account,
        chain,
        generation.is_scored,
    )
