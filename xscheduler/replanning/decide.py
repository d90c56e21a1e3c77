"""Decide whether to replace the running plan by a better one, given the gain and the cost of the change."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from xgpt.core.errors import InfeasibleError
from xgpt.core.schema import Constraint, Observation, Outcome, Plan, PlanDraft, Profile
from xgpt.core.schema.fleet import STARTUP_S
from xgpt.core.schema.policy import POLICY_GROUPS
from xgpt.observation.windows import RATE_REQUESTS
from xscheduler.found import Found
from xscheduler.objectives.best_plans import variables_of
from xscheduler.objectives.ladder import request_latency, request_law, with_law
from xscheduler.placement import Placement
from xscheduler.replanning.judge import ArrivalsJudge, Judge, SaturatedJudge, Terms, replaced
from xscheduler.replanning.situation import Situation, reestimate
from xscheduler.space import runnable
from xsimulator.capacity import PRECISION
from xsimulator.forecast import CHOICES, FORECASTS, TUNED
from xsimulator.memory import LaneMemory

LOAD_BYTES_PER_S = {"cpu": 5e8, "gpu": 4e9}
"""Bytes of weights that a device loads a second, if its profile does not state this rate. These are the slowest rate
measured on a CPU and the slowest rate in ExeGPT's Table 4.
"""

WIDER = (1.0, 1.5, 2.0, 4.0)

SAME = 0.02

MOST_ROUNDS = 4
UNUSED = 0.02
"""If a plan breaks the bound in simulation, the next search's bound is tightened by the excess plus a quarter of this
share.
"""
SWAPPABLE = tuple(kind for kind, forecast in FORECASTS.items() if forecast.swaps_between_steps)
"""Policies that can take over between two steps. Static is excluded because its batch must end first, waa because its
lanes must drain first.
"""
ON_ONE_DEVICE = tuple(kind for kind, forecast in FORECASTS.items() if len(forecast.settings.lanes) == 1)


class Change(NamedTuple):
    """How another plan takes effect.

    Attributes:
        is_swap: whether it does so between two steps, without a pause.
        pause_s: seconds for which requests are delayed: those that run end first.
        start_s: how many of these seconds are a new start of an engine whose plan `xgpt serve` cannot change, else 0.
    """

    is_swap: bool = False
    pause_s: float = 0.0
    start_s: float = 0.0

    @classmethod
    def of(cls, then: PlanDraft, profile: Profile, plan: PlanDraft, running: Outcome, *, in_place: bool) -> Change:
        """Return how `then` takes effect after `plan`.

        Args:
            running: the figures of `plan`.
            in_place: whether `then` has the same stages, and a policy that can take over between two steps.
        """
        if plan.engine is not None and plan.engine.runs_alone:
            anew_s = start_s(then, profile)
            return cls(pause_s=running.latency_s + anew_s, start_s=anew_s)
        if in_place:
            return AT_ONCE
        return cls(pause_s=running.latency_s + loading_s(then, profile, plan))


AT_ONCE = Change(is_swap=True)


@dataclass(frozen=True)
class Verdict:
    """The result of comparing the running plan with the best plan.

    Attributes:
        found: the best plan, in a form that can replace the running plan, or None if no plan keeps the bounds.
        change: how the plan would take effect.
    """

    running: Outcome
    breaks_bound: bool
    reason: str
    best: Outcome | None = None
    found: Found | None = None
    gain: float = 0.0
    change: Change = AT_ONCE
    switch: bool = False
    planned_under_s: float | None = None
    num_unbuilt: int = 0

    @property
    def plan(self) -> Plan | None:
        return None if self.found is None else self.found.plan


def judged(
    plan: Plan, profile: Profile, observation: Observation, terms: Terms | None = None, slowdown: float | None = None
) -> Verdict:
    """Compare a running plan with the best plan for the observed lengths, by the plan's objective."""
    situation = Situation.of(plan, profile, observation, slowdown)
    verdict = _judged(situation, terms or Terms(), observation.num_requests)
    if observation.cause == "asked":
        verdict = _kept_at_load(situation, verdict, observation.num_requests)
    return replace(verdict, num_unbuilt=len(situation.unbuilt))


def _judged(situation: Situation, terms: Terms, num_requests: int) -> Verdict:
    plan = situation.plan
    if plan.constraint.maximises_arrivals:
        return with_known_rate(_judged_by_arrivals(situation, terms), num_requests)
    if plan.constraint.maximise is not None:
        judge = SaturatedJudge(situation, terms)
        reason = f"re-planning cannot compare plans by {plan.constraint.maximise}, which the plan maximises: plan again"
        return Verdict(judge.running, judge.breaks, reason)
    if plan.constraint.sla == "length":
        return decide(SaturatedJudge(situation, terms))
    return _judged_by_requests(situation, terms)


def _judged_by_arrivals(situation: Situation, terms: Terms) -> Verdict:
    """If too many requests break their bounds now, a small gain is enough for a change."""
    if not situation.misses:
        return decide(ArrivalsJudge(situation, terms))
    terms = replace(terms, least_gain=min(terms.least_gain, PRECISION))
    verdict = decide(ArrivalsJudge(situation, terms))
    kept = (
        f"{situation.goodput:.1%} of recent requests kept their bounds, but "
        f"{situation.plan.constraint.quantile:.1%} should"
    )
    return replace(verdict, reason=f"{kept}; {verdict.reason}")


def _kept_at_load(situation: Situation, verdict: Verdict, num_requests: int) -> Verdict:
    """A user who asks is told to keep a plan that keeps the bounds at the observed load, as `xgpt compare` tells. A
    server that judges by itself also changes for headroom, since a swap costs it nothing.
    """
    rate, by_rate = situation.arrival_rate_per_s, verdict.running.arrival_rate_per_s is not None
    if rate is None or num_requests < RATE_REQUESTS or not (verdict.switch and by_rate and verdict.running.keeps_bound):
        return verdict
    return replace(verdict, switch=False, reason=f"it keeps the bounds at your load, {rate:.3g} requests/s")


def with_known_rate(verdict: Verdict, num_requests: int) -> Verdict:
    best, running = verdict.best, verdict.running
    if not verdict.switch or best is None or num_requests >= RATE_REQUESTS:
        return verdict
    if best.throughput_rps >= running.throughput_rps or not running.arrival_rate_per_s:
        return verdict
    less = (
        f"at saturation the best plan serves {best.throughput_rps:.3g} requests/s, the running one "
        f"{running.throughput_rps:.3g}"
    )
    reason = f"{verdict.reason}; but {num_requests} requests are too few to know the arrival rate, and {less}"
    return replace(verdict, switch=False, reason=reason)


def _judged_by_requests(situation: Situation, terms: Terms) -> Verdict:
    plan, profile, lengths = situation.plan, situation.profile, situation.lengths
    constraint, bound_s = plan.constraint, plan.constraint.latency_bound_s
    closed_s = reestimate(plan, profile, lengths, constraint.quantile)["latency"]
    ratio, others, reason = request_latency(plan, profile, lengths) / closed_s, 1.0, ""
    for _ in range(MOST_ROUNDS):
        verdict = decide(SaturatedJudge(situation, terms, ratio, others))
        if verdict.found is None or verdict.best is None:
            return replace(verdict, reason=reason or verdict.reason)
        if not verdict.switch:
            return verdict
        law = request_law(verdict.found.draft, profile)
        seen_s = law.quantile(constraint.planned_quantile)
        best = verdict.best.but(latency_s=law.quantile(constraint.quantile))
        verdict = replace(verdict, found=with_law(verdict.found, law), best=best)
        if bound_s is None or (1 + constraint.headroom) * seen_s <= bound_s:
            return verdict
        reason = f"the best other plan takes {seen_s:.3g} s in simulation, but the bound is {bound_s:g} s"
        if not best.keeps_bound:
            break  # no plan keeps the bound, so no plan keeps a tighter bound
        others *= (1 + constraint.headroom) * seen_s / bound_s * (1 + UNUSED / 4)
    return replace(verdict, switch=False, reason=reason)


def decide(judge: Judge) -> Verdict:
    """Compare the running plan with the best plan.

    A plan on the same stages takes over if its gain is large enough, or if the running plan breaks its bound. A plan on
    another placement must also repay the pause. The search may find no plan that keeps the bound, since it can miss
    plans that keep the bound in simulation. A plan that nearly keeps the bound then takes over, unless the running plan
    keeps the bound at some arrival rate.
    """
    try:
        verdict = _decide_feasible(judge)
        return _sustaining(judge, verdict) or verdict
    except InfeasibleError as error:
        reason, nearest_s = str(error), error.nearest_bound_s if error.binding == "latency_bound_s" else None
    if nearest_s is not None and judge.running.arrival_rate_per_s:
        kept = f"the running plan keeps it up to {judge.running.arrival_rate_per_s:.3g} requests/s"
        reason = f"no other plan keeps the bound of {_bound(judge.plan.constraint)}; {kept}"
        return Verdict(judge.running, judge.breaks, reason)
    found = None
    for near in () if nearest_s is None else _wider(judge, nearest_s, WIDER):
        with suppress(InfeasibleError):  # another bound binds, too
            found = _although_broken(verdict := _decide_feasible(near), judge.plan.constraint)
            if verdict.best is None or verdict.best.keeps_bound is not False:
                break
    return found or Verdict(judge.running, judge.breaks, reason)


def _sustaining(judge: Judge, verdict: Verdict) -> Verdict | None:
    """If more requests arrive than a plan serves at saturation, its queue grows without limit, and no request keeps its
    bounds. A plan that keeps looser bounds at this rate, or that serves more requests, is then better than a plan that
    keeps the bounds at a lower rate.
    """
    arriving = judge.situation.arrival_rate_per_s
    if arriving is None or not judge.plan.constraint.maximises_arrivals or verdict.best is None:
        return None
    served_rps = (verdict.best if verdict.switch else judge.running).throughput_rps
    if served_rps >= arriving:
        return None
    given_s, found = judge.plan.constraint.latency_bound_s, None
    least_rps = max(served_rps, judge.running.throughput_rps)
    for near in () if given_s is None else _wider(judge, given_s, WIDER[1:]):
        with suppress(InfeasibleError):  # another bound binds, too
            wide = _decide_feasible(near)
            assert wide.best is not None
            if not wide.switch or wide.best.throughput_rps <= least_rps:
                continue
            reason = f"{arriving:.3g} requests/s arrive, and no plan keeps the bound of {given_s:g} s at this rate"
            reason = f"{reason}; under {near.plan.constraint.latency_bound_s:.3g} s, {wide.reason}"
            found = replace(_although_broken(wide, judge.plan.constraint), reason=reason)
            if wide.best.keeps_bound:
                break
    if found is None and verdict.switch and served_rps < judge.running.throughput_rps:
        reason = (
            f"{arriving:.3g} requests/s arrive; the best plan serves only {served_rps:.3g}, and the running plan "
            "serves more"
        )
        return replace(verdict, switch=False, reason=reason)
    return found


def _wider(judge: Judge, bound_s: float, factors: Sequence[float]) -> Iterator[Judge]:
    for factor in factors:
        near = judge.near(factor * bound_s)
        if near is None:
            return
        yield near


def _decide_feasible(judge: Judge) -> Verdict:
    anywhere, swap = _candidates(judge)
    change = _change(judge, anywhere, in_place=False)
    in_place_rps = max(judge.kept_rps, 0.0 if swap is None else judge.rate(swap.draft))
    repays = _repays(judge.rate(anywhere.draft), in_place_rps, change.pause_s, judge.terms)
    if repays or swap is None:
        verdict = _compare(judge, anywhere, change)
        reason = f"the gain does not make up for the pause of {change.pause_s:.1f} s within {judge.terms.horizon_s:g} s"
        return verdict if repays else replace(verdict, switch=False, reason=reason)
    verdict = _compare(judge, swap, _change(judge, swap, in_place=True))
    if judge.plan.policy.kind in SWAPPABLE:
        verdict = _with_caution(judge, verdict)
    if verdict.found is not None and _is_same(judge.plan, verdict.found.draft):
        return replace(verdict, switch=False, gain=0.0, reason="the best plan is the running one")
    return verdict


def _change(judge: Judge, then: Found, *, in_place: bool) -> Change:
    return Change.of(then.draft, judge.situation.profile, judge.plan, judge.running, in_place=in_place)


def _candidates(judge: Judge) -> tuple[Found, Found | None]:
    plan = judge.plan
    kinds = within_pins(plan, SWAPPABLE) if plan.policy.kind in SWAPPABLE else (plan.policy.kind,)
    is_alone = plan.num_devices == 1
    anywhere = judge.best(within_pins(plan, ON_ONE_DEVICE if is_alone else tuple(FORECASTS)), in_place=False)
    if is_alone and anywhere.draft.policy.kind in kinds:  # one device has no other placement
        return anywhere, replaced(plan, anywhere, in_place=True)
    try:
        return anywhere, judge.best(kinds, in_place=True)
    except InfeasibleError:
        return anywhere, None


def within_pins(plan: PlanDraft, kinds: Collection[str]) -> tuple[str, ...]:
    asked, engine = plan.pinned.policy, plan.engine
    kinds = [kind for kind in kinds if engine is None or engine.runs(kind)]
    if asked != "auto":
        choices = POLICY_GROUPS.get(asked, (TUNED.get(asked, asked),))
        kinds = [choice for choice in choices if CHOICES[choice].settings.model_fields["kind"].default in kinds]
    able = runnable(kinds, plan.model, plan.speculation)
    left = [kind for kind in able if plan.pinned.fixed.keys() <= variables_of(kind)]
    return tuple(left) or (plan.policy.kind,)


def loading_s(plan: PlanDraft, profile: Profile, running: PlanDraft) -> float:
    """Return the seconds for loading weights when the placement changes. The result is 0 if both plans have the same
    number of replicas with one device each, since the devices then keep their weights.
    """
    keeps = plan.devices_per_replica == running.devices_per_replica == 1 and plan.replicas == running.replicas
    return 0.0 if keeps else weights_loading_s(plan, profile)


def weights_loading_s(plan: PlanDraft, profile: Profile) -> float:
    """Return the seconds that the devices need to load a plan's weights from a checkpoint in host memory.

    Source: ExeGPT sec. 7.7, Table 4.
    """
    rate = profile.load_bytes_per_s or LOAD_BYTES_PER_S[plan.cluster.device.type]
    lanes = [layout.lane for layout in Placement.of(plan).layouts]
    memories = [
        LaneMemory(plan.model, plan.cluster, plan.precision, lane, plan.block_size, speculation=plan.speculation)
        for lane in lanes
    ]
    return max(float(memory.weight_bytes.max()) for memory in memories) / rate


def start_s(plan: PlanDraft, profile: Profile, startup_s: float = STARTUP_S) -> float:
    """Return the seconds from ordering a replica until it serves.

    Args:
        startup_s: seconds of them until it begins to load its weights.
    """
    return startup_s + weights_loading_s(plan, profile)


def _repays(rate: float, in_place_rps: float, pause_s: float, terms: Terms) -> bool:
    repaid = (rate - in_place_rps) * terms.horizon_s
    return repaid > rate * pause_s and rate > (1 + terms.least_gain) * in_place_rps


def _compare(judge: Judge, best: Found, change: Change) -> Verdict:
    running, outcome, gain = judge.running, judge.outcome(best.draft), _gain(judge, best.draft)
    switch = not judge.kept_rps or gain >= judge.terms.least_gain
    if outcome.arrival_rate_per_s is not None:
        rates = f"{outcome.arrival_rate_per_s:.3g} requests/s, the running one up to {running.arrival_rate_per_s:.3g}"
        arriving = judge.situation.arrival_rate_per_s
        reason = f"the best other plan keeps the bounds up to {rates}"
        reason += "" if arriving is None else f"; {arriving:.3g} arrive"
    elif judge.breaks:
        reason = f"the running plan takes {running.latency_s:.3g} s, but the bound is {_bound(judge.plan.constraint)}"
    else:
        reason = f"the best other plan gains {100 * gain:.1f}% of throughput"
    if not switch:
        reason += f"; a gain of at least {100 * judge.terms.least_gain:g}% is required"
    return Verdict(running, judge.breaks, reason, outcome, best, gain, change, switch)


def _with_caution(judge: Judge, verdict: Verdict) -> Verdict:
    assert verdict.found is not None
    found = verdict.found.draft
    plan, rate = (found, judge.rate(found)) if verdict.switch else (judge.plan, judge.rate(judge.running))
    best = judge.careful(within_pins(judge.plan, SWAPPABLE), plan, rate)
    if best is None:
        return verdict
    cautious = replace(verdict, found=best, best=judge.outcome(best.draft), gain=_gain(judge, best.draft))
    if verdict.switch:
        return cautious
    reason = (
        "later requests may be longer than those observed, and a plan that keeps the bound for longer ones serves "
        "little less"
    )
    return replace(cautious, switch=True, reason=reason)


def _although_broken(near: Verdict, constraint: Constraint) -> Verdict:
    assert near.best is not None and near.found is not None
    draft = near.found.draft
    wider_s = draft.constraint.latency_bound_s
    return replace(
        near,
        running=near.running.but(keeps_bound=False),
        best=near.best.but(keeps_bound=False),
        found=replace(near.found, draft=draft.but(constraint=constraint)),
        planned_under_s=wider_s,
        breaks_bound=True,
        reason=f"no plan keeps the bound of {_bound(constraint)}; under {wider_s:.3g} s, {near.reason}",
    )


def _bound(constraint: Constraint) -> str:
    return f"{constraint.latency_bound_s:g} s"


def _gain(judge: Judge, plan: PlanDraft) -> float:
    now_rps = judge.rate(judge.running)
    return judge.rate(plan) / now_rps - 1 if now_rps else 1.0


def _is_same(plan: PlanDraft, other: PlanDraft) -> bool:
    tokens, others = plan.estimate.encode_tokens, other.estimate.encode_tokens
    return plan.policy == other.policy and abs(tokens - others) <= SAME * others
