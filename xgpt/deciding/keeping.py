"""Where the best schedule does not hold a log, find the one that keeps the bounds for most of its requests.

A schedule of the highest rate within the bounds runs small batches, so that queues grow where more arrive. Schedules
for looser bounds, or with larger batches, keep less of a steady load, but more of such a log.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from math import ceil
from typing import Any

from xgpt.core.errors import InfeasibleError
from xgpt.core.schema import PlanDraft
from xgpt.core.schema.plan import rate_of
from xgpt.deciding.load import CarriedLoad
from xgpt.deciding.verified import unverified_shape
from xscheduler.found import Found
from xscheduler.objectives.best_plans import found_each, kinds_of
from xscheduler.objectives.capacities import rated
from xscheduler.placement import Placement
from xscheduler.problem import Problem
from xscheduler.schedule import scheduler
from xscheduler.tolerances import TOLERANCES
from xsimulator.forecast import TUNED

LOOSER = (1.5, 2.0, None)
"""Factors on all bounds. None means no bounds."""
LARGER = 1.5
"""Factor on batches that are tried beside those whose K/V fits 99.9% of the time."""
MOST_LARGER = 3
"""Most times that a batch is made larger for a log."""


def keeping_most(
    found: dict[str, Found], beside: PlanDraft | None, problem: Problem, load: CarriedLoad
) -> tuple[dict[str, Found], PlanDraft | None, tuple[PlanDraft, ...]]:
    """Return the schedules with that first which keeps most of a log, the one of another shape that keeps most, and
    those that were given instead of these two. If the first one holds the log, or if there is none, all are as given.
    """
    kind, first = next(iter(found.items()))
    kept = load.kept(first.draft, problem.profile) if problem.constraint.maximises_arrivals else None
    if kept is None or kept.holds(problem.constraint.quantile):
        return found, beside, ()
    given = [first.draft, *(() if beside is None else (beside,))]
    shapes = first.other_shapes  # that of the highest rate may keep least
    each = {_settings(draft): draft for draft in [*given, *shapes]}
    tried = [*each.values(), *(in_larger_batches(draft, problem, load) for draft in each.values())]
    if not any(holds(draft, problem, load) for draft in tried):
        tried += _for_looser_bounds(first, problem)
    ranked = sorted(tried, key=lambda draft: (share_kept(draft, problem, load), rate_of(draft)), reverse=True)
    best, *rest = ranked
    shape = Placement.of(best).degrees, best.replicas
    others = [draft for draft in rest if (Placement.of(draft).degrees, draft.replicas) != shape]
    if unverified_shape(best):
        others.sort(key=lambda draft: bool(unverified_shape(draft)))
    if best is not first.draft:
        kind = kind if best.policy.kind == first.draft.policy.kind else best.policy.kind
        found = {kind: Found(best, first.ceiling), **{name: one for name, one in found.items() if name != kind}}
    other = next(iter(others), None)
    chosen = [_settings(draft) for draft in (best, other) if draft is not None]
    return found, other, tuple(draft for draft in given if _settings(draft) not in chosen)


def _settings(draft: PlanDraft) -> tuple[object, ...]:
    return Placement.of(draft).degrees, draft.replicas, draft.policy, draft.admission


def with_larger_batches(found: dict[str, Found], problem: Problem) -> dict[str, Found]:
    """Return the schedules of an engine's own scheduler with larger batches than always fit, if it keeps the bounds at
    a higher rate with them, and some memory free for those that run.
    """
    engine = problem.engine
    if engine is None or not problem.constraint.maximises_arrivals or problem.speculation is not None:
        return found
    if not engine.spare_tokens:  # others preempt more: in vLLM they gained 0.1%
        return found
    return {
        kind: replace(one, draft=_largest(one.draft, problem)) if engine.runs(kind) and rate_of(one.draft) else one
        for kind, one in found.items()
    }


def _largest(draft: PlanDraft, problem: Problem) -> PlanDraft:
    while (larger := _with_larger_batch(draft, problem)) is not None:
        larger = rated(larger, problem.profile)
        if rate_of(larger) <= (1 + TOLERANCES.rate) * rate_of(draft):
            break
        draft = larger
    return draft


def in_larger_batches(draft: PlanDraft, problem: Problem, load: CarriedLoad) -> PlanDraft:
    """Return a schedule, if it does not hold a log, with the batches with which it keeps most of it."""
    first = draft
    for _ in range(MOST_LARGER):
        larger = None if holds(draft, problem, load) else _with_larger_batch(draft, problem)
        if larger is None or share_kept(larger, problem, load) <= share_kept(draft, problem, load):
            break
        draft = larger
    return draft if draft is first else rated(draft, problem.profile)


def holds(draft: PlanDraft, problem: Problem, load: CarriedLoad) -> bool:
    """Return whether a schedule holds a log, as far as a replay tells."""
    kept = load.kept(draft, problem.profile)
    return kept is None or kept.holds(draft.constraint.quantile)


def share_kept(plan: PlanDraft, problem: Problem, load: CarriedLoad) -> float:
    kept = load.kept(plan, problem.profile)
    return 0.0 if kept is None else kept.share


def _with_larger_batch(draft: PlanDraft, problem: Problem) -> PlanDraft | None:
    """Return the schedule of an engine's own scheduler with a larger batch, with which requests may be preempted, or
    None for another one. A batch that the user has fixed stays.
    """
    policy: Any = draft.policy
    engine = problem.engine
    is_own = engine is not None and engine.admits_by_use and hasattr(policy, "most_running")
    if not is_own or "max_batch" in problem.fixed or draft.estimate.reuse is not None:
        return None
    settings = policy.but(max_batch=ceil(LARGER * policy.max_batch))
    settings = settings.but(max_batch=int(settings.most_running))  # no more than a step's tokens
    if settings.max_batch <= policy.max_batch:
        return None
    larger: PlanDraft = scheduler(problem).score(settings, Placement.of(draft), admits_by_use=True)
    larger = larger.but(constraint=draft.constraint, pinned=draft.pinned, search=draft.search)
    return larger.but(admission=larger.admission.but(max_running=None)).with_estimate(capacity=None)


def _for_looser_bounds(first: Found, problem: Problem) -> Iterator[PlanDraft]:
    draft = first.draft
    pinned, order = draft.pinned, draft.admission.order
    if draft.estimate.reuse is not None or order not in ("fcfs", "in-time") or pinned.policy in TUNED:
        return
    kind: str = draft.policy.kind
    if (engine := problem.engine) is not None and not engine.runs(kind):
        kind = next((each for each in kinds_of(problem, pinned.policy) if engine.runs(each)), kind)
    constraint, tried = problem.constraint.but(arrival_rate_per_s=None), list[tuple[Placement, Any]]()
    for factor in LOOSER:
        with suppress(InfeasibleError):
            loose = problem.under(constraint.looser(factor))
            found = next(iter(found_each(loose, kind, proves=False).values()))
            for each in (found.draft, *found.other_shapes):
                if (settings := (Placement.of(each), each.policy)) not in tried:
                    tried.append(settings)
                    asked = each.but(constraint=draft.constraint, pinned=pinned).with_estimate(capacity=None)
                    yield rated(asked, problem.profile)
