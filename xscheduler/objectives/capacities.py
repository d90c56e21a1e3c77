"""Compute the highest arrival rates and other objective values of given plans, in closed form or by simulation."""

from __future__ import annotations

from xgpt.core.schema import Plan, Profile
from xscheduler.arrival_rate import closed_rate
from xscheduler.candidates import Candidates
from xscheduler.placement import Placement
from xscheduler.problem import Problem
from xsimulator.capacity import capacity


def with_capacities(plans: dict[str, Plan], profile: Profile) -> dict[str, Plan]:
    """Return the plans with missing capacities simulated. The first plan is also simulated under slightly tighter and
    looser bounds.
    """
    found = {}
    for i, (kind, plan) in enumerate(plans.items()):
        known = plan.estimate.capacity
        found[kind] = (
            plan if known is not None else with_capacity(plan, profile, predicted_rate(plan, profile), edges=not i)
        )
    return found


def predicted_rate(plan: Plan, profile: Profile) -> float | None:
    """Return the highest arrival rate of a plan in closed form, or None if the plan has no bounds."""
    if not plan.constraint.bounds_latency:
        return None
    return _closed_rate(plan, Problem.of(plan, profile))


def closed_objective(plan: Plan, problem: Problem) -> float:
    """Return the objective's value that a plan's settings reach in another problem, in closed form."""
    if plan.constraint.maximises_arrivals:
        return _closed_rate(plan, problem)
    space = Candidates(problem).space(plan.policy.kind, Placement.of(plan))
    return plan.replicas * space.forecast.estimate(space.models.model, plan.policy)["throughput"]


def _closed_rate(plan: Plan, problem: Problem) -> float:
    in_engine = problem.under(plan.constraint.less(plan.request_path_s))
    return closed_rate(Candidates(in_engine).space(plan.policy.kind, Placement.of(plan)), plan.policy)


def with_capacity(plan: Plan, profile: Profile, predicted: float | None = None, *, edges: bool = True) -> Plan:
    """Return the plan with its simulated capacity. A plan without bounds is returned unchanged.

    Args:
        predicted: the highest arrival rate in closed form.
        edges: whether to simulate slightly tighter and looser bounds, too.
    """
    return plan.with_estimate(capacity=capacity(plan, profile, predicted, edges=edges))
