"""Judge a running plan by a replay of a log, as `xgpt compare` judges a deployment, on the plan's own devices."""

from __future__ import annotations

from xgpt.core.load import LogLoad
from xgpt.core.schema import Observation, Plan, Profile, Proposal
from xgpt.deciding.load import at_load, carried
from xscheduler.replanning.decide import ReplayedLog
from xscheduler.replanning.judge import Terms
from xscheduler.replanning.replanner import observe_log, propose


def replan_for(plan: Plan, profile: Profile, log: LogLoad, terms: Terms) -> tuple[Observation, Proposal]:
    """Return what a log shows, and whether another plan on the same devices should run.

    A plan that keeps the bounds of the whole log and in each window stays. If a plan maximises no arrival rate, or the
    log cannot be replayed, the rate of the busiest window decides.
    """
    observation, load, constraint = observe_log(plan, log), carried(log, None), plan.constraint
    is_replayed = constraint.maximises_arrivals and constraint.bounds_latency and plan.workload.sessions is None
    seen = at_load(plan, profile, load) if load is not None and is_replayed else None
    if seen is None or seen.share_kept is None:
        return observation, propose(plan, profile, observation, terms)
    shares, worst = f"{100 * seen.share_kept:.4g}% of {seen.num_requests:,} requests within the bounds", seen.share_kept
    if seen.worst_share_kept is not None:
        worst = min(worst, seen.worst_share_kept)
        shares += f", {100 * seen.worst_share_kept:.4g}% in the worst window ({seen.worst_window})"
    replayed = ReplayedLog(seen.holds, shares)
    found = propose(plan, profile, observation if seen.holds else observation.but(goodput=worst), terms, replayed)
    return observation, found
