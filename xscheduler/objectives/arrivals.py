"""Find the plans with the highest arrival rate within bounds: ranked in closed form, settled by simulation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from xgpt.core.errors import InfeasibleError
from xgpt.core.progress import Progress
from xgpt.core.schema import Capacity, Constraint, Plan, Profile, SearchCertificate
from xscheduler.arrival_rate import best_under_tighter, by_rate, closed_rate, one_step_from
from xscheduler.candidates import Candidates
from xscheduler.objectives.base import Objective, Ranked, simulating
from xscheduler.placement import Placement
from xscheduler.problem import Problem
from xscheduler.schedule import Scheduler
from xsimulator.capacity import CapacitySearch, capacity
from xsimulator.forecast import choice_of

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
    if not plan.constraint.bounds_latency:
        return None
    space = Candidates(Problem.of(plan, profile)).space(plan.policy.kind, Placement.of(plan))
    return closed_rate(space, plan.policy, plan.constraint.less(plan.request_path_s))


def with_capacity(plan: Plan, profile: Profile, predicted: float | None = None, *, edges: bool = True) -> Plan:
    """Return the plan with its simulated capacity; unchanged if it has no bounds.

    Args:
        predicted: the closed form's rate.
        edges: also simulate bounds that are a little tighter and looser.
    """
    return _with(plan, capacity(plan, profile, predicted, edges=edges))


class Arrivals(Objective):
    """The highest arrival rate at which the bounds are kept, waiting included.

    Args:
        only_best: return only the best plan of all policies.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        finish: Callable[[Plan], Plan] = lambda plan: plan,
        progress: Progress | None = None,
        *,
        only_best: bool = False,
    ) -> None:
        super().__init__(scheduler, finish, progress)
        self._only_best = only_best
        self._seconds: dict[str, float] = {}
        """Of the search of each policy's plan."""

    def rank(self, kinds: Sequence[str]) -> Ranked:
        started = time.perf_counter()
        ranked = {kind: self.of_kind(kind, MOST_TRIED) for kind in kinds}
        spent, searched = time.perf_counter() - started, [kind for kind in kinds if ranked[kind]]
        self._seconds = {kind: spent / len(searched) for kind in searched}
        return ranked

    def of_kind(self, kind: str, most: int) -> list[tuple[Plan, float]]:
        """Return one policy's plans of the highest rates in closed form, each with that rate, the highest first.

        Args:
            most: the number of plans, of as many placements.
        """
        started, candidates = time.perf_counter(), self.scheduler.candidates
        spaces = candidates.spaces(kind)
        rated = by_rate(spaces, self._in_loop(self.scheduler.problem.constraint))
        certificate = SearchCertificate(
            method="grid",
            evaluations=sum(space.evaluations for space in spaces),
            space_size=candidates.num_points(kind),
            seconds=round(time.perf_counter() - started, 4),
            gap=None,
            bound="none: the arrival rate of settings along curves, in closed form",
        )
        plans = [(self.scheduler.plan_at(one.space, one.settings, certificate), one.rate) for one in rated[:most]]
        return [(plan, rate) for plan, rate in plans if plan is not None]

    def verify(self, ranked: Ranked) -> dict[str, Plan]:
        order = sorted((kind for kind in ranked if ranked[kind]), key=lambda kind: -ranked[kind][0][1])
        found: dict[str, CapacitySearch] = {}
        best: CapacitySearch | None = None
        for i, kind in enumerate(order):
            started = time.perf_counter()
            self._say(i, len(order), kind)
            # A policy that is far behind gets a coarse rate; its plans are not compared with each other.
            hopeless = best is not None and ranked[kind][0][1] < BEHIND * best.rate
            plans = ranked[kind][: 1 if hopeless else MOST_TRIED]
            search = self._best_of(plans, best if self._only_best else None)
            if search is not None and hopeless:
                search.precision = COARSE
            if search is not None and search.rate > 0:
                found[kind] = search
                best = search if best is None or search.rate > best.rate else best
            self._seconds[kind] += time.perf_counter() - started
        if best is None:
            raise self._never_kept(tuple(ranked))
        self._say(len(order), len(order), "its neighbours")
        started = time.perf_counter()
        near = [name for name in order if ranked[name][0][1] > BEHIND * best.rate]
        best = self._best_rival(self._best_nearby(best), near)
        kind = choice_of(best.plan.policy, ranked)
        found[kind] = best
        capacities = {name: search.found(edges=search is best) for name, search in found.items()}
        self._seconds[kind] += time.perf_counter() - started
        asked = self.scheduler.problem.constraint.arrival_rate_per_s
        if asked is not None and best.rate < asked:
            raise self._rate_not_kept(tuple(ranked), best.rate)
        kept = {name: _with(found[name].plan, capacity) for name, capacity in capacities.items()}
        return {kind: kept[kind]} if self._only_best else kept

    def certify(self, plans: dict[str, Plan]) -> dict[str, Plan]:
        asked = self.scheduler.problem.constraint.arrival_rate_per_s or 0.0
        ordered = sorted(plans.items(), key=lambda item: -rate_of(item[1]))
        return {kind: self._certified(plan, kind) for kind, plan in ordered if rate_of(plan) >= asked}

    def _certified(self, plan: Plan, kind: str) -> Plan:
        """Return the plan with the upper bound of its rate, which is the highest throughput of any schedule."""
        constraint = self.scheduler.problem.constraint
        spaces = self.scheduler.candidates.spaces(kind, constraint.model_copy(update=dict.fromkeys(BOUNDS)))
        most = max((space.bound for space in spaces), default=0.0)
        gap, seconds = max(0.0, most / rate_of(plan) - 1), round(self._seconds[kind], 4)
        return plan.model_copy(
            update={"search": plan.search.model_copy(update={"gap": gap, "bound": STABLE, "seconds": seconds})}
        )

    def _say(self, done: int, parts: int, what: str) -> None:
        if self.progress is not None:
            self.progress(done, parts, simulating(what))

    def _in_loop(self, constraint: Constraint) -> Constraint:
        """Return what the engine's loop must keep of a constraint on requests that arrive."""
        engine, lengths = self.scheduler.problem.engine, self.scheduler.candidates.lengths
        return constraint if engine is None else constraint.less(engine.request_path_s(lengths.mean_whole_input))

    def _predicted(self, plan: Plan) -> float:
        """Return the arrival rate that the closed form gives a plan of the scheduler."""
        return closed_rate(self.scheduler.space_of(plan), plan.policy, self._in_loop(plan.constraint))

    def _best_of(
        self, candidates: list[tuple[Plan, float]], rival: CapacitySearch | None, doubt: float = DOUBT
    ) -> CapacitySearch | None:
        """Return the candidate with the highest simulated rate, if that is above the rival's; else None."""
        best = rival
        for plan, predicted in candidates:
            if best is not None and predicted < (1 - doubt) * min(best.rate, best.predicted or best.rate):
                break
            search = CapacitySearch(self.finish(plan), self.scheduler.problem.profile, predicted)
            if best is None or not best.rate or search.keeps((1 + best.precision) * best.rate):
                best = search
        return None if best is rival else best

    def _best_nearby(self, best: CapacitySearch) -> CapacitySearch:
        """Return the best plan, or the one that repeated steps to better settings of its placement lead to."""
        tried = {repr(best.plan.policy)}
        while True:
            near = [(other, rate) for other, rate in self._nearby(best.plan) if repr(other.policy) not in tried]
            tried.update(repr(other.policy) for other, _ in near)
            found = self._best_of(sorted(near, key=lambda item: -item[1]), best, DOUBT_NEARBY)
            if found is None:
                return best
            best = found

    def _nearby(self, plan: Plan) -> list[tuple[Plan, float]]:
        """Return plans for the same placement, each with its rate in closed form: those that differ in one variable by
        some, and the best under tighter bounds.
        """
        space, constraint = self.scheduler.space_of(plan), self._in_loop(plan.constraint)
        near = one_step_from(space, plan.policy)
        near += [one for one in best_under_tighter(space, constraint) if one not in (plan.policy, *near)]
        plans = [(settings, self.scheduler.plan_at(space, settings, plan.search)) for settings in near]
        return [(other, closed_rate(space, settings, constraint)) for settings, other in plans if other is not None]

    def _best_rival(self, best: CapacitySearch, kinds: Sequence[str]) -> CapacitySearch:
        """Return the best plan, or one of those with the highest saturated throughput if it has a higher rate."""
        best.precision = SHARP
        try:
            rivals = self.scheduler.best_of_each(kinds)
        except InfeasibleError:
            return best
        ranked = [
            (plan.model_copy(update={"search": best.plan.search}), self._predicted(plan)) for plan in rivals.values()
        ]
        found = self._best_of(sorted(ranked, key=lambda item: -item[1]), best) or best
        found.precision = SHARP
        return found

    def _rate_not_kept(self, kinds: tuple[str, ...], highest: float) -> InfeasibleError:
        problem = self.scheduler.problem
        return InfeasibleError(
            f"arrival_rate_per_s: no schedule of {', '.join(kinds)} on {self.scheduler.candidates.num_devices} of the "
            f"{problem.cluster.num_devices} devices of {problem.cluster.name} keeps the bounds with waiting at "
            f"{problem.constraint.arrival_rate_per_s:g} requests/s; the best one keeps them up to {highest:.4g}: take "
            "more devices or a lower rate",
            nearest_bound_s=None,
            binding="arrival_rate_per_s",
        )

    def _never_kept(self, kinds: tuple[str, ...]) -> InfeasibleError:
        """Return the error that no plan keeps the bounds at any rate, with the nearest bound that can be kept."""
        problem = self.scheduler.problem
        bounds = {name: bound for name in BOUNDS if (bound := getattr(problem.constraint, name)) is not None}
        name = next(iter(bounds))
        base = bounds[name]
        try:
            self.scheduler.best_of_each(kinds)
        except InfeasibleError as error:  # requests that do not wait keep it neither
            if error.binding != name or error.nearest_bound_s is None:
                return error
            base = max(base, error.nearest_bound_s)
        for looser in (float(f"{LOOSER**n * base:.4g}") for n in range(1, MOST_LOOSENED)):
            under = Arrivals(self.scheduler.under(problem.constraint.model_copy(update={name: looser})))
            if any(
                rate_of(with_capacity(plan, problem.profile, rate, edges=False)) > 0
                for kind in kinds
                for plan, rate in under.of_kind(kind, 1)
            ):
                return InfeasibleError(
                    f"{name}: no schedule of {', '.join(kinds)} keeps {bounds[name]:g} s with waiting counted on "
                    f"{problem.cluster.name}, at however low an arrival rate; the nearest bound that one keeps is "
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


def _with(plan: Plan, capacity: Capacity | None) -> Plan:
    return plan.model_copy(update={"estimate": plan.estimate.model_copy(update={"capacity": capacity})})
