"""Plans by the arrival rate at which they keep their bounds: ranked in closed form, settled by simulation."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from xgpt.errors import InfeasibleError
from xgpt.schema import Plan, Profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from xscheduler.schedule import Scheduler

MOST_TRIED = 4
"""Plans of a policy that are simulated at most, the best in closed form first."""
DOUBT = 0.1
"""A plan whose rate in closed form is this share below the best simulated one is not simulated."""
LOOSER = 1.04
"""By which factor a bound that is never kept is loosened until it is."""
MOST_LOOSENED = 60
BOUNDS = ("latency_bound_s", "ttft_s", "tpot_s")
STABLE = "the highest throughput that any schedule reaches, whatever its latency"


def rate_of(plan: Plan) -> float:
    """The highest arrival rate at which a plan keeps its bounds: its simulated one; without bounds, its throughput."""
    found = plan.estimate.capacity
    return plan.estimate.throughput_rps if found is None else found.rate_per_s


def maximised(plan: Plan) -> float:
    """What the plan's own objective counts, requests a second."""
    return rate_of(plan) if plan.constraint.maximises_arrivals else plan.estimate.throughput_rps


def with_capacities(plans: dict[str, Plan], profile: Profile) -> dict[str, Plan]:
    """Plans with their simulated capacities, where they have none yet; the first one's also about its bounds."""
    found = {}
    for i, (kind, plan) in enumerate(plans.items()):
        known = plan.estimate.capacity
        found[kind] = (
            plan if known is not None else with_capacity(plan, profile, predicted_rate(plan, profile), edges=not i)
        )
    return found


def predicted_rate(plan: Plan, profile: Profile) -> float | None:
    """The highest arrival rate of a plan in closed form; None where it has no bounds."""
    from xscheduler.arrival_rate import rate_of as closed_rate
    from xscheduler.placement import Placement
    from xscheduler.schedule import Problem, Scheduler

    if not plan.constraint.bounds_latency:
        return None
    problem = Problem(
        plan.model, plan.checkpoint, plan.cluster, plan.workload, profile, plan.constraint, plan.admission.kv
    )
    space = Scheduler(problem).space(plan.policy.kind, Placement.of(plan))
    return closed_rate(space, plan.policy, plan.constraint)


def with_capacity(plan: Plan, profile: Profile, predicted: float | None = None, *, edges: bool = True) -> Plan:
    """The plan with its simulated capacity; as it is where it has no bounds. What is known of it already is kept.

    Args:
        predicted: the closed form's rate.
        edges: also under bounds that are a little tighter and looser.
    """
    from xsimulator.capacity import capacity

    known = plan.estimate.capacity
    if known is not None and predicted is None:
        predicted = known.closed_form_per_s
    found = capacity(plan, profile, predicted, start=None if known is None else known.rate_per_s, edges=edges)
    return plan.model_copy(update={"estimate": plan.estimate.model_copy(update={"capacity": found})})


def best_by_arrivals(
    of: Scheduler,
    kinds: Iterable[str],
    *,
    finish: Callable[[Plan], Plan] = lambda plan: plan,
    only_best: bool = False,
) -> dict[str, Plan]:
    """Each policy's plan of the highest arrival rate, with that rate, the highest first.

    Args:
        finish: what is made of a plan before it is simulated: its order of admission.
        only_best: of all policies together, the one plan.

    Raises:
        InfeasibleError: no plan keeps the bounds at any rate, or at the rate that is asked for.
    """
    profile, constraint = of.problem.profile, of.problem.constraint
    started = time.perf_counter()
    candidates = {kind: of.by_arrivals(kind, MOST_TRIED) for kind in kinds}
    ranked = sorted((kind for kind in candidates if candidates[kind]), key=lambda kind: -candidates[kind][0][1])
    searching_s = (time.perf_counter() - started) / max(len(ranked), 1)
    found: dict[str, Plan] = {}
    best: Plan | None = None
    for kind in ranked:
        started = time.perf_counter()
        rival = best if only_best else None
        plan = _best_of([(finish(plan), rate) for plan, rate in candidates[kind]], profile, rival)
        if plan is not None and rate_of(plan) > 0:
            found[kind] = _certified(plan, of.most_stable(kind), searching_s + time.perf_counter() - started)
            best = max(filter(None, (best, found[kind])), key=rate_of)
    if best is None:
        raise _never_kept(of, tuple(candidates))
    kind = best.policy.kind
    found[kind] = _certified(_refined(of, best, profile), of.most_stable(kind), best.search.seconds)
    asked = constraint.arrival_rate_per_s
    if asked is not None and rate_of(found[kind]) < asked:
        raise InfeasibleError(
            f"arrival_rate_per_s: no schedule of {', '.join(candidates)} on {of.num_devices} devices of "
            f"{of.problem.cluster.name} keeps the bounds with waiting at {asked:g} requests/s; the best one keeps them "
            f"up to {rate_of(found[kind]):.4g}: take more devices or a lower rate",
            nearest_bound_s=None,
            binding="arrival_rate_per_s",
        )
    if only_best:
        return {kind: found[kind]}
    plans = sorted(found.items(), key=lambda item: -rate_of(item[1]))
    return {kind: plan for kind, plan in plans if asked is None or rate_of(plan) >= asked}


def _best_of(candidates: list[tuple[Plan, float]], profile: Profile, rival: Plan | None) -> Plan | None:
    """The plan of the highest simulated rate among some, the best in closed form first; one that cannot beat the best
    before it is not simulated further than that.
    """
    best = rival
    for plan, predicted in candidates:
        if best is not None and predicted < (1 - DOUBT) * rate_of(best):
            break
        if best is None or _beats(plan, best, profile):
            best = with_capacity(plan, profile, predicted, edges=False)
    return None if best is rival else best


def _beats(plan: Plan, best: Plan, profile: Profile) -> bool:
    from xsimulator.capacity import PRECISION, keeps

    return keeps(plan, profile, (1 + PRECISION) * rate_of(best))


def _refined(of: Scheduler, best: Plan, profile: Profile) -> Plan:
    """The best plan, or a neighbour of its settings that keeps a higher rate; with its capacity about the bound."""
    for other, predicted in of.neighbours(best):
        like = other.model_copy(update={"admission": best.admission, "search": best.search})
        if _beats(like, best, profile):
            best = with_capacity(like, profile, predicted, edges=False)
    return with_capacity(best, profile)


def _certified(plan: Plan, most: float, seconds: float) -> Plan:
    """The plan with what bounds its rate: no schedule is stable beyond the highest throughput of any."""
    search = plan.search.model_copy(
        update={"gap": max(0.0, most / rate_of(plan) - 1), "bound": STABLE, "seconds": round(seconds, 4)}
    )
    return plan.model_copy(update={"search": search})


def _never_kept(of: Scheduler, kinds: tuple[str, ...]) -> InfeasibleError:
    """Why no plan keeps the bounds at any rate, with the nearest bound that one keeps."""
    constraint = of.problem.constraint
    bounds = {name: bound for name in BOUNDS if (bound := getattr(constraint, name)) is not None}
    name = next(iter(bounds))
    base = bounds[name]
    try:
        of.best_of_each(kinds)
    except InfeasibleError as error:  # requests that do not wait keep it neither
        if error.binding != name or error.nearest_bound_s is None:
            return error
        base = max(base, error.nearest_bound_s)
    for looser in (float(f"{LOOSER**n * base:.4g}") for n in range(1, MOST_LOOSENED)):
        under = of.under(constraint.model_copy(update={name: looser}))
        if any(
            rate_of(with_capacity(plan, under.problem.profile, rate, edges=False)) > 0
            for kind in kinds
            for plan, rate in under.by_arrivals(kind, 1)
        ):
            return InfeasibleError(
                f"{name}: no schedule of {', '.join(kinds)} keeps {bounds[name]:g} s with waiting counted on "
                f"{of.problem.cluster.name}, at however low an arrival rate; the nearest bound that one keeps is "
                f"{looser:.4g} s",
                nearest_bound_s=looser,
                binding=name,
            )
    text = ", ".join(f"{name} {bound:g}" for name, bound in bounds.items())
    return InfeasibleError(
        f"{name}: no schedule of {', '.join(kinds)} keeps {text} with waiting counted",
        nearest_bound_s=None,
        binding=name,
    )
