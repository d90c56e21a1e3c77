"""Compare plans for the observed lengths by the running plan's objective, in closed form or by simulation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from pydantic import ValidationError

from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.schema import Admission, Outcome, PlanDraft, Profile
from xgpt.core.schema.plan import rate_of
from xscheduler.found import Found
from xscheduler.objectives.best_plans import best_of_each
from xscheduler.objectives.capacities import with_capacity
from xscheduler.objectives.reusing import promising
from xscheduler.problem import Problem
from xscheduler.replanning.situation import Situation, reestimate
from xscheduler.schedule import Scheduler
from xsimulator.costs.step_times import with_step_times
from xsimulator.run import check_fits


@dataclass(frozen=True)
class Terms:
    """The thresholds for a change of plan.

    Attributes:
        least_gain: share by which another plan's throughput (or arrival rate) must exceed the running plan's.
        confidence: number of standard deviations by which the observed quantile of lengths is lowered. The bound counts
            as broken only if the plan also breaks it at the lowered quantile, since high quantiles of few requests are
            mostly chance.
        caution: pairs (standard deviations, share of throughput). A plan that keeps the bound at a quantile raised by
            the deviations may lose this share of throughput if the running plan does not keep it.
        near: if no plan keeps the bound, the running plan stays as long as it keeps this multiple of the nearest bound
            that a plan can keep.
        horizon_s: a change of placement must repay its pause within this time.
    """

    least_gain: float = 0.05
    confidence: float = 2.0
    caution: tuple[tuple[float, float], ...] = ((2.0, 0.05), (1.0, 0.15))
    near: float = 1.1
    horizon_s: float = 600.0


class Judge(ABC):
    situation: Situation
    terms: Terms

    @property
    def plan(self) -> PlanDraft:
        return self.situation.plan

    @property
    @abstractmethod
    def running(self) -> Outcome:
        """The running plan's figures for the observed lengths."""

    @property
    @abstractmethod
    def breaks(self) -> bool:
        """Whether the running plan breaks its bounds."""

    @property
    @abstractmethod
    def kept_rps(self) -> float:
        """Requests/s that the running plan serves within its bounds."""

    @abstractmethod
    def rate(self, plan: PlanDraft | Outcome) -> float:
        """Return the objective's value, in requests/s, of a candidate or of `running`."""

    @abstractmethod
    def outcome(self, plan: PlanDraft) -> Outcome:
        """Return a candidate's figures."""

    @abstractmethod
    def best(self, kinds: Sequence[str], *, in_place: bool) -> Found:
        """Return the best plan of some policies, in a form that can replace the running plan."""

    def careful(self, kinds: Sequence[str], plan: PlanDraft, rate_rps: float) -> Found | None:
        """If `plan` breaks the bounds at a higher quantile of lengths, return a plan on the same stages that keeps
        them.

        Returns:
            The plan, or None if `plan` keeps the bounds, if no plan keeps them at a small loss, or if the bounds do not
            depend on lengths.
        """
        return None

    def near(self, nearest_bound_s: float) -> Judge | None:
        """Return the judge under a bound that is slightly looser than the nearest bound that a plan can keep.

        Return None if the running plan keeps this looser bound or has no latency bound.
        """
        return None


def _plans_of(
    problems: Sequence[Problem], planned: Callable[[Problem], Iterable[Found]], unbuilt: list[str]
) -> list[Found]:
    found, error = list[Found](), None
    for problem in problems:
        try:
            found += planned(problem)
        except InfeasibleError as of_problem:
            error = error or of_problem
        except ValidationError as of_plan:
            wrong = of_plan.errors()[0]
            unbuilt.append(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}")
            error = error or InfeasibleError(f"a candidate cannot be built: {unbuilt[-1]}", binding="plan")
    if error is not None and not found:
        raise error
    return found


@dataclass(frozen=True)
class SaturatedJudge(Judge):
    """Compares plans by throughput at saturation, in closed form.

    Attributes:
        ratio, ratio_of_others: factors for the running plan and for candidates. The closed form's latency of a request
            of the quantile's length is multiplied by the factor before it is compared with the bound.
    """

    situation: Situation
    terms: Terms
    ratio: float = 1.0
    ratio_of_others: float = 1.0

    @cached_property
    def running(self) -> Outcome:
        figures = self._at(self.plan, self.plan.constraint.quantile)
        return Outcome(
            policy=self.plan.policy,
            throughput_rps=figures["throughput"],
            latency_s=figures["latency"],
            keeps_bound=None if self._bound_s is None else not self.breaks,
        )

    @cached_property
    def breaks(self) -> bool:
        return not self._keeps(self.plan, self.situation.quantile(-self.terms.confidence))

    @property
    def kept_rps(self) -> float:
        return 0.0 if self.breaks else self.running.throughput_rps

    @property
    def _bound_s(self) -> float | None:
        return self.plan.constraint.latency_bound_s

    def rate(self, plan: PlanDraft | Outcome) -> float:
        return plan.throughput_rps if isinstance(plan, Outcome) else plan.estimate.throughput_rps

    def outcome(self, plan: PlanDraft) -> Outcome:
        return Outcome(
            policy=plan.policy,
            throughput_rps=plan.estimate.throughput_rps,
            latency_s=plan.estimate.latency_s,
            keeps_bound=None if self._bound_s is None else True,
        )

    def best(self, kinds: Sequence[str], *, in_place: bool) -> Found:
        return self._best(kinds, self.plan.constraint.quantile, in_place=in_place)

    def careful(self, kinds: Sequence[str], plan: PlanDraft, rate_rps: float) -> Found | None:
        safe_quantile = self.plan.constraint.quantile
        for deviations, price in self.terms.caution:
            quantile = self.situation.quantile(deviations)
            if self._keeps(plan, quantile):
                return None
            try:
                best = self._best(kinds, quantile, in_place=True)
            except InfeasibleError:
                continue
            if best.draft.estimate.throughput_rps >= (1 - price) * rate_rps:
                return best.estimating(latency_s=self._at(best.draft, safe_quantile)["latency"])
        return None

    def near(self, nearest_bound_s: float) -> Judge | None:
        bound_s = self.terms.near * self.ratio_of_others * nearest_bound_s
        if not self.breaks or self._bound_s is None or not self._bound_s < bound_s < self.running.latency_s:
            return None
        return replace(self, situation=self.situation.under(bound_s))

    def _keeps(self, plan: PlanDraft, quantile: float) -> bool:
        return self._bound_s is None or self._at(plan, quantile)["latency"] <= self._bound_s

    def _best(self, kinds: Sequence[str], quantile: float, *, in_place: bool) -> Found:
        problems = self.situation.problems(in_place=in_place)
        bound_s = None if self._bound_s is None else self._bound_s / self.ratio_of_others
        constraint = self.plan.constraint.but(quantile=quantile, latency_bound_s=bound_s)
        problems = [replace(problem, constraint=constraint) for problem in problems]
        found = _plans_of(
            problems,
            lambda problem: best_of_each(Scheduler(problem), kinds, is_closed=True).values(),
            self.situation.unbuilt,
        )
        best = replaced(self.plan, max(found, key=lambda one: self.rate(one.draft)), in_place=in_place)
        return best.estimating(latency_s=self.ratio_of_others * best.draft.estimate.latency_s)

    def _at(self, plan: PlanDraft, quantile: float) -> dict[str, float]:
        ratio = self.ratio if plan is self.plan else self.ratio_of_others
        return reestimate(plan, self.situation.profile, self.situation.lengths, quantile, ratio)


@dataclass(frozen=True)
class ArrivalsJudge(Judge):
    """Compares plans by the highest arrival rate at which they keep the bounds, by simulation.

    The running plan breaks its bounds if requests arrive at more than its highest rate. `careful` is not needed even if
    few requests were observed. The times include waiting, so they depend on the mean length as much as on the longest.
    So a higher quantile of lengths would not show how uncertain the times are.

    Attributes:
        first_per_s: the rate with which the search for the running plan's rate begins, on which its last digit depends.
    """

    situation: Situation
    terms: Terms
    first_per_s: float | None = None

    @cached_property
    def running(self) -> Outcome:
        found = self._predicted
        return found.but(keeps_bound=False) if self.situation.misses else found

    @cached_property
    def judged(self) -> PlanDraft:
        """The running plan with its figures for the observed lengths."""
        if self.situation.is_as_planned and self.plan.estimate.capacity is not None:
            return self.plan
        return with_capacity(self._reestimated, self.situation.profile, self.first_per_s, edges=False)

    @cached_property
    def _predicted(self) -> Outcome:
        if self.situation.is_as_planned and self.plan.estimate.capacity is not None:
            return self.outcome(self.plan)
        found = self._reestimated
        try:
            check_fits(found, found.workload)
        except InputError:  # the longest requests would wait forever
            return Outcome(
                policy=found.policy,
                throughput_rps=found.estimate.throughput_rps,
                latency_s=0.0,
                keeps_bound=False,
                arrival_rate_per_s=0.0,
            )
        return self.outcome(self.judged)

    @cached_property
    def _reestimated(self) -> PlanDraft:
        plan, lengths = self.plan, self.situation.lengths
        found = reestimate(plan, self.situation.profile, lengths, plan.constraint.quantile)
        observed = plan.but(workload=lengths)
        return observed.with_estimate(throughput_rps=found["throughput"], latency_s=found["latency"])

    @property
    def breaks(self) -> bool:
        return self.running.keeps_bound is False

    @property
    def kept_rps(self) -> float:
        return self.rate(self.running)

    def rate(self, plan: PlanDraft | Outcome) -> float:
        return plan.arrival_rate_per_s or 0.0 if isinstance(plan, Outcome) else rate_of(plan)

    def outcome(self, plan: PlanDraft) -> Outcome:
        found, rate = plan.estimate.capacity, self.situation.arrival_rate_per_s
        assert found is not None
        return Outcome(
            policy=plan.policy,
            throughput_rps=plan.estimate.throughput_rps,
            latency_s=found.whole_s,
            keeps_bound=found.rate_per_s > 0 and (rate is None or rate <= found.rate_per_s),
            arrival_rate_per_s=found.rate_per_s,
        )

    def best(self, kinds: Sequence[str], *, in_place: bool) -> Found:

        def saturated(problem: Problem) -> float:
            with suppress(InfeasibleError):
                best = next(iter(best_of_each(Scheduler(problem), kinds, is_closed=True).values()))
                return best.draft.estimate.throughput_rps
            return 0.0

        problems = promising(self.situation.problems(in_place=in_place), saturated)
        any_rate = self.plan.constraint.but(arrival_rate_per_s=None)

        def admitting(found: PlanDraft) -> PlanDraft:
            return _ruled_alike(found, self.plan, self.situation.profile)

        def planned(problem: Problem) -> Iterable[Found]:
            by = Scheduler(problem.under(any_rate))
            return best_of_each(by, kinds, admitting, only_best=True).values()

        found = _plans_of(problems, planned, self.situation.unbuilt)
        return replaced(self.plan, max(found, key=lambda one: rate_of(one.draft)), in_place=in_place)

    def near(self, nearest_bound_s: float) -> Judge | None:
        given_s, bound_s = self.plan.constraint.latency_bound_s, self.terms.near * nearest_bound_s
        if given_s is None or bound_s <= given_s:
            return None
        return replace(self, situation=self.situation.under(bound_s))


def _ruled_alike(found: PlanDraft, running: PlanDraft, profile: Profile) -> PlanDraft:
    policy, admission = found.policy, _ordered_alike(found.admission, running.admission)
    names = policy.tuned if policy.kind == running.policy.kind else ()
    more = {name: value for name in names if (value := getattr(running.policy, name)) is not None}
    if len(policy.lanes) > 1 and admission.order == "in-time":
        admission = admission.but(order="fcfs")
    found = found.but(policy=policy.but(**more), admission=admission)
    return with_step_times(found, profile) if more or admission.order == "in-time" else found


def _ordered_alike(admission: Admission, running: Admission) -> Admission:
    return admission.but(order=running.order, row_tokens=running.row_tokens, eta=running.eta)


def replaced(plan: PlanDraft, found: Found, *, in_place: bool) -> Found:
    """Return another plan in a form that can replace the running plan.

    On the same stages, the allocation of K/V memory does not change. The memory beside it suffices for the activations
    of the old plan's largest step. The engine runs steps in slices of bounded size. If the new plan's largest step
    needs one slice more, the workspace has enough memory for it.
    """
    best = found.draft
    draft = plan.but(
        workload=best.workload,
        policy=best.policy,
        admission=best.admission
        if plan.admission.order == "in-time"
        else _ordered_alike(best.admission, plan.admission),
        stages=plan.stages if in_place else best.stages,
        replicas=plan.replicas if in_place else best.replicas,
        estimate=best.estimate,
        search=best.search,
    )
    return replace(found, draft=draft)
