"""A running plan beside the best one by what it maximises: the arrival rate at which the bounds are kept.

All by simulation under the observed lengths, at the observed pace.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from xgpt.app.arrivals import best_by_arrivals, rate_of
from xgpt.errors import InfeasibleError
from xgpt.schema import Observation, Outcome, Plan, Profile, Workload

if TYPE_CHECKING:
    from collections.abc import Iterable

    from xscheduler.problem import Problem
    from xscheduler.regret import Terms, Verdict


def judged_by_arrivals(
    plan: Plan, profile: Profile, observation: Observation, terms: Terms | None, slowdown: float | None
) -> Verdict:
    """Compare the arrival rates that the running plan and the best one keep.

    The running plan breaks its bounds where requests arrive faster than it keeps them. A plan on the same stages takes
    over where it gains enough; one on others must also repay the pause.

    Raises:
        InputError: the profile is not that of the plan's devices.
    """
    from xscheduler.problem import Problem
    from xscheduler.regret import SWAPPABLE, Terms, Verdict, in_place, in_place_of
    from xscheduler.space import POLICIES
    from xscheduler.under import at_pace, within_context

    terms = terms or Terms()
    plan = at_pace(plan, slowdown)
    lengths = within_context(observation.workload, plan.model.max_context)
    running = _running(plan, profile, lengths, observation.arrival_rate_per_s)
    now = running.arrival_rate_per_s or 0.0
    problem = Problem(
        model=plan.model,
        checkpoint=plan.checkpoint,
        cluster=plan.cluster,
        workload=lengths,
        profile=profile.slowed(plan.profile.slowdown),
        constraint=plan.constraint.model_copy(update={"arrival_rate_per_s": None}),
        kv=plan.admission.kv,
        max_devices=plan.replicas * plan.devices_per_replica,
        replicas=plan.replicas,
    )
    swappable = SWAPPABLE if plan.policy.kind in SWAPPABLE else (plan.policy.kind,)
    swap = _best(in_place(problem, plan), swappable, plan)
    other = _best(problem, tuple(POLICIES), plan) if plan.devices_per_replica > 1 else None
    pause_s = running.latency_s + max(plan.estimate.memory_bytes) / terms.load_bytes_per_s
    here = max(now, 0.0 if swap is None else rate_of(swap))
    best, is_swap, paused_s = swap, True, 0.0
    if other is not None:
        gained = (rate_of(other) - here) * terms.horizon_s
        if gained > rate_of(other) * pause_s and rate_of(other) > (1 + terms.least_gain) * here:
            best, is_swap, paused_s = other, False, pause_s
    breaks = running.keeps_bound is False
    verdict = Verdict(
        running, None, None, False, breaks, 0.0, 0.0, False, "no plan keeps the bounds at any arrival rate"
    )
    if best is None:
        return verdict
    then = in_place_of(plan, best, in_place=is_swap)
    gain = rate_of(then) / now - 1 if now else 1.0
    switch = gain >= terms.least_gain and (then.policy != plan.policy or not is_swap)
    reason = f"the best plan keeps the bounds up to {rate_of(then):.3g} requests/s, the running one up to {now:.3g}"
    return replace(
        verdict,
        best=_outcome(then, observation.arrival_rate_per_s),
        plan=then,
        is_swap=is_swap,
        gain=gain,
        pause_s=paused_s,
        switch=switch,
        reason=reason,
    )


def _best(problem: Problem, kinds: Iterable[str], plan: Plan) -> Plan | None:
    from xscheduler.schedule import Scheduler

    def admitting(found: Plan) -> Plan:
        running = plan.admission.model_copy(update={"max_running": found.admission.max_running})
        return found.model_copy(update={"admission": running})

    try:
        return next(iter(best_by_arrivals(Scheduler(problem), kinds, finish=admitting, only_best=True).values()))
    except InfeasibleError:
        return None


def _running(plan: Plan, profile: Profile, lengths: Workload, rate: float | None) -> Outcome:
    """What the running plan does under other lengths, its resolved numbers kept."""
    from xgpt.app.simulating import check_fits
    from xgpt.errors import InputError
    from xscheduler.under import under
    from xsimulator.capacity import capacity

    found = under(plan, profile, lengths, plan.constraint.quantile)
    estimate = {"throughput_rps": found["throughput"], "latency_s": found["latency"]}
    asked = plan.model_copy(update={"workload": lengths, "estimate": plan.estimate.model_copy(update=estimate)})
    try:
        check_fits(asked, lengths)
    except InputError:  # the longest requests would never enter
        return Outcome(
            policy=plan.policy,
            throughput_rps=found["throughput"],
            latency_s=0.0,
            keeps_bound=False,
            arrival_rate_per_s=0.0,
        )
    capacity_now = capacity(asked, profile, edges=False)
    return _outcome(
        asked.model_copy(update={"estimate": asked.estimate.model_copy(update={"capacity": capacity_now})}), rate
    )


def _outcome(plan: Plan, rate: float | None) -> Outcome:
    found = plan.estimate.capacity
    assert found is not None
    return Outcome(
        policy=plan.policy,
        throughput_rps=plan.estimate.throughput_rps,
        latency_s=found.whole_s,
        keeps_bound=found.rate_per_s > 0 and (rate is None or rate <= found.rate_per_s),
        arrival_rate_per_s=found.rate_per_s,
    )
