"""Find plans that rely on prefix reuse: divide memory between running requests and cached prompts.

The share of prompt tokens found in the cache depends on the memory that running requests leave for the cache. With a
larger batch fewer tokens are cached, so throughput is not monotone in the batch size. Therefore the search tries
several cache sizes. From each size to the next, the cached share grows by the same amount. At one cache size,
throughput and latency are monotone in the settings, as without reuse. For cache sizes in between, the certificate uses
an upper bound. It is the throughput with the cached share of the larger size, if running requests needed memory only
for their outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise

from xgpt.core.errors import InfeasibleError
from xgpt.core.reuse_distances import ReuseCurve
from xgpt.core.schema import Ceiling, PlanDraft
from xgpt.core.workload import TraceLengths
from xscheduler.expression import maximised
from xscheduler.found import Found
from xscheduler.problem import Problem
from xsimulator.lengths import reused_at
from xsimulator.shares import share_of_replica

STEPS = 4
"""Number of cache sizes. From each to the next, the cached share grows by the same amount."""
SHARES = (0.5, 0.65, 0.8, 0.9, 0.95)
"""Further cache sizes to try, as shares of a plan's K/V memory."""
BOUND = "the best of any division of memory between running requests and cached prompts"
ROUNDS = 1
"""Number of further searches. Each assumes the number of running requests found by the search before it."""
MOST_DIVISIONS = 2


FindEach = Callable[[Problem], dict[str, Found]]


def with_reuse(
    find_each: FindEach, problem: Problem, trace: TraceLengths | None, plans: dict[str, Found]
) -> dict[str, Found]:
    """Return each policy's best plan, the best of all first: the given plan, or a better one that relies on reuse.

    A plan with reuse has one replica, or as many replicas as the best plan without reuse.
    """
    if trace is None:
        return plans
    best = next(iter(plans.values())).draft
    counts = problem.constraint.sla == "length" and problem.constraint.maximise is None and best.shares_prompts
    if trace.prefixes is None or not counts:
        return plans
    divisions = _divisions(problem, trace, best)
    highest = None
    if problem.constraint.maximises_arrivals:
        chosen = promising([division.problem() for division in divisions], partial(_rps, find_each))
        planned = [_planned(find_each, division) for division in chosen]
    else:
        reached = [_planned(find_each, division.bound()) for division in divisions]
        bounds = [found.ceiling.most for each in (plans, *reached) for found in each.values()]
        highest = None if None in bounds else max(bound for bound in bounds if bound is not None)
        planned = [_consistent(find_each, division, best) for division in divisions]
    found = dict(plans)
    for kind, plan in (item for division in planned for item in division.items()):
        if kind not in found or maximised(plan.draft) > maximised(found[kind].draft):
            found[kind] = plan
    ordered = sorted(found.items(), key=lambda item: -maximised(item[1].draft))
    return {kind: _counting(plan, best, highest) for kind, plan in ordered}


@dataclass(frozen=True)
class _Division:
    """A division of memory between running requests and cached prompts.

    Attributes:
        curve: returns the reuse curve, given the number of other running requests.
        size, larger: number of cached tokens in this division, and in the next larger one.
    """

    base: Problem
    curve: Callable[[int], ReuseCurve]
    size: float
    larger: float
    has_answers: bool

    def problem(self, inside: float = 0.0) -> Problem:
        return replace(self.base, reused=reused_at(self.curve(round(inside)), self.size))

    def bound(self) -> Problem:
        """Return a problem whose optimum is an upper bound for all divisions between this one and the next."""
        return replace(self.base, reused=reused_at(self.curve(0), self.larger, self.size, holds_prompts=False))


def _divisions(problem: Problem, trace: TraceLengths, best: PlanDraft) -> list[_Division]:
    divisions = []
    for replicas in sorted({1, best.replicas}):
        of_replica = trace if replicas == 1 else share_of_replica(trace, best)
        curve = cache(partial(ReuseCurve, of_replica, best.block_size))
        divided = replace(problem, replicas=replicas)
        has_answers = of_replica.prefixes is not None and any(of_replica.prefixes.outputs)
        divisions += [_Division(divided, curve, *sizes, has_answers) for sizes in pairwise(_sizes(curve(0), best))]
    return divisions


def _consistent(find_each: FindEach, division: _Division, best: PlanDraft) -> dict[str, Found]:
    """Return each policy's best plan. The plan assumes only as much reuse as its own number of running requests
    permits.

    This number matters at saturation: a conversation's next prompt may enter before the previous output has
    ended.
    """
    if not division.has_answers:
        return _planned(find_each, division.problem())
    planned = _planned(find_each, division.problem(best.estimate.decode_batch))
    for _ in range(ROUNDS):
        inside = max((plan.draft.estimate.decode_batch for plan in planned.values()), default=0.0)
        planned = _planned(find_each, division.problem(inside))
    return planned


def promising(divisions: list[Problem], best_rps: Callable[[Problem], float]) -> list[Problem]:
    """Return the divisions of memory with the highest throughput at saturation. Arrivals are simulated for them."""
    if len(divisions) == 1:
        return divisions

    def saturated(division: Problem) -> float:
        return best_rps(division.under(division.constraint.but(objective="saturated")))

    return sorted(divisions, key=saturated, reverse=True)[:MOST_DIVISIONS]


def _rps(find_each: FindEach, problem: Problem) -> float:
    return max((plan.draft.estimate.throughput_rps for plan in _planned(find_each, problem).values()), default=0.0)


def _sizes(curve: ReuseCurve, plan: PlanDraft) -> list[float]:
    memory = float(plan.block_size * min(stage.kv_blocks for stage in plan.stages if stage.lane != "decode"))
    steps = {0.0, memory, *curve.sizes(STEPS).tolist(), *(share * memory for share in SHARES)}
    return sorted(size for size in steps if size <= memory)


def _planned(find_each: FindEach, problem: Problem) -> dict[str, Found]:
    try:
        return find_each(problem)
    except InfeasibleError:
        return {}


def _counting(found: Found, alone: PlanDraft, highest: float | None) -> Found:
    reuse = found.draft.estimate.reuse
    if reuse is None:
        return found
    return replace(found.estimating(reuse=reuse.but(alone=maximised(alone))), ceiling=Ceiling(highest, BOUND))
