"""Fit the few numbers from which a scheduling rule predicts step times during serving."""

from __future__ import annotations

import numpy as np

from xgpt.core.policies.slack import StepClock
from xgpt.core.schema import PlanDraft, Profile, StepTimes
from xsimulator.costs.step_cost import LaneCost, StepCounts, lanes_of

NUM_POINTS = 32
NUM_STEPS = 200


def with_step_times(plan: PlanDraft, profile: Profile) -> PlanDraft:
    """Return a single-lane plan with the step times that its scheduling rule needs."""
    times = step_times(plan, lanes_of(plan, profile)["both"])
    return plan.with_estimate(step_times=times)


def step_times(plan: PlanDraft, cost: LaneCost) -> StepTimes:
    """Return step times, fitted to the costs of a decoder-only model's lane over the plan's batches and lengths."""
    longest = plan.workload.input.lengths[-1] + plan.workload.output.lengths[-1]
    most_tokens = max(2 * plan.workload.input.lengths[-1], 8192)
    tokens, prompts = _points(most_tokens), _points(longest)
    one = [_seconds(cost, StepCounts([], 0, 0, 1, int(n))) for n in tokens]
    tokens_s = np.maximum.accumulate([one[1], *one[1:]]).tolist()
    prompts_s = np.maximum.accumulate([_attention(cost, int(n)) for n in prompts]).tolist()
    times = StepTimes(
        tokens=tuple(tokens),
        tokens_s=tuple(tokens_s),
        prompts=tuple(prompts),
        prompts_s=tuple(prompts_s),
        decode_s=0.0,
        context_s=0.0,
        error=0.0,
    )
    fitted, judged = _steps(plan, cost, 0), _steps(plan, cost, 1)
    decodes = np.asarray([[counts.decodes, counts.context] for counts, _ in fitted], float)
    left = np.asarray([seconds - _predicted(times, counts) for counts, seconds in fitted])
    scale = 1 / np.asarray([seconds for _, seconds in fitted])  # for relative errors
    found, *_ = np.linalg.lstsq(decodes * scale[:, None], left * scale, rcond=None)
    times = times.but(decode_s=float(found[0]), context_s=float(found[1]))
    errors = [abs(_predicted(times, counts) / seconds - 1) for counts, seconds in judged]
    return times.but(error=round(float(np.median(errors)), 4))


def _points(most: int) -> list[int]:
    spread = np.round(np.geomspace(1, most, NUM_POINTS)).astype(int)
    return [0, *np.unique(spread).tolist()]


def _seconds(cost: LaneCost, counts: StepCounts) -> float:
    return sum(sum(parts) for parts in cost.parts(counts)) + sum(cost.hops(counts.num_tokens))


def _attention(cost: LaneCost, length: int) -> float:
    return sum(parts.encode_attention for parts in cost.parts(StepCounts([(0, length, 1)], 0, 0, 1, length)))


def _steps(plan: PlanDraft, cost: LaneCost, seed: int) -> list[tuple[StepCounts, float]]:
    """Return random steps like the plan's, each with its seconds."""
    rng = np.random.default_rng(seed)
    inputs, outputs = plan.workload.input, plan.workload.output
    most = max(1, getattr(plan.policy, "max_batch", round(plan.estimate.decode_batch)))
    steps = []
    shares = np.asarray(inputs.probabilities) / sum(inputs.probabilities)  # numbers in a file are rounded
    for _ in range(NUM_STEPS):
        decodes = int(rng.integers(1, most + 1))
        mean = rng.choice(inputs.lengths, p=shares) + outputs.lengths[-1] * rng.random() / 2
        length = int(rng.choice(inputs.lengths, p=shares))
        start = int(rng.integers(0, length))
        end = int(rng.integers(start + 1, length + 1))
        done = int(end == length)
        counts = StepCounts([(start, end, done)], decodes, int(decodes * mean), decodes + done, decodes + end - start)
        steps.append((counts, _seconds(cost, counts)))
    return steps


def _predicted(times: StepTimes, counts: StepCounts) -> float:
    clock = StepClock(times)
    pieces = sum(clock.piece(start, end) for start, end, _ in counts.encode)
    return clock.tokens(counts.num_tokens) + clock.decodes(counts.decodes, int(counts.context)) + pieces
