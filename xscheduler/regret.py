"""What a running plan loses under other lengths than it was made for, and whether to change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

from xgpt.errors import InfeasibleError
from xgpt.schema import Constraint, Outcome, Plan, Profile, Workload
from xscheduler.placement import Placement
from xscheduler.problem import Problem
from xscheduler.schedule import Scheduler
from xscheduler.space import POLICIES
from xscheduler.under import at_pace, under, within_context

SWAPPABLE = ("rra", "chunked", "orca")
"""Policies among which an engine goes over between two steps; a static batch must end first, and waa's lanes empty."""


@dataclass(frozen=True)
class Terms:
    """When a change is worth while.

    Attributes:
        least_gain: share of the running plan's throughput that another must gain.
        confidence: standard deviations within which the quantile of the observed lengths may lie: the highest
            quantiles of few requests are mostly chance. The bound counts as broken where even the lowest breaks it.
        caution: (standard deviations, share of throughput): so much is given for a plan that keeps the bound even if
            the quantile lies so much higher, where the running one would not. The likelier that is, the more.
        near: latency, over the nearest that anything keeps, up to which the running plan stays where nothing keeps the
            bound.
        horizon_s: time in which a change of placement must repay its pause.
        load_bytes_per_s: rate at which weights and K/V memory are set up again, from host memory.
    """

    least_gain: float = 0.05
    confidence: float = 2.0
    caution: tuple[tuple[float, float], ...] = ((2.0, 0.05), (1.0, 0.15))
    near: float = 1.1
    horizon_s: float = 600.0
    load_bytes_per_s: float = 2e9


@dataclass(frozen=True)
class Verdict:
    """The running plan beside the best one.

    Attributes:
        plan: the best plan, ready to be run in place of the running one; None: none keeps the bound.
        is_swap: whether it goes into effect between two steps.
        breaks_bound: whether the running plan breaks the bound for certain.
        pause_s: how long the change would hold requests up.
        switch: whether to change.
        reason: why, or why not.
    """

    running: Outcome
    best: Outcome | None
    plan: Plan | None
    is_swap: bool
    breaks_bound: bool
    gain: float
    pause_s: float
    switch: bool
    reason: str


def judge(
    plan: Plan,
    profile: Profile,
    observed: Workload,
    weight: float,
    terms: Terms | None = None,
    *,
    slowdown: float | None = None,
    ratio: float = 1.0,
    ratio_of_others: float = 1.0,
) -> Verdict:
    """Compare the running plan with the best one under the observed lengths, at the observed pace.

    Args:
        profile: as it was measured, whatever the plan's slowdown.
        weight: requests that the observed lengths were learnt from.
        slowdown: how many times as long as the profile says steps last; None: as many as the plan rests on.
        ratio, ratio_of_others: the latency that the bound is for, over the closed form's for a request of the
            quantile's length: of the running plan, and of plans that may take over.

    Raises:
        InputError: the profile is not that of the plan's devices.
    """
    terms = terms or Terms()
    plan = at_pace(plan, slowdown)
    workload = within_context(observed, plan.model.max_context)
    bound = plan.constraint.latency_bound_s
    now = under(plan, profile, workload, plan.constraint.quantile, ratio)
    # The quantile that the observed lengths exceed for certain.
    q = plan.constraint.quantile
    deviation = sqrt(q * (1 - q) / weight)
    certain = max(0.5, q - terms.confidence * deviation)
    breaks = bound is not None and under(plan, profile, workload, certain, ratio)["latency"] > bound
    running = Outcome(
        policy=plan.policy,
        throughput_rps=now["throughput"],
        latency_s=now["latency"],
        keeps_bound=None if bound is None else not breaks,
    )

    def verdict(best: Plan | None, *, is_swap: bool, gain: float, pause_s: float, switch: bool, reason: str) -> Verdict:
        outcome = (
            None
            if best is None
            else Outcome(
                policy=best.policy,
                throughput_rps=best.estimate.throughput_rps,
                latency_s=best.estimate.latency_s,
                keeps_bound=None if bound is None else True,
            )
        )
        return Verdict(running, outcome, best, is_swap, breaks, gain, pause_s, switch, reason)

    # The server's workers and replicas are what there is.
    problem = Problem(
        model=plan.model,
        checkpoint=plan.checkpoint,
        cluster=plan.cluster,
        workload=workload,
        profile=profile.slowed(plan.profile.slowdown),
        constraint=plan.constraint,
        kv=plan.admission.kv,
        max_devices=plan.replicas * plan.devices_per_replica,
        replicas=plan.replicas,
    )
    kinds = tuple(POLICIES) if plan.devices_per_replica > 1 else (*SWAPPABLE, "static")
    try:
        found = _best_of_each(problem, kinds, ratio_of_others)
    except InfeasibleError as error:
        if breaks and bound is not None and error.nearest_bound_s is not None:
            goal_s = terms.near * ratio_of_others * error.nearest_bound_s
            if bound < goal_s < now["latency"]:
                relaxed = plan.constraint.model_copy(update={"latency_bound_s": goal_s})
                near = judge(
                    plan.model_copy(update={"constraint": relaxed}),
                    profile,
                    observed,
                    weight,
                    terms,
                    ratio=ratio,
                    ratio_of_others=ratio_of_others,
                )
                if near.plan is not None:  # else something besides the latency binds, too
                    return _although_broken(near, near.plan, plan.constraint)
        return verdict(None, is_swap=False, gain=0.0, pause_s=0.0, switch=False, reason=str(error))
    others = [in_place_of(plan, best, in_place=False) for best in found.values()]
    other = max(others, key=_throughput)
    swap = _best_swap(plan, problem, found, ratio_of_others)
    pause_s = (now["latency"] + max(plan.estimate.memory_bytes) / terms.load_bytes_per_s) if now["latency"] else 0.0
    lost = other.estimate.throughput_rps * pause_s

    # A placement must beat what a swap would do, too, and bring back within the horizon what its pause costs.
    in_place = max(now["throughput"] * (not breaks), swap.estimate.throughput_rps if swap else 0.0)
    repaid = (other.estimate.throughput_rps - in_place) * terms.horizon_s
    if repaid > lost and other.estimate.throughput_rps > (1 + terms.least_gain) * in_place:
        best, is_swap = other, False
    elif swap is not None:
        best, is_swap, pause_s = swap, True, 0.0
    else:
        gain = other.estimate.throughput_rps / now["throughput"] - 1
        reason = f"the pause of {pause_s:.1f} s is not repaid within {terms.horizon_s:g} s"
        return verdict(other, is_swap=False, gain=gain, pause_s=pause_s, switch=False, reason=reason)

    gain = best.estimate.throughput_rps / now["throughput"] - 1
    if breaks:
        switch, reason = True, f"the running plan takes {now['latency']:.3g} s, the bound is {bound:g} s"
    elif gain >= terms.least_gain:
        switch, reason = True, f"the best plan gains {100 * gain:.1f}% of throughput"
    else:
        switch, reason = (
            False,
            f"the best plan gains {100 * gain:.1f}% of throughput, under {100 * terms.least_gain:g}%",
        )
    if is_swap and plan.policy.kind in SWAPPABLE:
        of, its = (best, ratio_of_others) if switch else (plan, ratio)
        careful = _careful(of, profile, problem, deviation, terms.caution, its, ratio_of_others)
        if careful is not None:
            best, gain = careful, careful.estimate.throughput_rps / now["throughput"] - 1
            if not switch:
                switch, reason = True, "further requests may show a broken bound, and caution costs little"
    if switch and best.policy == plan.policy and is_swap and not _differs(plan, best):
        switch, reason = False, "the best plan is the running one"
    return verdict(best, is_swap=is_swap, gain=gain, pause_s=pause_s, switch=switch, reason=reason)


def _although_broken(near: Verdict, plan: Plan, constraint: Constraint) -> Verdict:
    """What was found under a bound that can be kept, for a plan whose own can not; that stays its aim."""
    bound, best = constraint.latency_bound_s, near.best
    assert best is not None
    return replace(
        near,
        running=near.running.model_copy(update={"keeps_bound": False}),
        best=best.model_copy(update={"keeps_bound": False}),
        plan=plan.model_copy(update={"constraint": constraint}),
        breaks_bound=True,
        reason=f"nothing keeps the bound of {bound:g} s; {best.latency_s:.3g} s are near to what can be kept",
    )


def _careful(
    plan: Plan,
    profile: Profile,
    problem: Problem,
    deviation: float,
    caution: Sequence[tuple[float, float]],
    ratio: float,
    ratio_of_others: float,
) -> Plan | None:
    """A plan to swap to that keeps the bound even if the lengths' quantile lies higher, where this one does not.

    Args:
        deviation: standard deviation of the observed quantile.
        caution: see `Terms`.
        ratio, ratio_of_others: as for `judge`, of this plan and of others.

    Returns:
        None: the plan will do, or nothing cheap does better.
    """
    constraint, workload = plan.constraint, problem.workload
    if constraint.latency_bound_s is None:
        return None
    now_rps = under(plan, profile, workload, constraint.quantile)["throughput"]
    for deviations, price in caution:
        quantile = min(constraint.quantile + deviations * deviation, 1 - 1e-9)
        if under(plan, profile, workload, quantile, ratio)["latency"] <= constraint.latency_bound_s:
            return None
        harder = replace(in_place(problem, plan), constraint=constraint.model_copy(update={"quantile": quantile}))
        try:
            found = _best_of_each(harder, SWAPPABLE, ratio_of_others)
        except InfeasibleError:
            continue
        best = in_place_of(plan, max(found.values(), key=_throughput), in_place=True)
        if best.estimate.throughput_rps >= (1 - price) * now_rps:
            return _with_latency(best, under(best, profile, workload, constraint.quantile, ratio_of_others)["latency"])
    return None


def _best_swap(plan: Plan, problem: Problem, found: dict[str, Plan], ratio_of_others: float) -> Plan | None:
    """The best that the running plan's stages and micro-batches can do; None: nothing on them keeps the bound.

    Args:
        found: the best plans of all placements: on one device there is no other.
    """
    kinds = SWAPPABLE if plan.policy.kind in SWAPPABLE else (plan.policy.kind,)
    if plan.devices_per_replica > 1:
        try:
            found = _best_of_each(in_place(problem, plan), kinds, ratio_of_others)
        except InfeasibleError:
            return None
    swaps = [in_place_of(plan, found[kind], in_place=True) for kind in kinds if kind in found]
    return max(swaps, key=_throughput, default=None)


def _best_of_each(problem: Problem, kinds: Sequence[str], ratio: float) -> dict[str, Plan]:
    """The best plan of each policy whose latency in closed form, times the ratio, keeps the bound.

    Raises:
        InfeasibleError: none does.
    """
    bound = problem.constraint.latency_bound_s
    if bound is not None:
        constraint = problem.constraint.model_copy(update={"latency_bound_s": bound / ratio})
        problem = replace(problem, constraint=constraint)
    found = Scheduler(problem).best_of_each(kinds)
    return {kind: _with_latency(plan, ratio * plan.estimate.latency_s) for kind, plan in found.items()}


def _with_latency(plan: Plan, latency_s: float) -> Plan:
    return plan.model_copy(update={"estimate": plan.estimate.model_copy(update={"latency_s": latency_s})})


def in_place(problem: Problem, plan: Plan) -> Problem:
    """The problem on the running plan's stages alone: on one device there are no others."""
    return problem if plan.devices_per_replica == 1 else replace(problem, placement=Placement.of(plan))


def _throughput(plan: Plan) -> float:
    return plan.estimate.throughput_rps


def _differs(plan: Plan, other: Plan) -> bool:
    """Whether what the rule takes from the estimate is another number."""
    return abs(plan.estimate.encode_tokens / other.estimate.encode_tokens - 1) > 0.02


def in_place_of(plan: Plan, best: Plan, *, in_place: bool) -> Plan:
    """The running plan with what was found put in its place.

    In place, K/V memory stays as it was set up. A plan's blocks leave room for the activations of its own largest
    step, at most a slice's: what a swap may take beyond is that much, out of the workspace.
    """
    return plan.model_copy(
        update={
            "workload": best.workload,
            "policy": best.policy,
            "admission": plan.admission.model_copy(update={"max_running": best.admission.max_running}),
            "stages": plan.stages if in_place else best.stages,
            "estimate": best.estimate,
            "search": best.search,
        }
    )
