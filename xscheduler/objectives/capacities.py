"""Compute given plans' highest arrival rates and other objective values, in closed form or by simulation. Also find the
cost of mixed steps above which another policy is better.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from xgpt.core.schema import MixingEdge, Plan, Profile
from xgpt.resolve import load_engine
from xscheduler.arrival_rate import closed_rate
from xscheduler.candidates import Candidates
from xscheduler.expression import maximised
from xscheduler.placement import Placement
from xscheduler.problem import Problem
from xsimulator.capacity import capacity
from xsimulator.forecast import FORECASTS


def with_capacities(plans: dict[str, Plan], profile: Profile) -> dict[str, Plan]:
    """Return the plans with their capacities. Missing capacities are simulated. The first plan is also simulated under
    slightly tighter and looser bounds.
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
    """Compute in closed form the objective's value that a plan's settings reach in another problem."""
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


DEAREST = 0.4
"""Largest cost of mixing that is tried, as a share of the time of a step's decodes."""
HALVINGS = 5


def with_mixing_edge(plans: Mapping[str, Plan], profile: Profile) -> Plan:
    """Return the first plan. Record in it the cost of mixed steps above which another policy's plan is better.

    Plans are compared by their objective in closed form, with unchanged settings. A plan from a measured profile is
    returned unchanged, since the profile includes the cost of mixed steps.
    """
    best = next(iter(plans.values()))
    rivals = [plan for plan in plans.values() if _mixes(plan) != _mixes(best)]
    if profile.source == "measured" or not rivals:
        return best
    rival = max(rivals, key=maximised)
    mixed, other = (best, rival) if _mixes(best) else (rival, best)
    now = 0.0 if best.engine is None else best.engine.mixing
    closed = _closed(mixed, profile, now)

    def is_mixed_better(mixing: float) -> bool:
        return maximised(mixed) * _closed(mixed, profile, mixing) > maximised(other) * closed

    far = DEAREST if mixed is best else 0.0
    if closed <= 0 or is_mixed_better(far) == (mixed is best):
        return best
    near = now
    for _ in range(HALVINGS):
        middle = (near + far) / 2
        near, far = (middle, far) if is_mixed_better(middle) == (mixed is best) else (near, middle)
    edge = MixingEdge(mixing=round((near + far) / 2, 3), policy=rival.policy.kind)
    return best.with_estimate(mixing_edge=edge)


def _mixes(plan: Plan) -> bool:
    return FORECASTS[plan.policy.kind].stations.admits_each_step


def _closed(plan: Plan, profile: Profile, mixing: float) -> float:
    """Compute in closed form the value of a plan's objective at another cost of mixed steps."""
    engine = (plan.engine or load_engine("xgpt")).but(mixing=mixing)
    return closed_objective(plan, replace(Problem.of(plan, profile), engine=engine))
