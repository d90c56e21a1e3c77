"""Define the schedule, which decides the steps of the simulated and the real engine. Its lanes have micro-batches,
which all share one pool of requests.

An engine submits requests, asks each lane for steps until no step is left, and settles each step once it has been
executed:

    while step := schedule.next_step(lane):     # decide, admit, preempt; the step counts as running
        ...                                     # execute it: stage after stage, a lane's steps in order
    freed = schedule.settle(step, finished)     # its tokens exist; requests in `finished` leave

Steps of a lane overlap on the lane's stages. A micro-batch's next step normally begins only after its previous step has
been settled, and micro-batches take strict turns. So a pipeline of P stages needs P micro-batches to be always busy. A
schedule that runs ahead decides the next step while a step runs. It assumes that every request of the running step
continues up to its maximum output, so a request that ends early is computed in one step too many.

Source: ORCA Algorithm 1 and Figure 8a, ExeGPT Figure 4.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Self

from xgpt.core.policies.blocks import NO_CHAINS
from xgpt.core.policies.lane_settings import LaneSettings
from xgpt.core.policies.pool import Pool
from xgpt.core.policies.request import MicroBatch, Request, Step
from xgpt.core.policies.rule import Rule, rule_of
from xgpt.core.schema import LaneName, Stage
from xgpt.core.schema.step_log import Chain


class Schedule(ABC):
    """Decides the steps of a plan.

    The state changes only in `submit`, `cancel`, `expire`, `settle` and `apply`, and when `next_step` returns a step.

    Attributes:
        lanes: the groups of workers that run steps, in the order in which an engine asks them for steps.
    """

    lanes: tuple[LaneName, ...]

    def __init__(self, pool: Pool, stages: tuple[Stage, ...] = ()) -> None:
        self.pool = pool
        self.stages = stages

    @abstractmethod
    def fresh(self) -> Schedule:
        """Return an empty schedule with the same settings, for a restart of all workers."""

    def submit(self, request: Request) -> None:
        """Add a new request to the queue. The id must be new, and `Pool.can_ever_fit` must be true for the request."""
        self.pool.submit(request)

    def cancel(self, id_: int) -> list[int]:
        """Remove a request now or, if a running step includes the request, once this step is settled.

        Returns:
            The ids of the requests whose slots and K/V become free now.
        """
        return self.pool.cancel(id_)

    def expire(self, now_ns: int) -> list[int]:
        """Set the clock (`Pool.now_ns`). Remove waiting requests that have never run and whose deadline has passed, and
        return their ids. Call this before `next_step`.
        """
        return self.pool.expire(now_ns)

    def apply(self, other: Schedule) -> bool:
        """Adopt another plan's settings before the next step. Running requests continue.

        Returns:
            Whether the settings were adopted. They are not if the plans differ in lanes, stages, micro-batches or
            memory, since such a change needs an empty engine.
        """
        return False

    def _is_placed_like(self, other: Schedule) -> bool:
        return self.stages == other.stages and self.pool.is_shaped_like(other.pool)

    @abstractmethod
    def next_step(self, lane: LaneName) -> Step | None:
        """Return the lane's next step, which then counts as running, or None if the lane must wait."""

    @abstractmethod
    def settle(
        self,
        step: Step,
        finished: Collection[int],
        outputs: Mapping[int, Chain] = NO_CHAINS,
        failed: Collection[int] = (),
    ) -> list[int]:
        """Record the tokens of an executed step. `finished` has the ids of the requests that ended in this step.

        Call this for a lane's steps in the order in which they began.

        Args:
            outputs: for requests that ended, the keys of the blocks that follow the prompt's blocks (see `Blocks`).
            failed: finished requests that ended in an error. Later requests do not share their blocks.

        Returns:
            The ids of the requests whose slots and K/V become free now.
        """

    @abstractmethod
    def batch_of(self, step: Step) -> MicroBatch:
        """Return the micro-batch of a step."""

    def sampled(self, step: Step) -> list[int]:
        return [*self.encoded(step), *step.decode] if self.pool.encode_emits else list(step.decode)

    def encoded(self, step: Step) -> list[int]:
        running = self.pool.running
        return [chunk.id for chunk in step.encode if chunk.start + chunk.length == running[chunk.id].context]


class OneLane(Schedule):
    """The schedule of rra, orca, chunked and static. Each micro-batch has its own rule. All micro-batches share the
    queue and the K/V memory.

    A micro-batch without work is skipped. Under rra, all micro-batches begin a phase together, since a long encode step
    of one micro-batch would delay the short decode steps of the others. A static batch enters as a whole, in equal
    parts, after all requests of the previous batch have left.
    """

    lanes: tuple[LaneName, ...] = ("both",)

    def __init__(
        self, settings: LaneSettings, pool: Pool, stages: tuple[Stage, ...] = (), rule: Rule | None = None
    ) -> None:
        super().__init__(pool, stages)
        self.settings = settings
        self._own = rule
        self._batches = pool.add_batches(settings.microbatches)
        self._rules = [rule_of(settings.of_microbatch(i), i, rule) for i in range(settings.microbatches)]
        pool.runs_ahead = settings.ahead
        self._turn = 0

    def apply(self, other: Schedule) -> bool:
        if not isinstance(other, OneLane) or not self._is_placed_like(other):
            return False
        now, then = self.settings, other.settings
        if (now.microbatches, now.encode_parts) != (then.microbatches, then.encode_parts):
            return False
        if type(now.policy) is not type(then.policy) or self._own is not other._own:  # the two plans' rules differ
            return False
        self.settings = then
        self.pool.follow(other.pool)
        self.pool.runs_ahead = then.ahead
        for number, rule in enumerate(self._rules):
            rule.apply(then.of_microbatch(number))
            self.pool.forecast.restart(self._batches[number])
        return True

    def fresh(self) -> Self:
        return type(self)(self.settings, self.pool.fresh(), self.stages, self._own)

    def next_step(self, lane: LaneName = "both") -> Step | None:
        if self.settings.refill_when_empty:
            self._refill()
        count = len(self._batches)
        for number in chain(range(self._turn, count), range(self._turn)):
            batch = self._batches[number]
            if batch.steps_under_way and not (self._has_more_to_encode(batch) or self._can_run_ahead(batch)):
                return None
            step = self._rules[number].next_step(self.pool, batch, may_encode=self._may_encode(number))
            if step is not None:
                self.pool.begin(step, batch)
                stays = self.settings.refill_when_empty and self._has_more_to_encode(batch)
                self._turn = number if stays else (number + 1) % count
                return step
        return None

    def _can_run_ahead(self, batch: MicroBatch) -> bool:
        """To decide this, count the running step's tokens."""
        if not self.settings.ahead or batch.steps_under_way > 1:
            return False
        self.pool.assume(batch)
        return self.pool.has_room(batch)

    def settle(
        self,
        step: Step,
        finished: Collection[int],
        outputs: Mapping[int, Chain] = NO_CHAINS,
        failed: Collection[int] = (),
    ) -> list[int]:
        batch = self.batch_of(step)
        self.pool.end(step, batch)
        return self.pool.settle(step, batch, finished, outputs, failed)

    def batch_of(self, step: Step) -> MicroBatch:
        return self._batches[step.microbatch]

    def _may_encode(self, number: int) -> bool:
        if self.settings.mix or self.settings.refill_when_empty or len(self._rules) == 1:
            return True
        phase = self._rules[number].phase
        pairs = zip(self._rules, self._batches, strict=True)
        return all(rule.phase > phase or rule.is_phase_over(batch) for rule, batch in pairs)

    def _refill(self) -> None:
        if self.pool.running:
            return
        pool, count = self.pool, len(self._batches)
        most = self.settings.max_batch
        entered: list[Request] = []
        while most is None or len(entered) < most:
            request = pool.admit(self._batches[0])
            if request is None:
                break
            entered.append(request)
        for i, request in enumerate(entered):
            pool.move(request, self._batches[i * count // len(entered)])
        self._turn = 0

    def _has_more_to_encode(self, batch: MicroBatch) -> bool:
        if not self.settings.refill_when_empty:
            return False
        return bool(batch.encoding and self.pool.under_way.untouched(batch.encoding))
