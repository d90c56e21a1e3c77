"""When simulated steps end: each passes the stages of its lane, in order, behind the steps before it.

finish[j, n] = max(finish[j - 1, n] + hop, finish[j, n - 1]) + cost[j, n]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from xgpt.policies import Schedule, Step
from xgpt.schema import LaneName
from xsimulator.step_cost import LaneCost
from xsimulator.step_counts import StepCounts
from xsimulator.transfer import TransferCost


class Span(NamedTuple):
    """A stage at work on a step. Times in ns."""

    lane: LaneName
    stage: int
    start_ns: int
    end_ns: int
    step: Step


OnSpan = Callable[[Span], None]


class LaneClock:
    """Says when the steps of one lane end. To be called once a step, in their order."""

    def __init__(self, cost: LaneCost, schedule: Schedule, on_span: OnSpan | None = None) -> None:
        self._cost = cost
        self._schedule = schedule
        self._on_span = on_span
        self._free_ns = [0] * cost.num_stages
        """The time at which each stage is done with what has been scheduled."""

    def __call__(self, issue_ns: int, step: Step) -> int:
        counts = step_counts(self._schedule, step, has_encoder=self._cost.has_encoder)
        now_ns = issue_ns
        costs, hops = self._cost.step(counts), self._cost.hops(counts.num_tokens)
        for stage, (cost_s, hop_s) in enumerate(zip(costs, hops, strict=True)):
            start_ns = max(now_ns + round(hop_s * 1e9), self._free_ns[stage])
            now_ns = self._free_ns[stage] = start_ns + max(1, round(cost_s * 1e9))
            if self._on_span is not None:
                self._on_span(Span(step.lane, stage, start_ns, now_ns, step))
        return now_ns

    def occupy(self, issue_ns: int, seconds: float) -> None:
        """Occupy every stage with something else for this long, after the step that it works on."""
        self._free_ns = [max(free_ns, issue_ns) + round(seconds * 1e9) for free_ns in self._free_ns]


class TwoLaneClock:
    """Says when the steps of WAA's lanes end."""

    def __init__(self, encode: LaneCost, decode: LaneCost, schedule: Schedule, on_span: OnSpan | None = None) -> None:
        self._lanes = {"encode": LaneClock(encode, schedule, on_span), "decode": LaneClock(decode, schedule, on_span)}
        self._schedule = schedule
        self._transfer = TransferCost(encode, decode)

    def __call__(self, issue_ns: int, step: Step) -> int:
        if step.lane == "transfer":
            tokens = sum(map(self._schedule.pool.tokens_to_move, step.transfer))
            seconds = self._transfer.at(tokens)
            if self._transfer.occupies:
                for lane in self._lanes.values():
                    lane.occupy(issue_ns, seconds)
            return issue_ns + max(1, round(seconds * 1e9))
        return self._lanes[step.lane](issue_ns, step)


def step_counts(schedule: Schedule, step: Step, *, has_encoder: bool) -> StepCounts:
    """Count what the cost of a step depends on, as it is scheduled."""
    running = schedule.pool.running
    ended = set(schedule.encoded(step))
    encode = [(start, start + length, int(id_ in ended)) for id_, start, length in step.encode]
    prompt_tokens = sum(length for _, _, length in step.encode)
    sampled = len(schedule.sampled(step))
    if not has_encoder:
        context = sum(running[id_].context for id_ in step.decode)
        return StepCounts(encode, len(step.decode), context, sampled, prompt_tokens + len(step.decode))
    decoding = [running[id_] for id_ in step.decode]
    passing = [*decoding, *(running[id_] for id_ in ended)]
    joining = sum(request.input_length for request in decoding if not request.generated)
    return StepCounts(
        encode,
        len(decoding),
        sum(1 + request.generated for request in decoding),
        sampled,
        prompt_tokens + len(decoding),
        sum(request.input_length for request in passing) / max(len(passing), 1),
        joining,
    )
