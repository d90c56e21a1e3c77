"""Decide whether to change a running plan: weigh the gain of another plan against the cost of the change."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from xgpt.core.errors import InfeasibleError
from xgpt.core.schema import Constraint, Outcome, Plan, Profile
from xscheduler.placement import Placement
from xscheduler.replanning.judge import Judge, Terms
from xscheduler.replanning.replacements import SWAPPABLE, find_candidates, within_pins
from xsimulator.memory import LaneMemory

LOAD_BYTES_PER_S = {"cpu": 5e8, "gpu": 4e9}
"""Bytes of weights that a device loads a second if its profile does not state this rate: the slowest rate measured on a
CPU (docs/results/devices.md), and the slowest in ExeGPT's Table 4.
"""

WIDER = (1.0, 1.5, 2.0, 4.0)
"""If no plan keeps the bound, these multiples of the nearest bound are tried until a plan keeps one at the observed
rate."""

SAME = 0.02
"""Two plans count as the same if their prompt tokens in a phase differ by at most this share."""


@dataclass(frozen=True)
class Verdict:
    """The running plan compared with the best one.

    Attributes:
        breaks_bound: whether the running plan certainly breaks its bounds.
        plan: the best plan, in a form that can replace the running one; None if no plan keeps the bounds.
        is_swap: whether the plan takes effect between two steps, without a pause.
        gain: the best plan's gain in the objective, as a share of the running plan's value.
        pause_s: seconds for which the change would delay requests.
        switch: whether to change to `plan`.
        reason: the reason for changing, or for not changing.
    """

    running: Outcome
    breaks_bound: bool
    reason: str
    best: Outcome | None = None
    plan: Plan | None = None
    is_swap: bool = False
    gain: float = 0.0
    pause_s: float = 0.0
    switch: bool = False


def decide(judge: Judge, terms: Terms) -> Verdict:
    """Compare the running plan with the best one.

    A plan on the same stages takes over if it gains enough, or if the running plan breaks its bound. A plan on another
    placement must also repay the pause. If no plan keeps the bound, one that nearly keeps it takes over, unless the
    running plan keeps the bound at some arrival rate, since the search may miss plans that keep it in simulation.

    Raises:
        InputError: the profile is not that of the plan's devices.
    """
    try:
        verdict = _decide_feasible(judge, terms)
        return _sustaining(judge, verdict, terms) or verdict
    except InfeasibleError as error:
        reason, nearest_s = str(error), error.nearest_bound_s if error.binding == "latency_bound_s" else None
    if nearest_s is not None and judge.running.arrival_rate_per_s:
        kept = f"the running one keeps it up to {judge.running.arrival_rate_per_s:.3g} requests/s"
        reason = f"no other plan keeps the bound of {_bound(judge.plan.constraint)}; {kept}"
        return Verdict(judge.running, judge.breaks, reason)
    found = None
    for bound_s in () if nearest_s is None else [factor * nearest_s for factor in WIDER]:
        near = judge.near(bound_s)
        if near is None:
            break
        with suppress(InfeasibleError):  # another bound binds, too
            found = _although_broken(verdict := _decide_feasible(near, terms), judge.plan.constraint)
            if verdict.best is None or verdict.best.keeps_bound is not False:
                break
    return found or Verdict(judge.running, judge.breaks, reason)


def _sustaining(judge: Judge, verdict: Verdict, terms: Terms) -> Verdict | None:
    """Return a verdict that serves the observed arrival rate, if the given one would not; None if that does.

    Beyond the rate at saturation, queues grow without limit, and no request keeps its bounds. A plan that keeps wider
    bounds at the rate, or else serves more requests, is then better than one that keeps the bounds at a lower rate.
    """
    arriving = judge.situation.arrival_rate_per_s
    if arriving is None or not judge.plan.constraint.maximises_arrivals or verdict.best is None:
        return None
    served_rps = (verdict.best if verdict.switch else judge.running).throughput_rps
    if served_rps >= arriving:
        return None
    given_s, found = judge.plan.constraint.latency_bound_s, None
    for bound_s in () if given_s is None else [factor * given_s for factor in WIDER[1:]]:
        near = judge.near(bound_s)
        if near is None:
            break
        with suppress(InfeasibleError):  # another bound binds, too
            wide = _decide_feasible(near, terms)
            assert wide.best is not None
            if (wide.best if wide.switch else judge.running).throughput_rps <= served_rps:
                continue
            reason = f"{arriving:.3g} requests/s arrive, for which no plan keeps the bound of {given_s:g} s"
            reason = f"{reason}; with {terms.near * bound_s:.3g} s, {wide.reason}"
            found = replace(_although_broken(wide, judge.plan.constraint), reason=reason)
            if wide.best.keeps_bound:
                break
    if found is None and verdict.switch and served_rps < judge.running.throughput_rps:
        reason = (
            f"{arriving:.3g} requests/s arrive, and the best plan serves {served_rps:.3g}: the running one serves more"
        )
        return replace(verdict, switch=False, reason=reason)
    return found


def _decide_feasible(judge: Judge, terms: Terms) -> Verdict:
    """Return the verdict if a plan keeps the bounds.

    Raises:
        InfeasibleError: no plan keeps the bounds.
    """
    anywhere, swap = find_candidates(judge)
    pause_s = judge.running.latency_s + loading_s(anywhere, judge.situation.profile, judge.plan)
    in_place_rps = max(judge.kept_rps, 0.0 if swap is None else judge.rate(swap))
    if _repays(judge.rate(anywhere), in_place_rps, pause_s, terms):
        verdict = _compare(judge, anywhere, terms, pause_s=pause_s, is_swap=False)
    elif swap is None:
        verdict = _compare(judge, anywhere, terms, pause_s=pause_s, is_swap=False)
        reason = f"the pause of {pause_s:.1f} s is not repaid within {terms.horizon_s:g} s"
        return replace(verdict, switch=False, reason=reason)
    else:
        verdict = _compare(judge, swap, terms, pause_s=0.0, is_swap=True)
        if judge.plan.policy.kind in SWAPPABLE:
            verdict = _with_caution(judge, verdict)
    if verdict.switch and verdict.is_swap and verdict.plan is not None and _is_same(judge.plan, verdict.plan):
        return replace(verdict, switch=False, reason="the best plan is the running one")
    return verdict


def loading_s(plan: Plan, profile: Profile, running: Plan) -> float:
    """Return the seconds that a change of placement takes to load weights. They are 0 if the same number of single
    devices keep their weights.
    """
    keeps = plan.devices_per_replica == running.devices_per_replica == 1 and plan.replicas == running.replicas
    return 0.0 if keeps else weights_loading_s(plan, profile)


def weights_loading_s(plan: Plan, profile: Profile) -> float:
    """Return the seconds that the devices take to load a plan's weights from a checkpoint in host memory.

    Source: ExeGPT sec. 7.7, Table 4.
    """
    rate = profile.load_bytes_per_s or LOAD_BYTES_PER_S[plan.cluster.device.type]
    lanes = [layout.lane for layout in Placement.of(plan).layouts]
    memories = [
        LaneMemory(plan.model, plan.cluster, plan.precision, lane, plan.block_size, speculation=plan.speculation)
        for lane in lanes
    ]
    return max(float(memory.weight_bytes.max()) for memory in memories) / rate


def _repays(rate: float, in_place_rps: float, pause_s: float, terms: Terms) -> bool:
    """Return whether a plan on another placement beats the best on the present one and repays its pause."""
    repaid = (rate - in_place_rps) * terms.horizon_s
    return repaid > rate * pause_s and rate > (1 + terms.least_gain) * in_place_rps


def _compare(judge: Judge, best: Plan, terms: Terms, *, pause_s: float, is_swap: bool) -> Verdict:
    """Return the verdict on a plan: its gain, and whether the gain is large enough."""
    running, outcome, gain = judge.running, judge.outcome(best), _gain(judge, best)
    switch = not judge.kept_rps or gain >= terms.least_gain
    if outcome.arrival_rate_per_s is not None:
        rates = f"{outcome.arrival_rate_per_s:.3g} requests/s, the running one up to {running.arrival_rate_per_s:.3g}"
        arriving = judge.situation.arrival_rate_per_s
        reason = f"the best plan keeps the bounds up to {rates}" + (
            "" if arriving is None else f"; {arriving:.3g} arrive"
        )
    elif judge.breaks:
        reason = f"the running plan takes {running.latency_s:.3g} s, the bound is {_bound(judge.plan.constraint)}"
    else:
        reason = f"the best plan gains {100 * gain:.1f}% of throughput"
        reason += "" if switch else f", under {100 * terms.least_gain:g}%"
    return Verdict(running, judge.breaks, reason, outcome, best, is_swap, gain, pause_s, switch)


def _with_caution(judge: Judge, verdict: Verdict) -> Verdict:
    """Return the verdict with a plan that would also keep the bound for longer requests, if such a plan costs
    little.
    """
    plan, running = (verdict.plan, verdict.plan) if verdict.switch else (judge.plan, judge.running)
    assert plan is not None and running is not None
    best = judge.careful(within_pins(judge.plan, SWAPPABLE), plan, judge.rate(running))
    if best is None:
        return verdict
    cautious = replace(verdict, plan=best, best=judge.outcome(best), gain=_gain(judge, best))
    if verdict.switch:
        return cautious
    reason = "a few more requests may show that the bound is broken, and the careful plan costs little"
    return replace(cautious, switch=True, reason=reason)


def _although_broken(near: Verdict, constraint: Constraint) -> Verdict:
    """Return the verdict under a feasible bound, expressed for the plan's own bound, which cannot be kept but remains
    the aim.
    """
    assert near.best is not None and near.plan is not None
    seconds = f"{near.best.latency_s:.3g} s"
    return replace(
        near,
        running=near.running.model_copy(update={"keeps_bound": False}),
        best=near.best.model_copy(update={"keeps_bound": False}),
        plan=near.plan.model_copy(update={"constraint": constraint}),
        breaks_bound=True,
        reason=f"nothing keeps the bound of {_bound(constraint)}; {seconds} are close to the best possible",
    )


def _bound(constraint: Constraint) -> str:
    return f"{constraint.latency_bound_s:g} s"


def _gain(judge: Judge, plan: Plan) -> float:
    now_rps = judge.rate(judge.running)
    return judge.rate(plan) / now_rps - 1 if now_rps else 1.0


def _is_same(plan: Plan, other: Plan) -> bool:
    """Return whether a swap would change neither the settings nor the figures of the estimate that the policy uses."""
    tokens, others = plan.estimate.encode_tokens, other.estimate.encode_tokens
    return plan.policy == other.policy and abs(tokens - others) <= SAME * others
