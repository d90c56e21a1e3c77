"""Find the plans that keep the bounds at the highest arrival rate: rank them in closed form, then simulate the best."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import numpy as np

from xgpt.core.errors import InfeasibleError
from xgpt.core.progress import Progress
from xgpt.core.schema import Ceiling, Constraint, PlanDraft, PolicySettings, Profile, SearchEffort
from xgpt.core.schema.plan import rate_of
from xscheduler.arrival_rate import (
    MOST_PLACEMENTS,
    Rated,
    best_of,
    best_under_tighter,
    by_rate,
    closed_rate,
    far_from,
    one_step_from,
    sampled,
)
from xscheduler.found import Found
from xscheduler.objectives.base import TOGETHER, Objective, Ranked, simulating
from xscheduler.objectives.branches import BOUND, MOST_PREDICTIONS, Branches
from xscheduler.objectives.every_setting import ALL_SETTINGS, EverySetting
from xscheduler.objectives.nearest_bound import never_kept, rate_not_kept
from xscheduler.placement import Placement
from xscheduler.schedule import Scheduler
from xscheduler.space import Space, columns_of
from xscheduler.tolerances import TOLERANCES
from xsimulator.capacity import PRECISION, CapacitySearch, rates_of_draws
from xsimulator.forecast import choice_of

MOST_TRIED = 3
"""Largest number of plans to simulate for a policy. The best in closed form come first."""
MOST_SETTLED = 12
"""Largest number of further placements whose best plans are simulated."""
DRAWS = (1, 2)
"""Seeds for further draws of lengths and arrivals, from which the error of the best rate is estimated."""
DEVIATIONS = 2.0
"""Two simulated rates count as different if they differ by this number of standard deviations."""
CLOSED_FORMS = Ceiling(None, "none: arrival rates along load curves come from closed forms, without simulation")
MOST_MOVES = 40
ENDED_EARLY = f"the search ended after {MOST_PREDICTIONS:,} predictions; with more, the bound may be tighter"
SAMPLED = "none: sampled settings prove no bound"
NOT_PROVEN = "none: no proof was asked for"
UNBOUND = "none: a simulated rate exceeds its bound, since closed forms are wrong for these lengths"


class Arrivals(Objective[PlanDraft]):
    """The objective `arrivals`: the highest arrival rate at which the bounds are kept, waiting included."""

    def __init__(
        self,
        scheduler: Scheduler,
        finish: Callable[[PlanDraft], PlanDraft] = lambda plan: plan,
        progress: Progress | None = None,
        *,
        only_best: bool = False,
        explains: bool = True,
        proves: bool = True,
    ) -> None:
        super().__init__(scheduler, finish, progress)
        self._only_best, self._explains, self._proves = only_best, explains, proves
        self._seconds: dict[str, float] = {}
        self._rated: dict[Space, Rated | None] = {}
        self._finished: dict[tuple[object, ...], PlanDraft] = {}
        self._simulations, self._sampled, self._ended_early, self._has_tried_all = 0, False, False, False

    def rank(self, kinds: Sequence[str]) -> Ranked[PlanDraft]:
        started = time.perf_counter()
        self._branches = Branches(self.scheduler.candidates, kinds, self._in_loop, self.progress)
        ranked = {kind: self._ranked(self._branches.spaces(kind), kind, MOST_TRIED) for kind in kinds}
        spent, searched = time.perf_counter() - started, [kind for kind in kinds if ranked[kind]]
        self._seconds = {kind: spent / len(searched) for kind in searched}
        return ranked

    def of_kind(self, kind: str, most: int) -> list[tuple[PlanDraft, float]]:
        return self._ranked([self._in_engine(space) for space in self.scheduler.candidates.spaces(kind)], kind, most)

    def _ranked(self, spaces: list[Space], kind: str, most: int) -> list[tuple[PlanDraft, float]]:
        started = time.perf_counter()
        rated = by_rate(spaces, self._rated)
        effort = SearchEffort(
            method="grid",
            evaluations=sum(space.evaluations for space in spaces),
            space_size=self.scheduler.candidates.num_points(kind),
            seconds=round(time.perf_counter() - started, 4),
        )
        plans = [(self.scheduler.draft_at(one.space, one.settings, effort), one.rate) for one in rated[:most]]
        return [(plan, rate) for plan, rate in plans if plan is not None]

    def verify(self, ranked: Ranked[PlanDraft]) -> dict[str, PlanDraft]:
        order = sorted((kind for kind in ranked if ranked[kind]), key=lambda kind: -ranked[kind][0][1])
        found: dict[str, CapacitySearch] = {}
        best: CapacitySearch | None = None
        if order and self.progress is not None:
            self.progress(0, len(order), f"{order[0]} keeps {ranked[order[0]][0][1]:.3g} requests/s in closed form")
        for i, kind in enumerate(order):
            started = time.perf_counter()
            self._say(i, len(order), kind)
            # A policy that cannot win gets a coarse rate, and only its first plan is simulated.
            hopeless = best is not None and ranked[kind][0][1] < (1 - TOLERANCES.behind) * best.rate
            plans = ranked[kind][: 1 if hopeless else MOST_TRIED]
            search = self._best_of(plans, best if self._only_best else None)
            if search is not None and hopeless:
                search.precision = TOLERANCES.rate_of_others
            if search is not None and search.rate > 0:
                found[kind] = search
                best = search if best is None or search.rate > best.rate else best
            self._seconds[kind] += time.perf_counter() - started
        if best is None:
            raise self._never_kept(tuple(ranked))
        started = time.perf_counter()
        self._say(len(order), len(order), "neighbours of the best plan")
        near = [name for name in order if ranked[name][0][1] > (1 - TOLERANCES.behind) * best.rate]
        best = self._with_least_batch(self._settled(self._best_rival(self._best_nearby(best), near)))
        kind = choice_of(best.plan.policy, ranked)
        found[kind] = best
        found = {name: search for name, search in found.items() if search.lasting.rate > 0}
        if not found:  # queues that the short runs did not show
            raise self._never_kept(tuple(ranked))
        if kind not in found:
            kind, best = max(found.items(), key=lambda item: item[1].lasting.rate)
        rate, asked = best.lasting.rate, self.scheduler.problem.constraint.arrival_rate_per_s
        if asked is not None and rate < asked:
            raise rate_not_kept(self.scheduler, tuple(ranked), rate)
        if self._proves and not self._sampled:
            self._ended_early = not self._branches.tighten()
        capacities = {name: search.found(edges=search is best) for name, search in found.items()}
        if self._proves and not self._only_best:
            error = _error_of(best.plan, self.scheduler.problem.profile, rate)
            capacities[kind] = capacities[kind].but(error=error)
            if not self._sampled:
                every = EverySetting(self.scheduler, self._finish, best.plan, rate)
                self._has_tried_all = every.tighten(self._branches.all)
        self._seconds[kind] = self._seconds.get(kind, 0.0) + time.perf_counter() - started
        kept = {name: found[name].plan.with_estimate(capacity=capacity) for name, capacity in capacities.items()}
        return {kind: kept[kind]} if self._only_best else kept

    def certify(self, plans: dict[str, PlanDraft]) -> dict[str, Found]:
        asked = self.scheduler.problem.constraint.arrival_rate_per_s or 0.0
        ordered = dict(sorted(plans.items(), key=lambda item: -rate_of(item[1])))
        best = next(iter(ordered))
        spaces = {kind: self.scheduler.space_of(plan) for kind, plan in ordered.items()}
        breach = {
            kind: self._branches.breach(spaces[kind], plan, rate_of(plan), waits=kind == best) if self._proves else 0.0
            for kind, plan in ordered.items()
        }
        return {
            kind: Found(
                *self._certified(plan, kind, breach[kind], best=kind == best),
                _rival(ordered) if kind == best else None,
                beside=None if self._only_best else partial(self._beside, kind),
                shapes=None if self._only_best else partial(self._shapes, kind),
            )
            for kind, plan in ordered.items()
            if rate_of(plan) >= asked
        }

    def _beside(self, kind: str, plan: PlanDraft) -> PlanDraft | None:
        spaces = self._of_other_shapes(kind, plan, undivided=len(Placement.of(plan).degrees) > 1)
        return self._best_nearest(self._ranked(spaces, kind, MOST_TRIED))

    def _shapes(self, kind: str, plan: PlanDraft) -> list[PlanDraft]:
        of_degree: dict[tuple[int, ...], list[Space]] = {}
        for space in self._of_other_shapes(kind, plan, undivided=True):
            of_degree.setdefault(space.placement.degrees, []).append(space)
        each = (self._best_nearest(self._ranked(spaces, kind, 1)) for spaces in of_degree.values())
        return [draft for draft in each if draft is not None]

    def _of_other_shapes(self, kind: str, plan: PlanDraft, *, undivided: bool) -> list[Space]:
        own = Placement.of(plan).degrees
        return [
            self._in_engine(space)
            for space in self.scheduler.candidates.spaces(kind)
            if space.placement.degrees != own and (len(space.placement.degrees) == 1 or not undivided)
        ]

    def _best_nearest(self, ranked: list[tuple[PlanDraft, float]]) -> PlanDraft | None:
        best = self._best_of(ranked, None)
        if best is None or not best.rate:
            return None
        best = self._best_nearby(best)
        best.precision = TOLERANCES.rate
        best = self._best_afar(best)
        best.precision = TOLERANCES.rate
        found = best.found(edges=False)
        return best.plan.with_estimate(capacity=found) if found.rate_per_s else None

    def _certified(self, plan: PlanDraft, kind: str, breach: float, *, best: bool) -> tuple[PlanDraft, Ceiling]:
        branches = [branch for branch in self._branches.all if best or branch.kind == kind]
        effort = SearchEffort(
            method="optuna" if self._sampled else "branch-and-bound",
            evaluations=sum(branch.evaluations for branch in branches),
            space_size=sum(branch.space.num_points for branch in branches),
            simulations=self._simulations if best else plan.search.simulations,
            seconds=round(self._seconds[kind], 4),
        )
        ended = f"; {ENDED_EARLY}" if self._ended_early else ""
        if self._sampled or not self._proves:
            ceiling = Ceiling(None, SAMPLED if self._sampled else NOT_PROVEN)
        elif "throughput_rps" in plan.estimate.simulated:
            ceiling = Ceiling(None, TOGETHER)
        elif breach > TOLERANCES.noise:
            ceiling = Ceiling(None, UNBOUND)
        else:
            most = self._branches.most(rate_of(plan), None if best else kind)
            tried = ALL_SETTINGS if self._has_tried_all else ""
            ceiling = Ceiling((1 + breach) * most, BOUND + tried + self._space_in_words(plan) + ended)
        return plan.but(search=effort), ceiling

    def _space_in_words(self, plan: PlanDraft) -> str:
        constraint, limits = self.scheduler.problem.constraint, []
        if constraint.ttft_s is not None and plan.admission.order == "fcfs":
            limits.append("requests are admitted in order of arrival")
        if constraint.tpot_s is not None:
            limits.append("token budgets do not follow slack")
        return f"; in the searched space, {' and '.join(limits)}" if limits else ""

    def _say(self, done: int, parts: int, what: str) -> None:
        if self.progress is not None:
            self.progress(done, parts, simulating(what))

    @cached_property
    def _in_loop(self) -> Constraint:
        """The constraint, with its bounds reduced by the time that a request spends outside the engine's loop."""
        constraint, engine = self.scheduler.problem.constraint, self.scheduler.problem.engine
        prompt = self.scheduler.candidates.lengths.mean_whole_input
        return constraint if engine is None else constraint.less(engine.request_path_s(prompt))

    def _in_engine(self, space: Space) -> Space:
        return space if space.constraint == self._in_loop else space.under(self._in_loop, space.bound)

    def _finish(self, plan: PlanDraft) -> PlanDraft:
        key = plan.policy, plan.stages, plan.replicas
        if key not in self._finished:
            self._finished[key] = self.finish(plan)
        return self._finished[key].but(search=plan.search)

    def _best_of(
        self,
        candidates: Sequence[tuple[PlanDraft, float]],
        rival: CapacitySearch | None,
        doubt: float = TOLERANCES.doubt,
    ) -> CapacitySearch | None:
        best = rival
        for plan, predicted in candidates:
            if best is not None and predicted < (1 - doubt) * min(best.rate, best.predicted or best.rate):
                break
            search = CapacitySearch(self._finish(plan), self.scheduler.problem.profile, predicted)
            self._simulations += 1
            if best is None or not best.rate or search.keeps((1 + best.precision) * best.rate):
                best = search
        return None if best is rival else best

    def _best_nearby(self, best: CapacitySearch) -> CapacitySearch:
        tried = {best.plan.policy}
        for _ in range(MOST_MOVES):
            near = [(other, rate) for other, rate in self._nearby(best.plan) if other.policy not in tried]
            tried.update(other.policy for other, _ in near)
            found = self._best_of(sorted(near, key=lambda item: -item[1]), best, TOLERANCES.doubt_nearby)
            if found is None:
                break
            best = found
        return best

    def _best_afar(self, best: CapacitySearch) -> CapacitySearch:
        """No proof shows what a search along the axes may have missed, where the closed form errs most."""
        space = self._in_engine(self.scheduler.space_of(best.plan))
        far = self._rated_in(space, far_from(space, best.plan.policy), best.plan)
        return self._best_of(sorted(far, key=lambda item: -item[1]), best, TOLERANCES.doubt_nearby) or best

    def _nearby(self, plan: PlanDraft) -> list[tuple[PlanDraft, float]]:
        space = self._in_engine(self.scheduler.space_of(plan))
        near = one_step_from(space, plan.policy)
        near += [one for one in best_under_tighter(space) if one not in (plan.policy, *near)]
        return self._rated_in(space, near, plan)

    def _rated_in(self, space: Space, each: Sequence[PolicySettings], plan: PlanDraft) -> list[tuple[PlanDraft, float]]:
        plans = [(settings, self.scheduler.draft_at(space, settings, plan.search)) for settings in each]
        return [(other, closed_rate(space, settings)) for settings, other in plans if other is not None]

    def _best_rival(self, best: CapacitySearch, kinds: Sequence[str]) -> CapacitySearch:
        best.precision = TOLERANCES.rate
        try:
            rivals = self.scheduler.found(kinds)
        except InfeasibleError:
            return best
        ranked = []
        for plan in (found.draft for found in rivals.values()):
            rate = closed_rate(self._in_engine(self.scheduler.space_of(plan)), plan.policy)
            ranked.append((plan.but(search=best.plan.search), rate))
        found = self._best_of(sorted(ranked, key=lambda item: -item[1]), best) or best
        found.precision = TOLERANCES.rate
        return found

    def _settled(self, best: CapacitySearch) -> CapacitySearch:
        space = self.scheduler.space_of(best.plan)
        if best.plan.admission.order == "fcfs":
            self._branches.count_waits()
        if self.scheduler.method == "optuna" or self._branches.breach(space, best.plan, best.rate) > TOLERANCES.noise:
            return self._sampled_by_optuna(best)
        settled, self._branches.best_rate = 0, best.rate
        for branch in self._branches.open():
            if settled == MOST_SETTLED:
                break
            if branch.space not in self._rated:
                self._rated[branch.space] = best_of(branch.space)
            one = self._rated[branch.space]
            plan = None if one is None else self.scheduler.draft_at(branch.space, one.settings, best.plan.search)
            doubt = TOLERANCES.doubt_nearby if branch.space.placement.num_groups > 1 else TOLERANCES.doubt
            if one is None or plan is None or one.rate < (1 - doubt) * min(best.rate, best.predicted or best.rate):
                continue
            settled += 1
            self._say(settled, MOST_SETTLED, "a placement that may keep a higher rate")
            better = self._best_of([(plan, one.rate)], best, doubt)
            if better is not None:
                better.precision = TOLERANCES.rate
                best = self._best_nearby(better)
                best.precision = TOLERANCES.rate
                self._branches.best_rate = best.rate
        return best

    def _with_least_batch(self, best: CapacitySearch) -> CapacitySearch:
        """If the time per token is bounded, return the plan with nearly the smallest batch that sustains the same rate.

        If more requests arrive, all steps become full. Full steps keep the bound on the time per token only if batches
        are small.
        """
        plan, rate = best.plan, best.rate
        space = self.scheduler.space_of(plan)
        load = space.forecast.load
        values = next(axis.values for axis in space.axes if axis.variable.name == load)
        values = values[values < getattr(plan.policy, load)]
        smaller = {name: np.repeat(column, len(values)) for name, column in columns_of(plan.policy).items()}
        smaller[load] = values
        sizes = [*values.tolist(), getattr(plan.policy, load)]
        high = len(sizes) - 1
        if self._in_loop.tpot_s is None or not high:
            return best
        serves = space.evaluate(smaller).throughput > rate
        low = int(serves.argmax()) if serves.any() else high
        while sizes[high] > (1 + TOLERANCES.batch) * sizes[low]:
            middle = (low + high) // 2
            other = self.scheduler.draft_at(space, space.settings(smaller, middle), plan.search)
            search = (
                None if other is None else CapacitySearch(self._finish(other), self.scheduler.problem.profile, rate)
            )
            self._simulations += 1
            if search is None or not search.keeps(rate):
                low = middle + 1
            else:
                search.precision = best.precision
                search.predicted = closed_rate(self._in_engine(space), search.plan.policy)
                best, high = search, middle
        return best

    def _sampled_by_optuna(self, best: CapacitySearch) -> CapacitySearch:
        self._sampled = True
        ordered = sorted((branch.space for branch in self._branches.all), key=lambda space: -space.bound)
        proposed = sampled(ordered[:MOST_PLACEMENTS])
        plans = [(self.scheduler.draft_at(one.space, one.settings, best.plan.search), one.rate) for one in proposed]
        found = (
            self._best_of([(plan, rate) for plan, rate in plans if plan is not None], best, TOLERANCES.doubt_nearby)
            or best
        )
        found.precision = TOLERANCES.rate
        return found

    def _never_kept(self, kinds: tuple[str, ...]) -> InfeasibleError:
        if not self._explains:
            return InfeasibleError("no plan keeps the bounds", binding="ttft_s")
        engine = self.scheduler.problem.engine
        own = [kind for kind in kinds if engine is not None and engine.runs(kind)] or kinds

        def keeps(constraint: Constraint) -> bool:
            if not constraint.bounds_latency:
                return True
            under = Arrivals(self.scheduler.under(constraint), self.finish)
            plans = (pair for kind in own for pair in under.of_kind(kind, MOST_TRIED))
            profile = self.scheduler.problem.profile
            ranked = sorted(plans, key=lambda pair: -pair[1])
            searches = (CapacitySearch(self.finish(plan), profile, rate) for plan, rate in ranked)
            return any(search.rate > 0 and search.lasting.rate > 0 for search in searches) and is_found(under)

        def is_found(under: Arrivals) -> bool:  # the plan that keeps them is searched, too
            whole = Arrivals(under.scheduler, self.finish, only_best=True, explains=False, proves=False)
            try:
                return bool(whole.settle(own))
            except InfeasibleError:
                return False

        return never_kept(self.scheduler, kinds, keeps, self.progress)


def _error_of(plan: PlanDraft, profile: Profile, rate: float) -> float:
    rates = [rate, *rates_of_draws(plan, profile, rate, DRAWS, PRECISION / 2)]
    return round(float(np.std(rates, ddof=1) / rate), 4)


def _rival(ordered: dict[str, PlanDraft]) -> str | None:
    plan, *others = ordered.values()
    found = plan.estimate.capacity
    noise = DEVIATIONS * (0.0 if found is None else found.error or 0.0)
    # If waa-c and waa-m divide devices in the same way, their plans are one plan.
    other = next((one for one in others if (one.policy.kind, one.division) != (plan.policy.kind, plan.division)), None)
    if other is None or rate_of(other) < (1 - noise) * rate_of(plan):
        return None
    return f"{other.policy.kind} keeps the bounds up to {rate_of(other):.4g} requests/s"
