"""Make the `Recommendation` of plans: one verdict, one gain and one command, all about the same plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

import numpy as np

from xgpt.checkpoints import hub
from xgpt.comparing.flags import Given
from xgpt.core.schema import Offer, Plan, Profile, Ranged, Recommendation
from xgpt.core.schema.documents import RangeOutput
from xgpt.core.schema.plan import rate_of
from xgpt.core.schema.recommendation import Action, BoundKept, Gain, Measurement, Sized
from xgpt.core.workload import Floats
from xgpt.deciding.commands import engine_command, engine_label, processes_of
from xgpt.deciding.load import CarriedLoad, at_load
from xgpt.deciding.ranges import ranges_of
from xgpt.deciding.verified import unverified
from xgpt.reporting.plan_text import settings_text
from xscheduler.found import Found
from xsimulator.capacity import Trial
from xsimulator.session_rate import SessionTrial, per_session

LEAST_GAIN = 1.05
"""Least factor by which another plan must be better than the present deployment to replace it."""


def by_itself(plan: Plan) -> bool:
    """Return whether the plan's engine runs it without xgpt's scheduler. xgpt's own engine runs every plan."""
    return plan.engine is None or plan.engine.framework == "xgpt" or engine_command(plan) is not None


def own_first(found: Mapping[str, Found]) -> dict[str, Found]:
    """Return the schedules with those first that their engine runs by itself."""
    return dict(sorted(found.items(), key=lambda item: not by_itself(item[1].plan)))


def recommend(
    plans: Mapping[str, Plan],
    profile: Profile,
    *,
    now: Plan | None = None,
    now_profile: Profile | None = None,
    gains: Mapping[str, RangeOutput] | None = None,
    load: CarriedLoad | None = None,
    sizes: Sequence[Sized] = (),
    kept: Given | None = None,
    path: str = "plan.json",
) -> Recommendation:
    """Return what to run.

    Args:
        plans: each policy's best plan, the one to recommend first.
        now: the present deployment as a plan, or None.
        gains: by policy, the range of its gain per device over `now` under all assumptions.
        load: the load to carry, or None if the user states none.
        sizes: numbers of devices that were tried for this load.
        kept: options of the present deployment's command that a new command repeats.
    """
    kind, best = next(iter(plans.items()))
    offers = {name: offer_of(plan, kept, path) for name, plan in plans.items()}
    first = offers[kind]
    if load is not None:
        first = first.but(at_load=at_load(best, profile, load))
    present = gain = None
    if now is not None:
        ranges = ranges_of(now, now_profile or profile)["ranges"]
        present = offer_of(now, kept, "current.json").but(rate_per_s=_rate(now, ranges))
        if load is not None:
            present = present.but(at_load=at_load(now, now_profile or profile, load))
        gain = gain_of(best, now, (gains or {}).get(kind))
    action, why = _decide(first, present, gain, best.constraint.quantile)
    others = [name for name in plans if name != kind]
    more = next((name for name in others if offers[name].needs_xgpt and rate_of(plans[name]) > rate_of(best)), None)
    rest = [name for name in others if name != more and rate_of(plans[name]) > 0]
    chosen = present if action == "keep" and present is not None else first
    shown = (now, now_profile or profile) if action == "keep" and now is not None else (best, profile)
    return Recommendation(
        action=action,
        model=best.model.name,
        devices=f"{chosen.num_devices} x {best.cluster.device.name}",
        workload=best.workload.name,
        bounds=bounds_of(*shown, min(rate_of(shown[0]), inf if load is None else load.rate_per_s)),
        best=chosen,
        now=present,
        gain=gain,
        rejected=first if action == "keep" else None,
        confidence=None if chosen.at_load is None else chosen.at_load.confidence,
        why=why,
        runner_up=None if not rest else offers[max(rest, key=lambda name: rate_of(plans[name]))],
        with_more_work=None if more is None else offers[more],
        sizes=tuple(sizes),
        limit_per_s=None if best.constraint.maximise is not None else best.ceiling.most,
        limit_gap=best.search.gap,
        would_change=tuple(_would_change(best, first, gain, load)),
        measurement=_measurement(best, chosen, path),
        unverified=unverified(shown[0]),
        warnings=best.estimate.warnings,
    )


def offer_of(plan: Plan, kept: Given | None = None, path: str = "plan.json") -> Offer:
    price, replica = plan.cluster.price_per_device_hour, _shape(plan)
    return Offer(
        name=f"{plan.policy.kind}, {replica}" if replica else plan.policy.kind,
        policy=plan.policy.kind,
        settings=settings_text(plan),
        engine=engine_label(plan),
        needs_xgpt=not by_itself(plan),
        num_devices=plan.num_devices,
        processes=processes_of(plan, kept, path),
        rate_per_s=_rate(plan, plan.estimate.ranges),
        sessions=plan.estimate.sessions,
        cost_per_hour=None if price is None else price * plan.num_devices,
        cost_per_million_tokens=plan.estimate.cost_per_million_tokens,
    )


def gain_of(best: Plan, now: Plan, varied: RangeOutput | None = None) -> Gain:
    """Return the gain in arrival rate, per device if the numbers of devices differ."""
    same = best.num_devices == now.num_devices
    each = [rate_of(plan) / (1 if same else plan.num_devices) for plan in (now, best)]
    unit = "requests/s within the bounds" + ("" if same else " per device")
    if each[0] <= 0:
        return Gain(unit=unit, now=0.0, then=each[1])
    factor = Ranged(value=each[1] / each[0])
    if varied is not None:
        factor = factor.but(low=varied.least, high=varied.most)
    return Gain(unit=unit, now=each[0], then=each[1], factor=factor, worst="" if varied is None else varied.worst)


def bounds_of(plan: Plan, profile: Profile, rate_per_s: float) -> tuple[BoundKept, ...]:
    """Return the user's bounds, with the times that a plan reaches at a rate."""
    constraint = plan.constraint
    seen = times_at(plan, profile, rate_per_s) if rate_per_s > 0 and constraint.bounds_latency else (None,) * 5
    bounds = (
        ("latency", constraint.latency_bound_s, None),
        ("TTFT", constraint.ttft_s, constraint.ttft_quantile),
        ("TPOT", constraint.tpot_s, constraint.tpot_quantile),
        ("session waiting", constraint.session_wait_s, None),
        ("session time", constraint.session_time_s, None),
    )
    return tuple(
        BoundKept(
            name=name,  # type: ignore[arg-type]
            bound_s=bound,
            quantile=quantile or constraint.quantile,
            predicted_s=None if reached is None else float(np.quantile(reached, quantile or constraint.quantile)),
        )
        for (name, bound, quantile), reached in zip(bounds, seen, strict=True)
        if bound is not None
    )


def times_at(plan: Plan, profile: Profile, rate_per_s: float) -> tuple[Floats | None, ...]:
    """Return the times of requests to the last and the first token and between tokens, and of sessions: waiting, and
    all without pauses. None: not known.
    """
    if plan.workload.sessions is None:
        times = Trial(plan, profile).at(rate_per_s)
        return (None,) * 5 if times is None else (times.whole_s, times.ttft_s, times.tpot_s, None, None)
    trial = SessionTrial(plan, profile)
    run, _, counts = trial.at(rate_per_s / trial.turns)
    of_sessions = (per_session(run, counts, values) for values in (run.ttft_s, run.whole_s))
    return (run.whole_s[counts], run.ttft_s[counts], run.tpot_s[counts], *of_sessions)


def _decide(first: Offer, now: Offer | None, gain: Gain | None, quantile: float) -> tuple[Action, str]:
    """Return the action and its reason. The same deployment gets the same judgement from every command."""
    if now is None or gain is None:
        return "run", ""
    if now.at_load is not None and first.at_load is not None:
        kept, would_keep = (_keeps(each, quantile) for each in (now, first))
        if would_keep and not kept:
            return "change", "the present deployment does not keep the bounds at your load, this plan does"
        if kept and not would_keep:
            return "keep", "the present deployment keeps the bounds at your load, and no plan found does"
        if kept and would_keep and first.num_devices < now.num_devices:
            return "change", f"{first.num_devices} of your {now.num_devices} devices keep the bounds at your load"
        if kept and would_keep:
            return "keep", "it keeps the bounds at your load, and fewer devices are not sure to"
    if gain.factor is None:
        return "change", "the present deployment keeps the bounds at no rate"
    if gain.factor.low is not None and gain.factor.low < 1:
        return "keep", f"the best plan may be worse: {gain.factor.low:.2f} times as much if {gain.worst}"
    if gain.factor.value < LEAST_GAIN:
        return "keep", f"the best plan gains only {100 * (gain.factor.value - 1):.0f}%"
    return "change", ""


def _keeps(offer: Offer, quantile: float) -> bool:
    """Return whether an offer keeps the bounds at the load: over the whole log if there is one, else by its rate."""
    load = offer.at_load
    assert load is not None
    if load.share_kept is not None:
        return load.share_kept >= quantile
    return offer.rate_per_s.value >= load.rate_per_s


def _rate(plan: Plan, ranges: Mapping[str, tuple[float, float]]) -> Ranged:
    low, high = ranges.get("rate_per_s" if plan.estimate.capacity is not None else "throughput_rps", (None, None))
    return Ranged(value=rate_of(plan), low=low, high=high)


def _shape(plan: Plan) -> str:
    """Return the placement, as in "2 replicas of TP4" or "4 stages of TP2"."""
    if plan.cluster.num_devices == 1:
        return ""
    degrees = [stage.tp for stage in plan.stages]
    stages = f"TP{degrees[0]}" if len(degrees) == 1 else f"{len(degrees)} stages of TP{'/'.join(map(str, degrees))}"
    if len(degrees) > 1 and len(set(degrees)) == 1:
        stages = f"{len(degrees)} stages of TP{degrees[0]}"
    return stages if plan.replicas == 1 else f"{plan.replicas} replicas of {stages}"


def _would_change(best: Plan, offer: Offer, gain: Gain | None, load: CarriedLoad | None) -> list[str]:
    found = []
    low = offer.rate_per_s.low
    if load is not None and offer.rate_per_s.value > load.rate_per_s:
        found.append(f"a load above {offer.rate_per_s.value:.3g} requests/s")
    elif low is not None and low <= 0:
        found.append("steps as slow as the slowest of earlier predictions: then no rate keeps the bounds")
    if gain is not None and gain.worst and gain.factor is not None and (gain.factor.low or 1) < 1:
        found.append(gain.worst)
    if (edge := best.estimate.mixing_edge) is not None:
        now = 0.0 if best.engine is None else best.engine.mixing
        side = "above" if edge.mixing > now else "below"
        found.append(f"prompts in a step slowing its decodes by {side} {100 * edge.mixing:.0f}%: then {edge.policy}")
    return found


def _measurement(best: Plan, chosen: Offer, path: str) -> Measurement | None:
    """Return the measurement that replaces the widest assumption by a fact."""
    if best.profile.source == "measured":
        return None
    model = hub.id_of(best.checkpoint) or hub.id_of_shipped(best.model.name) or best.model.name
    lengths, rate = best.workload, chosen.rate_per_s.value
    port = chosen.processes[0].port if chosen.processes else 8000
    return Measurement(
        narrows="step times: run the command, measure it once, fit the profile",
        command=(
            f"vllm bench serve --port {port} --model {model} --dataset-name random "
            f"--random-input-len {lengths.input.mean:.0f} --random-output-len {lengths.output.mean:.0f} "
            f"--request-rate {0.7 * rate:.2g} --num-prompts 500 --save-result --result-filename result.json "
            f"&& xgpt calibrate {path} result.json -o profile.json"
        ),
    )
