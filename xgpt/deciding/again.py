"""Judge a running plan by a replay of a log, as `xgpt compare` judges a deployment, on the plan's own devices."""

from __future__ import annotations

import time
from dataclasses import replace

from xgpt.core.load import LogLoad
from xgpt.core.schema import Plan, Profile
from xgpt.core.schema.recommendation import AtLoad
from xgpt.deciding.load import at_load, carried
from xgpt.deciding.recommend import by_replay
from xgpt.deciding.words import kept_in_words
from xscheduler.replanning.decide import ReplayedLog, Verdict, judged
from xscheduler.replanning.judge import Terms
from xscheduler.replanning.replanner import Replanned, concluded, observe_log, propose


def replan_for(plan: Plan, profile: Profile, log: LogLoad, terms: Terms) -> Replanned:
    """Judge by a log whether another plan on the same devices should run.

    A plan that keeps the bounds of the whole log and in each window stays. So does one that keeps them for clearly more
    requests than the best other plan, if neither holds the log. If a plan maximises no arrival rate, or the log cannot
    be replayed, the rate of the busiest window decides.
    """
    observation, load, constraint = observe_log(plan, log), carried(log, None), plan.constraint
    is_replayed = constraint.maximises_arrivals and constraint.bounds_latency and plan.workload.sessions is None
    seen = at_load(plan, profile, load) if load is not None and is_replayed else None
    if load is None or seen is None or seen.share_kept is None:
        decision, then = propose(plan, profile, observation, terms)
        return Replanned(plan, observation, decision, then or plan)
    worst = seen.share_kept if seen.worst_share_kept is None else min(seen.share_kept, seen.worst_share_kept)
    started, slowdown = time.perf_counter(), plan.profile.slowdown
    under = observation if seen.holds else observation.but(goodput=worst)
    verdict = judged(plan, profile, under, terms, slowdown, ReplayedLog(seen.holds, kept_in_words(seen)))
    if verdict.plan is not None:
        verdict = _replayed(verdict, at_load(verdict.plan, profile, load), seen)
    decision, then = concluded(plan, observation, verdict, slowdown, started)
    return Replanned(plan, observation, decision, then or plan, seen)


def _replayed(verdict: Verdict, then: AtLoad, now: AtLoad) -> Verdict:
    """Let a replay of the best plan, too, overrule what was decided by rates."""
    found = None if then.holds else by_replay(then, now)
    if found is not None and found[0] == "keep":
        return replace(verdict, switch=False, reason=found[1])
    if not (kept := kept_in_words(then)):  # its arrivals cannot be counted
        return verdict
    reason = f"{verdict.reason}; replayed, the best plan keeps them for {kept}"
    return replace(verdict, switch=verdict.switch or then.holds or found is not None, reason=reason)
