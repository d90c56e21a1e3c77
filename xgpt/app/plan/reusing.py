"""Find plans that count on reuse: divide memory between running requests and prompts kept for later ones.

How much is found is a function of the memory that a setting leaves for it, and has no direction in the batch: a larger
batch serves more at a time, and finds less. So the memory that is kept is enumerated, in steps between which the share
that is found grows by equal parts. Within a step lengths are fixed, and every direction holds as without reuse; the
certificate counts for each step what its settings could reach if they found as much as the next step's, in no more
memory than this one's, and if running requests took memory for their outputs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING

from xgpt.app.plan.arrivals import maximised
from xgpt.app.plan.planning import plan_each
from xgpt.app.simulating import shares_prompts
from xgpt.errors import InfeasibleError
from xgpt.policies.routing import share_of_replica
from xgpt.reuse import ReuseCurve
from xgpt.schema import Plan
from xsimulator.reuse import reused_at

if TYPE_CHECKING:
    from xgpt.app.plan.request import PlanRequest
    from xgpt.workload import TraceLengths
    from xscheduler.problem import Problem

STEPS = 4
"""Sizes of what is kept at which as much more is found as at the one before."""
SHARES = (0.5, 0.65, 0.8, 0.9, 0.95)
"""Shares of the K/V memory that may be kept, in addition."""
BOUND = "the best of any division of memory between running requests and what later ones find"
ROUNDS = 1
"""Times that a plan is looked for anew, with as many requests inside as the one before."""
MOST_STEPS = 2
"""Divisions of memory for which arrivals are simulated."""


def with_reuse(problem: Problem, request: PlanRequest, trace: TraceLengths, plans: dict[str, Plan]) -> dict[str, Plan]:
    """Return each policy's best plan, the best of all first: those given, or better ones that count on reuse.

    They have one replica, or as many as the best plan without reuse: each then has the requests that are routed to it.

    Args:
        plans: those that count on none.
    """
    best = next(iter(plans.values()))
    counts = problem.constraint.sla == "length" and problem.wish is None and shares_prompts(best)
    if trace.prefixes is None or not counts:
        return plans
    divisions = _divisions(problem, trace, best)
    highest = None
    if problem.constraint.maximises_arrivals:
        planned = [_planned(of, request) for of in _promising([of.problem() for of in divisions], request)]
    else:
        reached = [_planned(of.bound(), request) for of in divisions]
        bounds = [_bound(plan) for plan in (best, *(plan for each in reached for plan in each.values()))]
        highest = None if None in bounds else max(bound for bound in bounds if bound is not None)
        planned = [_consistent(of, best, request) for of in divisions]
    found = dict(plans)
    for kind, plan in (item for of in planned for item in of.items()):
        if kind not in found or maximised(plan) > maximised(found[kind]):
            found[kind] = plan
    ordered = sorted(found.items(), key=lambda item: -maximised(item[1]))
    return {kind: _counting(plan, best, highest) for kind, plan in ordered}


@dataclass(frozen=True)
class _Division:
    """Memory divided between running requests and what later ones find.

    Attributes:
        of: the problem, its number of replicas given.
        curve: what requests find, by the number of others that run at once.
        size, larger: tokens kept, and those of the next division.
        has_answers: prompts go on from what earlier ones were answered.
    """

    of: Problem
    curve: Callable[[int], ReuseCurve]
    size: float
    larger: float
    has_answers: bool

    def problem(self, inside: float = 0.0) -> Problem:
        """Return the problem with what requests find while `inside` others run."""
        return replace(self.of, reused=reused_at(self.curve(round(inside)), self.size))

    def bound(self) -> Problem:
        """Return the problem with what no setting between this division and the next exceeds."""
        return replace(self.of, reused=reused_at(self.curve(0), self.larger, self.size, holds_prompts=False))


def _divisions(problem: Problem, trace: TraceLengths, best: Plan) -> list[_Division]:
    """Return the divisions for one replica, and for as many as the best plan without reuse has."""
    divisions = []
    for replicas in sorted({1, best.replicas}):
        of_replica = trace if replicas == 1 else share_of_replica(trace, best)
        curve = cache(partial(ReuseCurve, of_replica, best.block_size))
        of = replace(problem, replicas=replicas)
        has_answers = of_replica.prefixes is not None and any(of_replica.prefixes.outputs)
        divisions += [_Division(of, curve, *sizes, has_answers) for sizes in pairwise(_sizes(curve(0), best))]
    return divisions


def _consistent(division: _Division, best: Plan, request: PlanRequest) -> dict[str, Plan]:
    """Return each policy's best plan that finds what is there while as many requests run as it runs.

    With requests always waiting, the turn of a conversation enters before the answers of those that still run.
    """
    if not division.has_answers:
        return _planned(division.problem(), request)
    planned = _planned(division.problem(best.estimate.decode_batch), request)
    for _ in range(ROUNDS):
        inside = max((plan.estimate.decode_batch for plan in planned.values()), default=0.0)
        planned = _planned(division.problem(inside), request)
    return planned


def _promising(of_steps: list[Problem], request: PlanRequest) -> list[Problem]:
    """Return the divisions of memory to look at for arrivals, which take simulations: those that serve most at
    saturation."""

    def saturated(problem: Problem) -> float:
        constraint = problem.constraint.model_copy(update={"objective": "saturated"})
        planned = _planned(problem.under(constraint), request)
        return max((plan.estimate.throughput_rps for plan in planned.values()), default=0.0)

    return sorted(of_steps, key=saturated, reverse=True)[:MOST_STEPS]


def _sizes(curve: ReuseCurve, plan: Plan) -> list[float]:
    """Tokens that may be kept, from none to all of a plan's K/V memory."""
    memory = float(plan.block_size * min(stage.kv_blocks for stage in plan.stages if stage.lane != "decode"))
    steps = {0.0, memory, *curve.sizes(STEPS).tolist(), *(share * memory for share in SHARES)}
    return sorted(size for size in steps if size <= memory)


def _planned(problem: Problem, request: PlanRequest) -> dict[str, Plan]:
    """Return each policy's best plan; none where memory does not hold it."""
    try:
        return plan_each(problem, request.policy, request.search, request.order)
    except InfeasibleError:
        return {}


def _bound(plan: Plan) -> float | None:
    """Return what no plan of the same policy exceeds; None: not proven."""
    gap = plan.search.gap
    return None if gap is None else maximised(plan) * (1 + gap)


def _counting(plan: Plan, alone: Plan, highest: float | None) -> Plan:
    """The plan with what the best one without reuse reaches, and the gap to what no division of memory exceeds."""
    if plan.estimate.reuse is None:
        return plan
    reuse = plan.estimate.reuse.model_copy(update={"alone": maximised(alone)})
    gap = None if highest is None else max(0.0, highest / maximised(plan) - 1)
    search = plan.search.model_copy(update={"gap": gap, "bound": BOUND})
    return plan.model_copy(update={"estimate": plan.estimate.model_copy(update={"reuse": reuse}), "search": search})
