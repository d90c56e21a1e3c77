"""Try by simulation the control variables that steady two lanes at run time; no closed form models them.

An encode batch takes more tokens if fewer requests than average decode, and fewer tokens if more do, and it joins the
decode lane after a buffer time. The cap on running requests already steadies the lanes, so usually neither variable
gains anything (docs/results/correlated.md).
Source: ExeGPT sec. 5.2.
"""

from __future__ import annotations

from math import ceil

from xgpt.core.schema import Plan, PolicySettings
from xscheduler.expression import maximised
from xscheduler.objectives.rates import with_capacity
from xscheduler.objectives.saturation import saturated_figures, with_simulated_figures
from xscheduler.problem import Problem

ADJUSTMENTS = (10, 20)
"""Percentages to try."""
BUFFER = 1.25
"""The buffer time to try, as a multiple of the time after which a batch joins without a buffer."""
LEAST_GAIN = 0.01
"""A setting is taken if it gains at least this share; repeated simulations differ by less."""


def steadied(plan: Plan, problem: Problem) -> Plan:
    """Return the plan with the settings that gain most, if its policy has any and the user has fixed none of them."""
    names = plan.policy.steadying
    if not names or problem.reused is not None or problem.constraint.sla == "request" or problem.fixed.keys() & names:
        return plan
    profile, least = problem.profile, saturated_figures(plan, problem.profile).throughput_rps * (1 + LEAST_GAIN)
    best = plan
    for policy in _tried(plan, plan.policy):
        other = plan.model_copy(update={"policy": policy})
        seen = saturated_figures(other, profile)
        if seen.throughput_rps < least or seen.excess(other, plan.constraint) > 1:
            continue
        other = with_simulated_figures(other, profile)
        if plan.constraint.maximises_arrivals:
            other = with_capacity(other, profile, maximised(plan), edges=False)
        if maximised(other) >= maximised(plan) * (1 + LEAST_GAIN) and maximised(other) > maximised(best):
            best = other
    return best


def _tried(plan: Plan, policy: PolicySettings) -> list[PolicySettings]:
    estimate = plan.estimate
    until_joining = estimate.ttft_s / max(estimate.tpot_s, 1e-9) + 1
    buffered = policy.model_copy(update={"buffer_iterations": ceil(BUFFER * until_joining)})
    return [*(policy.model_copy(update={"adjustment_percent": percent}) for percent in ADJUSTMENTS), buffered]
