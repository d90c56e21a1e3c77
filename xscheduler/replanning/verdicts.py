"""Judge a running plan by closed forms or by simulation, depending on its objective."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.rates import rate_of
from xgpt.core.schema import Observation, Outcome, Plan, Profile
from xgpt.observation.windows import RATE_REQUESTS
from xscheduler.objectives.arrivals import Arrivals
from xscheduler.objectives.capacities import with_capacity
from xscheduler.objectives.ladder import request_latency, request_law, with_law
from xscheduler.objectives.reusing import promising
from xscheduler.problem import Problem
from xscheduler.replanning.decide import Verdict, decide
from xscheduler.replanning.judge import Judge, SaturatedJudge, Terms, replaced
from xscheduler.replanning.reestimate import reestimate
from xscheduler.replanning.situation import Situation
from xscheduler.schedule import Scheduler
from xsimulator.capacity import PRECISION
from xsimulator.costs.step_times import with_step_times
from xsimulator.run import check_fits

MOST_ROUNDS = 4
"""Largest number of searches, under ever tighter bounds, for one judgement."""
UNUSED = 0.02
"""If a plan breaks the bound in simulation, the next search's bound is tighter by a quarter of this share."""


def judged(
    plan: Plan, profile: Profile, observation: Observation, terms: Terms | None = None, slowdown: float | None = None
) -> Verdict:
    """Compare a running plan with the best one under the observed lengths, by the plan's objective.

    Args:
        slowdown: ratio of step times to those of the profile; None: the plan's slowdown.

    Raises:
        InputError: the profile is not that of the plan's devices.
    """
    terms, situation = terms or Terms(), Situation.of(plan, profile, observation, slowdown)
    if plan.constraint.maximises_arrivals:
        return with_known_rate(_judged_by_arrivals(situation, terms), observation.num_requests)
    if plan.constraint.maximise is not None:
        judge = SaturatedJudge(situation, terms)
        reason = f"the plan maximises {plan.constraint.maximise}, by which plans are not compared here: plan again"
        return Verdict(judge.running, judge.breaks, reason)
    if plan.constraint.sla == "length":
        return decide(SaturatedJudge(situation, terms), terms)
    return _judged_by_requests(situation, terms)


def _judged_by_arrivals(situation: Situation, terms: Terms) -> Verdict:
    """Compare plans by the rate that they keep; if requests break their bounds now, a small gain is worth a change."""
    if not situation.misses:
        return decide(ArrivalsJudge(situation, terms), terms)
    terms = replace(terms, least_gain=min(terms.least_gain, PRECISION))
    verdict = decide(ArrivalsJudge(situation, terms), terms)
    kept = (
        f"{situation.goodput:.1%} of recent requests kept their bounds, {situation.plan.constraint.quantile:g} should"
    )
    return replace(verdict, reason=f"{kept}: {verdict.reason}")


def with_known_rate(verdict: Verdict, num_requests: int) -> Verdict:
    """Return the verdict, or one that keeps the plan if the other serves less and the arrival rate is not yet known."""
    best, running = verdict.best, verdict.running
    if not verdict.switch or best is None or num_requests >= RATE_REQUESTS:
        return verdict
    if best.throughput_rps >= running.throughput_rps or not running.arrival_rate_per_s:
        return verdict
    less = f"the best plan serves {best.throughput_rps:.3g} requests/s at saturation, {running.throughput_rps:.3g} now"
    reason = f"{verdict.reason}; {num_requests} requests are too few to know the arrival rate, and {less}"
    return replace(verdict, switch=False, reason=reason)


def _ruled_alike(found: Plan, running: Plan, profile: Profile) -> Plan:
    """Return a candidate with the running plan's tuned settings and order of admission."""
    policy, order = found.policy, running.admission.order
    names = policy.tuned if policy.kind == running.policy.kind else ()
    more = {name: value for name in names if (value := getattr(running.policy, name)) is not None}
    if len(policy.lanes) > 1 and order == "in-time":
        order = "fcfs"
    changes = {
        "policy": policy.model_copy(update=more),
        "admission": found.admission.model_copy(update={"order": order}),
    }
    found = found.model_copy(update=changes)
    return with_step_times(found, profile) if more or order == "in-time" else found


def _judged_by_requests(situation: Situation, terms: Terms) -> Verdict:
    """For a bound on all requests, compare plans by simulating the running plan and the candidate.

    If the candidate breaks the bound, another one is searched under a tighter bound.
    """
    plan, profile, lengths = situation.plan, situation.profile, situation.lengths
    constraint, bound_s = plan.constraint, plan.constraint.latency_bound_s
    closed_s = reestimate(plan, profile, lengths, constraint.quantile)["latency"]
    ratio, others, reason = request_latency(plan, profile, lengths) / closed_s, 1.0, ""
    for _ in range(MOST_ROUNDS):
        verdict = decide(SaturatedJudge(situation, terms, ratio, others), terms)
        if verdict.plan is None or verdict.best is None:
            return replace(verdict, reason=reason or verdict.reason)
        if not verdict.switch:
            return verdict
        law = request_law(verdict.plan, profile)
        seen_s = law.quantile(constraint.planned_quantile)
        best = verdict.best.model_copy(update={"latency_s": law.quantile(constraint.quantile)})
        verdict = replace(verdict, plan=with_law(verdict.plan, law), best=best)
        if bound_s is None or (1 + constraint.headroom) * seen_s <= bound_s:
            return verdict
        reason = f"the best other plan takes {seen_s:.3g} s in simulation, and the bound is {bound_s:g} s"
        if not best.keeps_bound:
            break  # no plan keeps the bound, so none keeps a tighter one
        others *= (1 + constraint.headroom) * seen_s / bound_s * (1 + UNUSED / 4)
    return replace(verdict, switch=False, reason=reason)


@dataclass(frozen=True)
class ArrivalsJudge(Judge):
    """Compares plans by the highest arrival rate at which they keep the bounds, by simulation.

    The running plan breaks its bounds if requests arrive faster than that. Few observed requests are not a reason for
    caution here: times are those of all requests, waiting included, and depend on the mean length as much as on the
    longest. So a higher quantile of lengths would not show how wrong few requests may be.
    """

    situation: Situation
    terms: Terms

    @cached_property
    def running(self) -> Outcome:
        found = self._predicted
        return found.model_copy(update={"keeps_bound": False}) if self.situation.misses else found

    @cached_property
    def _predicted(self) -> Outcome:
        found = self._reestimated
        try:
            check_fits(found, found.workload)
        except InputError:  # the longest requests would never be admitted
            return Outcome(
                policy=found.policy,
                throughput_rps=found.estimate.throughput_rps,
                latency_s=0.0,
                keeps_bound=False,
                arrival_rate_per_s=0.0,
            )
        return self.outcome(with_capacity(found, self.situation.profile, edges=False))

    @cached_property
    def _reestimated(self) -> Plan:
        """The running plan with the observed lengths as its own."""
        plan, lengths = self.plan, self.situation.lengths
        found = reestimate(plan, self.situation.profile, lengths, plan.constraint.quantile)
        figures = {"throughput_rps": found["throughput"], "latency_s": found["latency"]}
        return plan.model_copy(update={"workload": lengths, "estimate": plan.estimate.model_copy(update=figures)})

    @property
    def breaks(self) -> bool:
        return self.running.keeps_bound is False

    @property
    def kept_rps(self) -> float:
        return self.rate(self.running)

    def rate(self, plan: Plan | Outcome) -> float:
        return plan.arrival_rate_per_s or 0.0 if isinstance(plan, Outcome) else rate_of(plan)

    def outcome(self, plan: Plan) -> Outcome:
        found, rate = plan.estimate.capacity, self.situation.arrival_rate_per_s
        assert found is not None
        return Outcome(
            policy=plan.policy,
            throughput_rps=plan.estimate.throughput_rps,
            latency_s=found.whole_s,
            keeps_bound=found.rate_per_s > 0 and (rate is None or rate <= found.rate_per_s),
            arrival_rate_per_s=found.rate_per_s,
        )

    def best(self, kinds: Sequence[str], *, in_place: bool) -> Plan:

        def saturated(problem: Problem) -> float:
            with suppress(InfeasibleError):
                return Scheduler(problem).best(kinds).estimate.throughput_rps
            return 0.0

        problems = promising(self.situation.problems(in_place=in_place), saturated)
        any_rate = self.plan.constraint.model_copy(update={"arrival_rate_per_s": None})

        def admitting(found: Plan) -> Plan:
            running = self.plan.admission.model_copy(update={"max_running": found.admission.max_running})
            return _ruled_alike(found.model_copy(update={"admission": running}), self.plan, self.situation.profile)

        found: list[Plan] = []
        error = None
        for problem in problems:
            search = Scheduler(replace(problem, constraint=any_rate))
            try:
                found += Arrivals(search, admitting, only_best=True).settle(kinds).values()
            except InfeasibleError as of_problem:
                error = error or of_problem
        if error is not None and not found:
            raise error
        return replaced(self.plan, max(found, key=rate_of), in_place=in_place)

    def near(self, nearest_bound_s: float) -> Judge | None:
        given_s, bound_s = self.plan.constraint.latency_bound_s, self.terms.near * nearest_bound_s
        if given_s is None or bound_s <= given_s:
            return None
        constraint = self.plan.constraint.model_copy(update={"latency_bound_s": bound_s})
        plan = self.plan.model_copy(update={"constraint": constraint})
        return replace(self, situation=replace(self.situation, plan=plan))
