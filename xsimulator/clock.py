"""Compute when simulated steps end. Each step goes through the stages of its lane in order, after the previous steps.

finish[j, n] = max(finish[j - 1, n] + hop, finish[j, n - 1]) + cost[j, n]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from xgpt.core.policies import Schedule, Step
from xgpt.core.schema import Jitter, LaneName
from xsimulator.costs.step_cost import LaneCost, StepCounts, TransferCost


class Span(NamedTuple):
    lane: LaneName
    stage: int
    start_ns: int
    end_ns: int
    step: Step


OnSpan = Callable[[Span], None]


class Clock:
    """Computes when the steps of one lane end. Pass it each step once, in the order of the steps.

    Attributes:
        free_ns: for each stage, the time at which it has finished all scheduled steps.
    """

    def __init__(self, cost: LaneCost, jitter: Jitter | None = None) -> None:
        self.cost = cost
        self.free_ns = [0] * cost.num_stages
        self.took_ns = [0] * cost.num_stages
        self._jittered = None if jitter is None else JitteredTimes(jitter)

    def end_ns(self, issue_ns: int, counts: StepCounts, group: int = 0) -> int:
        """Return the time at which a step that is scheduled at `issue_ns` leaves the last stage or, in a lane of
        groups, its group.
        """
        cost, free, now = self.cost, self.free_ns, issue_ns
        costs = cost.step_ns(counts)
        if self._jittered is not None:
            costs = [*map(self._jittered, costs)]
        self.took_ns = costs
        if len(free) == 1 or cost.is_grouped:
            now = free[group] = max(now, free[group]) + costs[group]
            return now
        for stage, hop in enumerate(cost.hops_ns(counts.num_tokens)):
            now += hop
            if now < free[stage]:
                now = free[stage]
            now += costs[stage]
            free[stage] = now
        return now

    def occupy(self, issue_ns: int, seconds: float) -> None:
        self.free_ns = [max(free_ns, issue_ns) + round(seconds * 1e9) for free_ns in self.free_ns]


class LaneClock(Clock):
    """A `Clock` that reads the counts of steps from a schedule."""

    def __init__(
        self, cost: LaneCost, schedule: Schedule, on_span: OnSpan | None = None, jitter: Jitter | None = None
    ) -> None:
        super().__init__(cost, jitter)
        self._schedule = schedule
        self._on_span = on_span

    def __call__(self, issue_ns: int, step: Step) -> int:
        counts = step_counts(self._schedule, step, has_encoder=self.cost.has_encoder)
        group = step.microbatch if self.cost.is_grouped else 0
        end_ns = self.end_ns(issue_ns, counts, group)
        if self._on_span is not None:
            for stage in [group] if self.cost.is_grouped else range(self.cost.num_stages):
                until_ns = self.free_ns[stage]
                self._on_span(Span(step.lane, stage, until_ns - self.took_ns[stage], until_ns, step))
        return end_ns


class TwoLaneClock:
    """Computes when the steps of waa's two lanes end."""

    def __init__(
        self,
        encode: LaneCost,
        decode: LaneCost,
        schedule: Schedule,
        on_span: OnSpan | None = None,
        jitter: Jitter | None = None,
    ) -> None:
        self._lanes = {
            "encode": LaneClock(encode, schedule, on_span, jitter),
            "decode": LaneClock(decode, schedule, on_span, jitter),
        }
        self._schedule = schedule
        self._transfer = TransferCost(encode, decode)

    def __call__(self, issue_ns: int, step: Step) -> int:
        if step.lane == "transfer":
            pool = self._schedule.pool
            tokens = sum(pool.memory.tokens_to_move(pool.running[id_]) for id_ in step.transfer)
            seconds = self._transfer.at(tokens)
            if self._transfer.occupies:
                for lane in self._lanes.values():
                    lane.occupy(issue_ns, seconds)
            return issue_ns + max(1, round(seconds * 1e9))
        return self._lanes[step.lane](issue_ns, step)


def step_counts(schedule: Schedule, step: Step, *, has_encoder: bool) -> StepCounts:
    """Return the counts on which a step's cost depends. Call this when the step is scheduled."""
    decodes, batch = len(step.decode), schedule.batch_of(step)
    context = batch.context if decodes else 0
    if not step.encode and not has_encoder:
        return StepCounts((), decodes, context, decodes, decodes)
    ended = schedule.encoded(step)
    encode = [(start, start + length, int(id_ in ended)) for id_, start, length in step.encode]
    num_tokens = decodes + sum([length for _, _, length in step.encode])
    sampled = decodes + len(ended) if schedule.pool.encode_emits else decodes
    if not has_encoder:
        return StepCounts(encode, decodes, context, sampled, num_tokens)
    running, inputs = schedule.pool.running, batch.input_tokens if decodes else 0
    passing = inputs + sum(running[id_].input_length for id_ in ended)
    return StepCounts(
        encode,
        decodes,
        context - inputs + decodes,
        sampled,
        num_tokens,
        passing / max(decodes + len(ended), 1),
        batch.joining_tokens if decodes else 0,
    )


NUM_DRAWN = 2**16
"""Number of ratios that are drawn once and reused."""


class JitteredTimes:
    """Draws a random time for a step with a given mean time. Equal sequences of calls give equal results.

    A step is divided into parts that are about as long as the steps whose variation was measured. The time of each part
    is multiplied by a ratio that is drawn from the measured ratios, so the relative deviation of a step of n parts is
    1/sqrt(n) of one part's.
    """

    def __init__(self, jitter: Jitter) -> None:
        self._sums = _sums_of(jitter.ratios)
        self._stretch_ns = 1e9 * jitter.seconds
        self._at = 0

    def __call__(self, mean_ns: int) -> int:
        count = min(max(1, round(mean_ns / self._stretch_ns)), NUM_DRAWN)
        if self._at + count > NUM_DRAWN:
            self._at = 0
        before, self._at = self._sums[self._at], self._at + count
        return max(1, round(mean_ns * (self._sums[self._at] - before) / count))


@lru_cache(maxsize=8)
def _sums_of(ratios: tuple[float, ...]) -> list[float]:
    """Return the sums of the first 0, 1, .. drawn ratios. Every run draws the same ratios, whose mean is 1."""
    drawn = np.random.default_rng(0).choice(ratios, NUM_DRAWN)
    return [0.0, *np.cumsum(drawn / drawn.mean()).tolist()]
