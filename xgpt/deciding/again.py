"""Judge a running plan by a log as `xgpt compare` judges a deployment: by the same search, replay and rule."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

from xgpt.comparing.assumptions import ranges
from xgpt.core.errors import InfeasibleError
from xgpt.core.load import LogLoad
from xgpt.core.schema import Outcome, Plan, Profile
from xgpt.core.schema.plan import rate_of
from xgpt.deciding.load import CarriedLoad, carried
from xgpt.solving import plan_again
from xprofiler.analytic import as_searched
from xscheduler.found import Found
from xscheduler.objectives.capacities import predicted_rate
from xscheduler.placement import Placement
from xscheduler.problem import Problem
from xscheduler.replanning.decide import SWAPPABLE, Change, Verdict
from xscheduler.replanning.judge import ArrivalsJudge, Terms
from xscheduler.replanning.replanner import Replanned, concluded, observe_log, propose
from xscheduler.replanning.situation import Situation


def replan_for(
    plan: Plan, profile: Profile, log: LogLoad, terms: Terms, path: str = "plan.json", now_path: str | None = None
) -> Replanned:
    """Judge by a log whether another plan should run. A plan that maximises no arrival rate, or that cannot be
    replayed, is judged by the rate of the log's busiest window.

    Args:
        path, now_path: where the new plan will be written, and the judged one was read.
    """
    observation, load = observe_log(plan, log), carried(log, None)
    is_replayed = plan.constraint.maximises_arrivals and plan.workload.sessions is None
    if load is not None and is_replayed and load.kept(plan, profile) is not None:
        try:
            return _replayed(plan, profile, load, terms, path, now_path)
        except InfeasibleError:  # then plans for looser bounds are found
            pass
    decision, then = propose(plan, profile, observation, terms)
    return Replanned(plan, observation, decision, then or plan)


def _replayed(
    plan: Plan, profile: Profile, load: CarriedLoad, terms: Terms, path: str, now_path: str | None
) -> Replanned:
    assert load.log is not None
    started, slowdown = time.perf_counter(), plan.profile.slowdown
    observation = observe_log(plan, load.log)
    situation = Situation.of(plan, profile, observation, slowdown)
    planned = plan_again(plan, _problem(situation, load.log), load)
    problem, runs_at, first_per_s = planned.problem, profile.slowed(slowdown), None
    with suppress(InfeasibleError):  # as `xgpt compare` begins
        first_per_s = predicted_rate(situation.plan.but(workload=situation.lengths), runs_at)
    judge = ArrivalsJudge(situation, terms, first_per_s)
    now, best = judge.judged.proven(plan.ceiling), planned.best
    trace, kind = load.log.requests, next(iter(planned.plans))
    gains = ranges({kind: best}, problem.profile, now, runs_at, trace) if rate_of(now) > 0 else {}
    told = planned.recommend(
        now=now, now_profile=runs_at, gains=gains, path=path, now_path=now_path, least_gain=1 + terms.least_gain
    )
    assert told.now is not None and told.now.at_load is not None
    is_same = Placement.of(plan) == Placement.of(best) and plan.replicas == best.replicas
    in_place = is_same and {plan.policy.kind, best.policy.kind} <= set(SWAPPABLE)
    running = judge.running.but(keeps_bound=told.now.at_load.holds)
    first = told.rejected or told.best
    outcome = judge.outcome(best)
    verdict = Verdict(
        running,
        breaks_bound=not told.now.at_load.holds,
        reason=told.why or "the best plan keeps the bounds at a higher rate",
        best=outcome.but(keeps_bound=first.at_load is not None and first.at_load.holds),
        found=Found(best, best.ceiling),
        gain=_gain(running, outcome),
        change=Change.of(best, profile, plan, running, in_place=in_place),
        switch=told.action == "change",
    )
    decision, then = concluded(plan, observation, verdict, slowdown, started)
    runs = (now if then is None else best).told(told)
    return Replanned(plan, observation, decision.but(recommendation=told, plan_sha256=runs.digest), runs)


def _problem(situation: Situation, log: LogLoad) -> Problem:
    """Return the problem as `xgpt plan` poses it for the log. What xgpt's own engine serves keeps its devices."""
    plan, problem = situation.plan, situation.problem(in_place=False)
    profile = as_searched(problem.profile, plan.cluster)
    problem = replace(problem, profile=profile, workload=situation.lengths.but(name=log.name))
    if log.requests.prefixes is not None:
        problem = replace(problem, reused=None)
    if plan.cluster.is_local or plan.pinned.fixed or plan.engine is None or not plan.engine.runs_alone:
        return problem
    return replace(problem, max_devices=None, replicas=None)


def _gain(running: Outcome, best: Outcome) -> float:
    now, then = (outcome.arrival_rate_per_s or 0.0 for outcome in (running, best))
    return then / now - 1 if now else 1.0
