"""Find the plans with the highest arrival rate within bounds: ranked in closed form, settled by simulation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from xgpt.core.errors import InfeasibleError
from xgpt.core.progress import Progress
from xgpt.core.schema import Capacity, Plan, Profile

if TYPE_CHECKING:
    from xscheduler.schedule import Scheduler
    from xsimulator.capacity import CapacitySearch

SHARP = 0.005
"""Relative precision of the best plan's rate; another plan must exceed it by this share."""
COARSE = 0.03
"""Relative precision of the rate of a policy that is far behind."""
BEHIND = 0.7
"""A policy is far behind if its rate in closed form is below this share of the best simulated rate."""
MOST_TRIED = 3
"""Largest number of a policy's plans that are simulated, the best in closed form first."""
DOUBT = 0.06
"""Share by which the rate in closed form of a simulated plan may fall below the best one."""
DOUBT_NEARBY = 0.15
"""The same for plans of the best one's placement: the closed form may be off by as much, and they are few."""
LOOSER = 1.04
"""Factor by which a bound that no plan keeps is loosened, again and again until one does."""
MOST_LOOSENED = 60
BOUNDS = ("latency_bound_s", "ttft_s", "tpot_s")
STABLE = "the highest throughput that any schedule reaches, whatever its latency"


def rate_of(plan: Plan) -> float:
    """Return the arrival rate up to which a plan keeps its bounds, as simulated; without bounds, its throughput."""
    found = plan.estimate.capacity
    return plan.estimate.throughput_rps if found is None else found.rate_per_s


def maximised(plan: Plan) -> float:
    """Return the figure that the plan's own objective maximises, in requests a second."""
    return rate_of(plan) if plan.constraint.maximises_arrivals else plan.estimate.throughput_rps


def with_capacities(plans: dict[str, Plan], profile: Profile) -> dict[str, Plan]:
    """Return the plans with simulated capacities where they have none; the first also under slightly other bounds."""
    found = {}
    for i, (kind, plan) in enumerate(plans.items()):
        known = plan.estimate.capacity
        found[kind] = (
            plan if known is not None else with_capacity(plan, profile, predicted_rate(plan, profile), edges=not i)
        )
    return found


def predicted_rate(plan: Plan, profile: Profile) -> float | None:
    """Return the highest arrival rate of a plan in closed form; None where it has no bounds."""
    from xscheduler.arrival_rate import rate_of as closed_rate
    from xscheduler.placement import Placement
    from xscheduler.problem import Problem
    from xscheduler.schedule import Scheduler

    if not plan.constraint.bounds_latency:
        return None
    space = Scheduler(Problem.of(plan, profile)).space(plan.policy.kind, Placement.of(plan))
    return closed_rate(space, plan.policy, plan.constraint.less(plan.request_path_s))


def with_capacity(plan: Plan, profile: Profile, predicted: float | None = None, *, edges: bool = True) -> Plan:
    """Return the plan with its simulated capacity; unchanged if it has no bounds.

    Args:
        predicted: the closed form's rate.
        edges: also simulate bounds that are a little tighter and looser.
    """
    from xsimulator.capacity import capacity

    return _with(plan, capacity(plan, profile, predicted, edges=edges))


def best_by_arrivals(
    of: Scheduler,
    kinds: Iterable[str],
    *,
    finish: Callable[[Plan], Plan] = lambda plan: plan,
    only_best: bool = False,
    progress: Progress | None = None,
) -> dict[str, Plan]:
    """Return each policy's plan of the highest arrival rate, with that rate, the highest first.

    Args:
        progress: is called for each policy that is simulated.
        finish: completes a plan before it is simulated, by its order of admission.
        only_best: return only the best plan of all policies.

    Raises:
        InfeasibleError: no plan keeps the bounds at any rate, or at the requested one.
    """
    from xsimulator.forecast import choice_of

    started = time.perf_counter()
    candidates = {kind: of.by_arrivals(kind, MOST_TRIED) for kind in kinds}
    ranked = sorted((kind for kind in candidates if candidates[kind]), key=lambda kind: -candidates[kind][0][1])
    seconds = {kind: (time.perf_counter() - started) / len(ranked) for kind in ranked}
    found: dict[str, CapacitySearch] = {}
    best: CapacitySearch | None = None
    for i, kind in enumerate(ranked):
        started = time.perf_counter()
        if progress is not None:
            progress(i, len(ranked), simulating(kind))
        # A policy that is far behind gets a coarse rate; its plans are not compared with each other.
        hopeless = best is not None and candidates[kind][0][1] < BEHIND * best.rate
        plans = candidates[kind][: 1 if hopeless else MOST_TRIED]
        search = _best_of(plans, finish, of.problem.profile, best if only_best else None)
        if search is not None and hopeless:
            search.precision = COARSE
        if search is not None and search.rate > 0:
            found[kind] = search
            best = search if best is None or search.rate > best.rate else best
        seconds[kind] += time.perf_counter() - started
    if best is None:
        raise _never_kept(of, tuple(candidates))
    if progress is not None:
        progress(len(ranked), len(ranked), simulating("its neighbours"))
    started = time.perf_counter()
    near = [name for name in ranked if candidates[name][0][1] > BEHIND * best.rate]
    best = _best_rival(of, _best_neighbour(of, best, finish), near, finish)
    kind = choice_of(best.plan.policy, candidates)
    found[kind] = best
    capacities = {name: search.found(edges=search is best) for name, search in found.items()}
    seconds[kind] += time.perf_counter() - started
    asked = of.problem.constraint.arrival_rate_per_s
    if asked is not None and best.rate < asked:
        raise _rate_not_kept(of, tuple(candidates), best.rate)
    plans_found = {
        name: _certified(_with(found[name].plan, capacity), of.most_stable(name), seconds[name])
        for name, capacity in sorted(capacities.items(), key=lambda item: -item[1].rate_per_s)
        if (asked is None or capacity.rate_per_s >= asked) and (name == kind or not only_best)
    }
    return plans_found


def simulating(what: str) -> str:
    """Return a progress bar's text for a simulation."""
    from xsimulator.counts.counted_run import is_compiled

    once = "" if is_compiled() else " (the first simulations on a machine are compiled: some 15 s)"
    return f"simulating {what}{once}"


def _best_of(
    candidates: list[tuple[Plan, float]],
    finish: Callable[[Plan], Plan],
    profile: Profile,
    rival: CapacitySearch | None,
    doubt: float = DOUBT,
) -> CapacitySearch | None:
    """Return the candidate with the highest simulated rate, if that is above the rival's; else None."""
    from xsimulator.capacity import CapacitySearch

    best = rival
    for plan, predicted in candidates:
        if best is not None and predicted < (1 - doubt) * min(best.rate, best.predicted or best.rate):
            break
        search = CapacitySearch(finish(plan), profile, predicted)
        if best is None or not best.rate or search.keeps((1 + best.precision) * best.rate):
            best = search
    return None if best is rival else best


def _best_neighbour(of: Scheduler, best: CapacitySearch, finish: Callable[[Plan], Plan]) -> CapacitySearch:
    """Return the best plan, or a plan of other settings of its placement with a higher rate, from which on again."""
    tried = {repr(best.plan.policy)}
    while True:
        near = [(other, rate) for other, rate in of.neighbours(best.plan) if repr(other.policy) not in tried]
        tried.update(repr(other.policy) for other, _ in near)
        plans = [(other.model_copy(update={"search": best.plan.search}), rate) for other, rate in near]
        ranked = sorted(plans, key=lambda item: -item[1])
        found = _best_of(ranked, finish, of.problem.profile, best, DOUBT_NEARBY)
        if found is None:
            return best
        best = found


def _best_rival(
    of: Scheduler, best: CapacitySearch, kinds: list[str], finish: Callable[[Plan], Plan]
) -> CapacitySearch:
    """Return the best plan, or one of those with the highest saturated throughput if it has a higher rate."""
    best.precision = SHARP
    try:
        rivals = of.best_of_each(kinds)
    except InfeasibleError:
        return best
    ranked = [
        (plan.model_copy(update={"search": best.plan.search}), of.predicted_rate(plan)) for plan in rivals.values()
    ]
    found = _best_of(sorted(ranked, key=lambda item: -item[1]), finish, of.problem.profile, best) or best
    found.precision = SHARP
    return found


def _with(plan: Plan, capacity: Capacity | None) -> Plan:
    return plan.model_copy(update={"estimate": plan.estimate.model_copy(update={"capacity": capacity})})


def _rate_not_kept(of: Scheduler, kinds: tuple[str, ...], highest: float) -> InfeasibleError:
    cluster, rate = of.problem.cluster, of.problem.constraint.arrival_rate_per_s
    return InfeasibleError(
        f"arrival_rate_per_s: no schedule of {', '.join(kinds)} on {of.num_devices} of the {cluster.num_devices} "
        f"devices of {cluster.name} keeps the bounds with waiting at {rate:g} requests/s; the best one keeps them up "
        f"to {highest:.4g}: take more devices or a lower rate",
        nearest_bound_s=None,
        binding="arrival_rate_per_s",
    )


def _certified(plan: Plan, most: float, seconds: float) -> Plan:
    """Return the plan with the upper bound of its rate, which is the highest throughput of any schedule."""
    search = plan.search.model_copy(
        update={"gap": max(0.0, most / rate_of(plan) - 1), "bound": STABLE, "seconds": round(seconds, 4)}
    )
    return plan.model_copy(update={"search": search})


def _never_kept(of: Scheduler, kinds: tuple[str, ...]) -> InfeasibleError:
    """Return the error that no plan keeps the bounds at any rate, with the nearest bound that can be kept."""
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
