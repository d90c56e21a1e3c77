"""State in numbers what changed before a running plan was judged."""

from __future__ import annotations

from xgpt.core.rates import rate_of
from xgpt.core.schema import Observation, Plan


def in_numbers(plan: Plan, observation: Observation) -> str:
    """Return the change that led to a judgement, in numbers: planned and observed ones."""
    if observation.cause == "lengths":
        planned, now = plan.workload, observation.workload
        inputs = f"inputs {planned.input.mean:.0f} to {now.input.mean:.0f}"
        return f"{inputs}, outputs {planned.output.mean:.0f} to {now.output.mean:.0f} tokens in the mean"
    if observation.cause == "pace" and observation.slowdown is not None:
        planned_for = "" if plan.profile.slowdown == 1 else f", {plan.profile.slowdown:.2f} times in the plan"
        return f"steps take {observation.slowdown:.2f} times as long as in the profile{planned_for}"
    if observation.cause == "goodput" and observation.goodput is not None:
        return f"{observation.goodput:.1%} of recent requests kept their bounds, {plan.constraint.quantile:.1%} should"
    if observation.cause == "arrivals" and observation.arrival_rate_per_s is not None:
        arriving = f"{observation.arrival_rate_per_s:.3g} requests/s arrive"
        return f"{arriving}, the plan keeps its bounds up to {rate_of(plan):.3g}"
    if observation.cause == "reuse" and observation.reuse is not None:
        planned_share = 0.0 if plan.estimate.reuse is None else plan.estimate.reuse.share
        return f"{observation.reuse.share:.0%} of prompt tokens were cached, {planned_share:.0%} in the plan"
    return f"asked for, after {observation.num_requests} requests"
