"""The real engine: schedule, execute, settle, on real workers and the real clock."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from queue import SimpleQueue
from typing import NamedTuple

from xgpt import policies
from xgpt.errors import MachineError
from xgpt.policies import Pool, Request, Schedule, Step
from xgpt.schema import Plan
from xgpt.schema.step_log import Arrival, Lane, StepRecord
from xrunner.executor import Deploy, Executor, Use, Vacant, WorkerLost
from xrunner.generation import NO_TOKEN, FinishReason, Generation, Token

logger = logging.getLogger(__name__)


class _Begun(NamedTuple):
    """What a step's record needs to know of its beginning."""

    number: int
    start_ns: int
    settled: int
    arrivals: tuple[Arrival, ...]
    cancelled: tuple[int, ...]


class Engine:
    """Runs a schedule: requests in from any thread, tokens out of `step`.

    `submit`, `cancel` and `apply` may be called from other threads; everything else belongs to the one thread that
    calls `step`.

    Where a worker is lost, all are started anew, and requests are encoded again with what they had generated: their
    tokens go on where they were. What had been taken in then arrives again in the step log, whose numbers start anew.

    Args:
        deploy: None: no other plan than one with the same placement can be applied.
    """

    def __init__(
        self,
        schedule: Schedule,
        executor: Executor,
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
        on_step: Callable[[StepRecord], None] | None = None,
        deploy: Deploy | None = None,
    ) -> None:
        self._deploy = deploy
        self._next: Schedule | None = None
        """What is deployed as soon as nobody runs any more."""
        self._parked: dict[int, Generation] = {}
        """Requests that came, or had not begun, while the engine is emptied."""
        self._schedule = schedule
        self._executor = executor
        self._clock = clock
        self._listeners = [] if on_step is None else [on_step]
        self._inbox: SimpleQueue[Generation | int | Schedule] = SimpleQueue()
        self._wake = threading.Event()
        self._arrivals: list[Arrival] = []
        self._cancelled: list[int] = []
        self._under_way: dict[tuple[Lane, int], deque[_Begun]] = defaultdict(deque)
        """Of each lane's micro-batch, in the order in which the steps end."""
        self._num_begun = self._num_settled = self._now_ns = 0
        self._generations: dict[int, Generation] = {}
        self._generated: dict[int, list[int]] = {}
        """Output so far of each request, should it be preempted or lost."""
        self._known: dict[int, int] = {}
        """Tokens that are made once more, of requests that had to begin anew."""

    def listen(self, on_step: Callable[[StepRecord], None]) -> None:
        """Have further steps reported, in the thread that calls `step`."""
        self._listeners.append(on_step)

    @property
    def pool(self) -> Pool:
        return self._schedule.pool

    @property
    def executor(self) -> Executor:
        return self._executor

    def submit(self, generation: Generation) -> None:
        """Hand in a request. Its id must be new, and `Pool.can_ever_fit` must hold for it."""
        self._hand_in(generation)

    def cancel(self, id_: int) -> None:
        """Take a request out before the next step; one that has ended already is ignored."""
        self._hand_in(id_)

    def apply(self, schedule: Schedule) -> None:
        """Go over to another plan's schedule before the next step: at once where the placement stays, else when all
        that run have ended; who comes meanwhile waits.
        """
        self._hand_in(schedule)

    def go_over_to(self, plan: Plan) -> None:
        """Have the plan's schedule applied."""
        self.apply(policies.build(plan))

    def _hand_in(self, what: Generation | int | Schedule) -> None:
        self._inbox.put(what)
        self._wake.set()
        self._executor.interrupt()

    @property
    def is_emptying(self) -> bool:
        """Whether nobody enters until another plan has been deployed."""
        return self._next is not None

    def wait(self, timeout_s: float) -> None:
        """Block until something is handed in, or the time is over. To be called when `step` returned None."""
        self._wake.wait(timeout_s)

    def step(self) -> list[Token] | None:
        """Send every step on its way that can be, then wait for one to end; who comes meanwhile may begin one more.

        Returns:
            That step's tokens, or None where nothing could run.

        Raises:
            MachineError: workers that were lost do not come back.
        """
        ended = None
        while ended is None:
            self._take_in(self._clock())
            try:
                self._begin_all()
                if self._num_begun == self._num_settled:
                    self._executor.check()
                    return None
                ended = self._executor.collect()
            except WorkerLost as lost:
                self._recover(lost)
                return []
        step, sampled = ended
        tokens = self._settle(step, sampled)
        self._record(step, tokens)
        return tokens

    def _take_in(self, now_ns: int) -> None:
        """Requests handed in since the last step enter the pool with the step's own time; who is too late leaves."""
        self._now_ns = now_ns
        self._wake.clear()
        while not self._inbox.empty():
            match self._inbox.get():
                case Generation() as generation if self._next is not None:
                    self._parked[generation.id] = generation
                case Generation() as generation:
                    self._enter(generation)
                case Schedule() as schedule:
                    self._go_over(schedule)
                case int() as id_ if id_ in self._generations:
                    self._cancelled.append(id_)
                    self._forget(self._schedule.cancel(id_))
                case int() as id_:
                    self._parked.pop(id_, None)
        self._forget(self._schedule.expire(now_ns))
        if self._next is not None and self._schedule.pool.is_idle and self._num_begun == self._num_settled:
            self._redeploy(self._next)

    def _enter(self, generation: Generation) -> None:
        self._generations[generation.id] = generation
        size = len(generation.prompt), generation.max_output
        arrival = Arrival(
            generation.id,
            *size,
            self._now_ns,
            generation.deadline_ns,
            generation.promised_output,
            generation.account,
        )
        self._schedule.submit(Request(*arrival))
        self._arrivals.append(arrival)

    def _go_over(self, schedule: Schedule) -> None:
        if self._next is None and self._schedule.apply(schedule):
            return
        if self._deploy is None:
            raise MachineError("this engine cannot go over to another placement; start the server with that plan")
        self._next = schedule
        for request in list(self._schedule.pool.waiting):
            if request.id in self._generated:
                continue  # preempted: it has begun, and ends here
            self._parked[request.id] = self._generations[request.id]
            self._cancelled.append(request.id)
            self._forget(self._schedule.cancel(request.id))

    def _redeploy(self, schedule: Schedule) -> None:
        """Give the workers up, and let in who waited, in the order of their coming."""
        assert self._deploy is not None
        self._executor = Vacant()  # what was there frees its memory before the next takes its own
        self._executor = self._deploy(schedule)
        self._schedule, self._next = schedule, None
        parked, self._parked = self._parked, {}
        for generation in parked.values():
            self._enter(generation)

    def _begin_all(self) -> None:
        for lane in self._schedule.lanes:
            while (step := self._schedule.next_step(lane)) is not None:
                self._begin(step)

    def _begin(self, step: Step) -> None:
        self._executor.release(step.preempted)
        for chunk in step.encode:
            if chunk.start == 0:
                self._executor.start(self._resumed(self.pool.running[chunk.id]))
        self._executor.begin(step)
        begun = _Begun(self._num_begun, self._now_ns, self._num_settled, tuple(self._arrivals), tuple(self._cancelled))
        self._under_way[step.lane, step.microbatch].append(begun)
        self._num_begun += 1
        self._arrivals.clear()
        self._cancelled.clear()

    def _record(self, step: Step, tokens: list[Token]) -> None:
        begun = self._under_way[step.lane, step.microbatch].popleft()
        self._num_settled += 1
        if not self._listeners:
            return
        record = StepRecord(
            begun.start_ns,
            self._clock(),
            step.encode,
            step.decode,
            tuple(token.id for token in tokens if token.finish),
            begun.arrivals,
            begun.cancelled,
            step.preempted,
            step.transfer,
            step.lane,
            step.microbatch,
            begun.number,
            begun.settled,
        )
        for listener in self._listeners:
            listener(record)

    def _settle(self, step: Step, sampled: dict[int, int]) -> list[Token]:
        """Account for the step's tokens; requests held by a static batch compute on, but speak no more."""
        logprobs, pool = self._executor.logprobs, self._schedule.pool
        tokens = [
            Token(id_, token, self._finish(id_, token), logprobs.get(id_))
            for id_, token in sampled.items()
            if not pool.is_silent(id_)
        ]
        if self._known:
            tokens = [token for token in tokens if token.finish == "error" or not self._is_known(token.id)]
        for token in tokens:
            self._generated.setdefault(token.id, []).append(token.token)
        self._forget(self._schedule.settle(step, [token.id for token in tokens if token.finish]))
        return tokens

    def _resumed(self, request: Request) -> Generation:
        """A request that is about to be encoded: after a preemption, with what it had generated as prompt."""
        generation = self._generations[request.id]
        generated = self._generated.get(request.id, [])[: request.generated]
        if not generated:
            return generation
        count = len(generated)
        return replace(
            generation,
            prompt=(*generation.prompt, *generated),
            max_output=generation.max_output - count,
            output_length=None if generation.output_length is None else generation.output_length - count,
            num_resumed=generation.num_resumed + count,
        )

    def _recover(self, lost: WorkerLost) -> None:
        """Start anew with everybody who was waiting or running, in the order in which they had come in."""
        logger.warning("%s; starting anew with %d requests", lost, len(self._generations))
        self._executor.restart()
        old = self._schedule.pool
        everybody = [*old.running.values(), *old.waiting]
        self._forget([request.id for request in old.running.values() if old.is_silent(request.id)])
        self._schedule = self._schedule.fresh()
        self._under_way.clear()
        self._num_begun = self._num_settled = 0
        self._arrivals.clear()
        self._cancelled.clear()
        for request in everybody:
            if request.id in self._generations:
                self._take_in_again(request)

    def _take_in_again(self, request: Request) -> None:
        generation = self._resumed(request)
        again = replace(request, input_length=len(generation.prompt), max_output=generation.max_output)
        again.encoded = again.generated = again.blocks = 0
        again.batch = None
        if self._executor.resumes and self.pool.can_ever_fit(again):
            self._generations[request.id] = generation
            self._generated.pop(request.id, None)
        elif generated := self._generated.get(request.id):
            # It depends on the request alone, so the same tokens will come again.
            self._known[request.id] = len(generated)
            generation = self._generations[request.id]
            again.input_length, again.max_output = len(generation.prompt), generation.max_output
        self._schedule.submit(again)
        size = again.input_length, again.max_output
        self._arrivals.append(
            Arrival(again.id, *size, again.arrival_ns, again.deadline_ns, again.promised_output, again.account)
        )

    def _is_known(self, id_: int) -> bool:
        """Whether this token has been handed out before; counts it."""
        left = self._known.get(id_, 0)
        if left > 1:
            self._known[id_] = left - 1
        else:
            self._known.pop(id_, None)
        return left > 0

    def _finish(self, id_: int, token: int) -> FinishReason | None:
        if token == NO_TOKEN:
            return "error"
        generation = self._generations[id_]
        count = 1 + self._schedule.pool.running[id_].generated
        if token in generation.stop_token_ids or count == generation.output_length:
            return "stop"
        return "length" if count == generation.max_output else None

    def _forget(self, ids: Iterable[int]) -> None:
        freed = list(ids)
        for id_ in freed:
            del self._generations[id_]
            self._generated.pop(id_, None)
            self._known.pop(id_, None)
        self._executor.release(freed)

    def uses(self) -> list[Use]:
        """Of the processes that run it, if others than this one do."""
        return self._executor.uses()

    def close(self) -> None:
        """Give up the workers."""
        self._executor.close()
