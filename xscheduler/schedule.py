"""Search the candidates of a problem in closed form, and make plans from the best points."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from xgpt.core.errors import InfeasibleError
from xgpt.core.schema import Ceiling, Constraint, Plan, PlanDraft, PolicySettings, Profile, SearchEffort, SearchMethod
from xgpt.core.schema.profile import MOST_HEADROOM
from xgpt.observation.paces import usual
from xscheduler.box_bounds import SLACK
from xscheduler.candidates import Candidates
from xscheduler.expression import objective_value
from xscheduler.found import Found
from xscheduler.placement import Placement
from xscheduler.plan_builder import draft_of
from xscheduler.problem import Problem
from xscheduler.search import SEARCHES
from xscheduler.search.branch_and_bound import upper_bound
from xscheduler.space import POLICIES, Space, columns_of
from xscheduler.why_not import infeasible

NOT_SEARCHED = Ceiling(None, "none: nothing was searched")


class Scheduler:
    def __init__(self, problem: Problem, method: SearchMethod = "branch-and-bound") -> None:
        self.candidates = Candidates(problem)
        has_own = problem.constraint.maximise is not None  # no bound is known for a user's own objective
        self.method: SearchMethod = "optuna" if has_own and method == "branch-and-bound" else method
        self._found: dict[tuple[PolicySettings, int, int, int], Space] = {}

    @property
    def problem(self) -> Problem:
        return self.candidates.problem

    def under(self, constraint: Constraint) -> Scheduler:
        other = copy(self)
        other.candidates, other._found = self.candidates.under(constraint), {}
        return other

    def found(self, kinds: Sequence[str]) -> dict[str, Found]:
        """Return each policy's schedule with the highest throughput at saturation in closed form, for the policies that
        have one.
        """
        plans: dict[str, Found] = {}
        for kind in kinds:
            started = time.perf_counter()
            spaces = self.candidates.spaces(kind)
            if not spaces:
                continue
            found = SEARCHES[self.method](spaces)
            seconds = time.perf_counter() - started
            if found.settings is not None and found.space is not None:
                effort = SearchEffort(
                    method=found.method,
                    evaluations=found.evaluations,
                    space_size=self.candidates.num_points(kind),
                    seconds=round(seconds, 4),
                )
                draft = self._draft(found.space, found.settings, found.values, effort)
                plans[kind] = Found(draft, found.ceiling)
        if not plans:
            raise infeasible(self.candidates, kinds)
        return plans

    def ceiling_of(self, found: Found, kind: str, beyond: float = 1.0, slower: float = 1.0) -> Ceiling:
        """Return a ceiling that also covers settings that keep memory full, for which requests wait. The search leaves
        them out, since closed forms do not predict them well.

        Args:
            beyond, slower: factors by which simulations may exceed the throughputs of closed forms, and fall below
                their latencies.
        """
        most = found.ceiling.most
        if most is None:
            return found.ceiling
        rate = max(most, found.draft.estimate.throughput_rps)
        loose = self.candidates.under(self.problem.constraint.looser(slower * (1 + SLACK)))
        bound = upper_bound(loose.spaces(kind, between=True), rate)
        return found.ceiling._replace(most=beyond * bound.throughput)

    def best(self, kinds: Sequence[str] = tuple(POLICIES)) -> Plan:
        return max(self.found(kinds).values(), key=lambda found: objective_value(found.draft)).plan

    def score(self, settings: PolicySettings, placement: Placement, *, admits_by_use: bool = False) -> Plan:
        """Return the plan of given settings, whether or not they keep the constraint."""
        space = self.candidates.space(settings.kind, placement)
        columns = columns_of(settings)
        if not admits_by_use:
            columns = {name: values.astype(int) for name, values in space.running(columns).items()}
        evaluation = space.evaluate(columns)
        if not evaluation.fits[0] and not admits_by_use:
            raise InfeasibleError(
                f"memory: these settings run {evaluation.performance.peak_requests[0]:.0f} requests at the same time, "
                f"but the K/V memory holds only {space.capacity:.0f}: lower the batch size",
                binding="memory",
            )
        given = SearchEffort(method="given", evaluations=1, space_size=1, seconds=0.0)
        return self._draft(space, settings, evaluation.at(0), given).proven(NOT_SEARCHED)

    def draft_at(self, space: Space, settings: PolicySettings, effort: SearchEffort) -> PlanDraft | None:
        evaluation = space.evaluate(columns_of(settings))
        return self._draft(space, settings, evaluation.at(0), effort) if evaluation.fits[0] else None

    def space_of(self, plan: PlanDraft) -> Space:
        return self._found[_key(plan)]

    def _draft(
        self, space: Space, settings: PolicySettings, values: dict[str, float], effort: SearchEffort
    ) -> PlanDraft:
        draft = draft_of(self.problem, space, values, settings, effort)
        self._found[_key(draft)] = space
        return draft


def _key(plan: PlanDraft) -> tuple[PolicySettings, int, int, int]:
    return plan.policy, plan.replicas, len(plan.stages), plan.prefill_groups


def headroom_of(constraint: Constraint, profile: Profile) -> float:
    """Return the headroom with which to plan: the constraint's headroom if it states one, else the profile's
    headroom.
    """
    if "headroom" in constraint.model_fields_set:
        return constraint.headroom
    if not profile.is_served:
        return profile.headroom
    return round(max(profile.headroom, min(usual(profile.device, profile.engine)[1] - 1, MOST_HEADROOM)), 4)


def scheduler(problem: Problem, search: SearchMethod = "branch-and-bound") -> Scheduler:
    """Return a scheduler for the problem. If the constraint states no headroom, the profile's headroom is used."""
    headroom = headroom_of(problem.constraint, problem.profile)
    constraint = problem.constraint.but(headroom=headroom)
    return Scheduler(replace(problem, constraint=constraint), search)
