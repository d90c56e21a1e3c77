"""Make the `Recommendation` of plans: one verdict, one gain and one command, all about the same plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, inf
from types import MappingProxyType

from xgpt.comparing.flags import Given
from xgpt.core.numbers import rounded_down, rounded_up
from xgpt.core.schema import Constraint, Offer, Plan, Profile, Ranged, Recommendation
from xgpt.core.schema.documents import RangeOutput
from xgpt.core.schema.plan import rate_of
from xgpt.core.schema.recommendation import (
    Action,
    AtLoad,
    BoundKept,
    BoundName,
    Copied,
    Gain,
    Measurement,
    OfferedCluster,
    Sized,
)
from xgpt.core.sessions import turns_of
from xgpt.core.workload import Floats
from xgpt.deciding.commands import PORT, engine_command, engine_label, processes_of
from xgpt.deciding.load import GROWTHS, CarriedLoad, Copies, at_load, enough, is_better
from xgpt.deciding.phrases import kept_in_words, per_s, tenths
from xgpt.deciding.ranges import ranges_of
from xgpt.deciding.verified import unverified
from xgpt.reporting.plan_text import settings_text
from xscheduler.found import Found
from xscheduler.objectives.sizing import ClusterChoice, Judged
from xsimulator.capacity import Trial
from xsimulator.measures import quantile_of
from xsimulator.session_rate import SessionTrial, per_session

BOUNDED: tuple[BoundName, ...] = ("latency", "TTFT", "TPOT", "session waiting", "session time")
"""Names of what users bound, in the order of `times_at`."""
CLEAR = 0.005
"""Shares of kept requests that differ by less are about equal."""
MOST_RANKED = 2
"""Number of other policies' plans, the highest rates first, of which one may stand beside the best plan."""
LEAST_GAIN = 1.05
"""Least factor by which another plan must be better than the present deployment to replace it."""


def by_itself(plan: Plan) -> bool:
    """Return whether the plan's engine runs it without xgpt's scheduler. Of other engines, only vLLM takes that one."""
    return plan.engine is None or plan.engine.framework != "vllm" or engine_command(plan) is not None


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
    searched: int | None = None,
    tried: Sequence[tuple[int, Judged]] = (),
    choices: Sequence[ClusterChoice] = (),
    beside: Plan | None = None,
    beside_profile: Profile | None = None,
    steady: Sequence[Plan] = (),
    kept: Given | None = None,
    path: str = "plan.json",
    now_path: str | None = None,
    now_port: int | None = None,
    now_command: str = "",
    wanted: float = 0.9,
    least_gain: float = LEAST_GAIN,
    nearest: Mapping[str, float | None] = MappingProxyType({}),
) -> Recommendation:
    """Return what to run.

    Args:
        plans: each policy's best plan, the one to recommend first.
        now: the present deployment as a plan, or None.
        gains: by policy, the range of its gain per device over `now` under all assumptions; that of `beside` by its
            name (`name_of`).
        load: the load to carry, or None if the user states none.
        searched: largest number of devices of which plans were searched. None means that of the best plan.
        tried: numbers of devices that were judged for this load, rising.
        choices: clusters that were compared, the cheapest first.
        beside: the best plan of another shape, or None. It may be on another cluster, with `beside_profile`.
        steady: plans of higher rates, if others keep more of a log that none holds.
        kept: options of the present deployment's command that a new command repeats.
        path, now_path: where the best plan and the present deployment will be written.
        now_port: where the present deployment answers, if not where its command says.
        now_command: what starts the present deployment, as given. "" means what starts such a plan.
        wanted: probability with which devices must hold the load.
        least_gain: factor by which another plan must be better than the present deployment to replace it.
        nearest: see `InfeasibleError`.
    """

    def offered(plan: Plan, of: Profile = profile, file: str | None = None) -> Offer:
        offer = offer_of(plan, kept, file)
        offer = offer if plan.cluster.name == best.cluster.name else offer.but(cluster=plan.cluster.name)
        return offer if load is None else offer.but(at_load=at_load(plan, of, load))

    kind, best = next(iter(plans.items()))
    first = offered(best, file=path)
    present: Offer | None = None
    gain: Gain | None = None
    is_best = False
    now_profile = now_profile or profile
    if now is not None:
        present = offered(now, now_profile, now_path or "current.json")
        present = present.but(rate_per_s=_rate(now, ranges_of(now, now_profile)["ranges"]))
        if now_command and not any(process.node for process in present.processes):
            devices = tuple(device for process in present.processes for device in process.devices)
            one = present.processes[0].but(command=now_command, devices=devices)
            present = present.but(processes=(one,))
        is_best = (present.name, present.settings, present.engine) == (first.name, first.settings, first.engine)
        gain = None if is_best else gain_of(best, now, (gains or {}).get(kind))
    action, why = _decide(first, present, gain, wanted, least_gain, dict(tried))
    varied = gains or {}
    others = {name: plan for name, plan in plans.items() if name != kind and rate_of(plan) > 0}
    is_lost = first.at_load is not None and not first.at_load.holds
    if action == "run" and is_lost and best.constraint.maximises_arrivals and load and load.kept(best, profile):
        why = "of the plans found, it keeps most of your load"
    ranked = sorted(others.values(), key=rate_of, reverse=True)[:MOST_RANKED]
    clear = [plan for plan in ranked if is_lost or rate_of(plan) >= LEAST_GAIN * rate_of(best)]
    offers = (offered(plan) if is_lost else offer_of(plan, kept, None) for plan in clear if not by_itself(plan))
    more = next((offer for offer in offers if is_better(offer, first)), None)
    next_best = beside or next((plan for plan in ranked if by_itself(plan)), None)
    of_next = beside_profile or profile
    runner_up = None if next_best is None else offered(next_best, of_next)
    if present is not None and not is_best and first.unverified and not present.unverified:
        is_second = runner_up is not None and not runner_up.unverified and is_better(runner_up, present)
        if not is_second:  # what runs now is a candidate, too
            next_best, runner_up, of_next = now, present, now_profile
    if is_best and runner_up is not None and is_better(runner_up, first):
        why = "it is the best plan that measurements verify" if runner_up.unverified else why
    chosen = present if action == "keep" and present is not None else first
    shown = (now, now_profile) if action == "keep" and now is not None else (best, profile)
    copies, held = list[tuple[Copied, Plan, Copies]](), chosen.at_load
    is_sure = held is None or (held.holds and (held.confidence is None or held.confidence >= wanted))
    if load is not None and not is_sure:
        roles: list[tuple[Copied, Plan | None, Profile]] = [
            ("best", *shown),
            ("rejected", None if chosen is first or is_best else best, profile),
            ("runner_up", next_best, of_next),
            *(("steady", plan, profile) for plan in steady),
        ]
        for role, plan, of in roles:
            than = min((each[2] for each in copies), key=lambda each: each.rank(wanted), default=None)
            if plan is not None and (several := enough(plan, of, load, wanted, than)) is not None:
                copies.append((role, plan, several))
    fewest = min(copies, key=lambda each: each[2].rank(wanted), default=None)
    if fewest is not None and held is not None and held.holds and (fewest[2].confidence or 0.0) < wanted:
        fewest = None
    nothing: tuple[Copied, Plan, Copies | None] = ("best", best, None)
    copied, copied_plan, enough_copies = fewest or nothing
    return Recommendation(
        action=action,
        model=best.model.name,
        devices=f"{chosen.num_devices} x {best.cluster.device.name}",
        workload=best.workload.name,
        bounds=bounds_of(*shown, min(rate_of(shown[0]), inf if load is None else load.rate_per_s)),
        best=chosen,
        now=present,
        gain=gain,
        rejected=first if action == "keep" and gain is not None else None,
        confidence=None if chosen.at_load is None else chosen.at_load.confidence,
        wanted=None if load is None else wanted,
        nearest=_nearest(best, nearest),
        headroom=shown[0].constraint.headroom,
        why=why,
        runner_up=runner_up,
        runner_up_gain=None
        if next_best is None or now is None or next_best is now
        else gain_of(next_best, now, varied.get(next_best.policy.kind if beside is None else name_of(beside))),
        steady=offered(copied_plan) if copied == "steady" else None,
        with_more_work=more,
        sizes=tuple(
            Sized(num_devices=number, confidence=judged.confidence, why_not=judged.why_not) for number, judged in tried
        ),
        would_hold=None if enough_copies is None else enough_copies.num_devices,
        would_hold_replicas=None if enough_copies is None else enough_copies.replicas,
        would_hold_confidence=None if enough_copies is None else enough_copies.confidence,
        alone_share=None if load is None or rate_of(best) else _alone(load, shown, (best, profile)),
        would_hold_of=copied,
        clusters=tuple(_cluster(choice) for choice in choices),
        limit_per_s=None if best.constraint.maximise is not None else best.ceiling.most,
        limit_devices=searched if searched is not None and searched > best.num_devices else None,
        limit_gap=best.search.gap,
        saturated_per_s=None if best.constraint.maximises_arrivals else best.estimate.throughput_rps,
        would_change=()
        if nearest
        else tuple(_would_change(*shown, chosen, gain if chosen is first else None, load, wanted)),
        measurement=_measurement(best, first, path)
        if now is None or present is None
        else _measurement(now, present, now_path, now_port, "XGPT_API_KEY=KEY " if "api-key" in (kept or {}) else ""),
        warnings=best.estimate.warnings,
    )


def _alone(load: CarriedLoad, *plans: tuple[Plan, Profile]) -> float | None:
    return max((share for each in plans if (share := load.alone(*each)) is not None), default=None)


def _nearest(plan: Plan, nearest: Mapping[str, float | None]) -> tuple[BoundKept, ...]:
    bounds = {name: rounded_up(value) for name, value in nearest.items() if value is not None}
    loose = plan.constraint.but(**bounds)
    return _bounds(loose, (None,) * 5) if bounds else ()


def _cluster(choice: ClusterChoice) -> OfferedCluster:
    cluster = choice.problem.cluster
    assert cluster.price_per_device_hour is not None
    judged = None if choice.fewest is None else choice.fewest.judged
    return OfferedCluster(
        name=cluster.name,
        num_devices=None if choice.fewest is None else choice.fewest.number,
        price_per_device_hour=cluster.price_per_device_hour,
        cost_per_hour=choice.price_per_hour,
        confidence=None if judged is None else judged.confidence,
        why_not=choice.why_not,
        unverified=() if judged is None else judged.unverified,
    )


def offer_of(plan: Plan, kept: Given | None = None, path: str | None = "plan.json") -> Offer:
    price = plan.cluster.price_per_device_hour
    return Offer(
        name=name_of(plan),
        policy=plan.policy.kind,
        settings=settings_text(plan),
        engine=engine_label(plan),
        needs_xgpt=not by_itself(plan),
        num_devices=plan.num_devices,
        processes=processes_of(plan, kept, path),
        rate_per_s=_rate(plan, plan.estimate.ranges),
        simulated_s=_simulated_s(plan),
        sessions=plan.estimate.sessions,
        cost_per_hour=None if price is None else price * plan.num_devices,
        cost_per_million_tokens=plan.estimate.cost_per_million_tokens,
        unverified=unverified(plan),
    )


def gain_of(best: Plan, now: Plan, varied: RangeOutput | None = None) -> Gain:
    """Return the gain in arrival rate.

    Args:
        varied: the range of the gain per device.
    """
    law = best.workload.sessions
    turns, what = (1.0, "requests") if law is None else (turns_of(law), "sessions")
    found = Gain(unit=f"{what}/s within the bounds", now=rate_of(now) / turns, then=rate_of(best) / turns)
    if found.now <= 0:
        return found
    value, more = found.then / found.now, best.num_devices / now.num_devices
    each = Ranged(value=value / more)
    if varied is not None:
        each = each.but(low=varied.least, high=varied.most)
    low, high = (None if end is None else more * end for end in (each.low, each.high))
    whole = Ranged(value=value, low=low, high=high)
    per_device = None if more == 1 else each
    return found.but(factor=whole, per_device=per_device, worst="" if varied is None else varied.worst)


def bounds_of(plan: Plan, profile: Profile, rate_per_s: float) -> tuple[BoundKept, ...]:
    """Return the user's bounds, with the times that a plan reaches at a rate."""
    constraint = plan.constraint
    is_kept = rate_per_s > 0 and constraint.bounds_latency
    return _bounds(constraint, times_at(plan, profile, rate_per_s) if is_kept else (None,) * 5)


def _bounds(constraint: Constraint, seen: tuple[Floats | None, ...]) -> tuple[BoundKept, ...]:
    quantiles = (None, constraint.ttft_quantile, constraint.tpot_quantile, None, None)
    bounds = zip(BOUNDED, (*constraint.bounds, *constraint.session_bounds), quantiles, strict=True)
    return tuple(
        BoundKept(
            name=name,
            bound_s=bound,
            quantile=quantile or constraint.quantile,
            predicted_s=None
            if reached is None or not len(reached)
            else quantile_of(reached, quantile or constraint.quantile),
        )
        for (name, bound, quantile), reached in zip(bounds, seen, strict=True)
        if bound is not None
    )


def times_at(plan: Plan, profile: Profile, rate_per_s: float) -> tuple[Floats | None, ...]:
    """Return the times of requests to the last and the first token and between tokens, and of sessions: waiting, and
    all without pauses. None: not known.
    """
    if plan.workload.sessions is None:
        times = Trial.of_rate(plan, profile).at(rate_per_s)
        return (None,) * 5 if times is None else (times.whole_s, times.ttft_s, times.gaps_s, None, None)
    trial = SessionTrial(plan, profile)
    run, _, counts = trial.at(rate_per_s / trial.turns)
    of_sessions = (per_session(run, counts, values) for values in (run.ttft_s, run.whole_s))
    return (run.whole_s[counts], run.ttft_s[counts], run.tpot_s[counts], *of_sessions)


def _decide(
    first: Offer,
    now: Offer | None,
    gain: Gain | None,
    wanted: float = 0.9,
    least_gain: float = LEAST_GAIN,
    tried: Mapping[int, Judged] = MappingProxyType({}),
) -> tuple[Action, str]:
    """Return the action and its reason. The same deployment gets the same judgement from every command."""
    if now is None:
        return "run", ""
    if gain is None:
        is_sized = first.num_devices < max(tried, default=0) and first.at_load is not None and first.at_load.holds
        return "keep", f"it {'holds your load on the fewest devices' if is_sized else 'is the best plan found'}"
    if now.at_load is not None and first.at_load is not None:
        kept, would_keep = now.at_load.holds, first.at_load.holds
        if would_keep and not kept:
            return "change", "what runs now does not hold your load, this plan does"
        if kept and not would_keep:
            return "keep", "it holds your load, and no plan found does"
        if kept and would_keep:
            return _decide_among_both(first, now, wanted, tried)
        if (found := _by_replay(first.name, first.at_load, now.at_load)) is not None:
            return found
    each = gain.per_device or gain.factor
    if each is None and gain.then <= 0:
        return "keep", "no plan found keeps the bounds for clearly more of your requests"
    if each is None:
        return "change", "the present deployment keeps the bounds at no rate"
    if each.value < min(1 + CLEAR, least_gain):
        return "keep", "no plan found serves clearly more"
    per_device = " per device" if gain.per_device else ""
    if each.low is not None and each.low < 1:
        return "keep", f"the best plan may be worse{per_device}: {each.low:.2f} times as much if {gain.worst}"
    if each.value < least_gain:
        return "keep", f"the best plan gains only {100 * (each.value - 1):.0f}%{per_device}"
    return "change", ""


def _decide_among_both(first: Offer, now: Offer, wanted: float, tried: Mapping[int, Judged]) -> tuple[Action, str]:
    then, mine = (None if each.at_load is None else each.at_load.confidence for each in (first, now))
    likely = 1.0 if then is None else then
    if first.num_devices < now.num_devices and likely >= min(wanted, 0.0 if mine is None else rounded_down(mine)):
        return "change", "both hold your load, this plan on fewer devices"
    if mine is not None and mine < wanted <= likely:
        return "change", f"both hold your load, this plan more surely (yours in {tenths(mine)})"
    fewer = [judged.confidence for number, judged in tried.items() if number < now.num_devices]
    if any(fewer) or first.num_devices < now.num_devices:
        return "keep", "it holds your load, and fewer devices do so less surely"
    return "keep", f"it holds your load{', and fewer devices do not' if fewer else ''}"


def _by_replay(name: str, then: AtLoad, now: AtLoad) -> tuple[Action, str] | None:
    """Decide by a log that neither a candidate nor what runs now holds: for the one that keeps the bounds for clearly
    more requests. None: no replay, or about as many.
    """
    if then.share_kept is None or now.share_kept is None or abs(then.share_kept - now.share_kept) < CLEAR:
        return None
    if then.share_kept > now.share_kept:
        return "change", "it keeps more of your load"
    kept = kept_in_words(then)
    return "keep", f"neither holds your load, and the best other plan, {name}, keeps the bounds only for {kept}"


def _rate(plan: Plan, ranges: Mapping[str, tuple[float, float]]) -> Ranged:
    low, high = ranges.get("rate_per_s" if plan.estimate.capacity is not None else "throughput_rps", (None, None))
    return Ranged(value=rate_of(plan), low=low, high=high)


NEAR = 2.0
"""Queues settle after about this number of requests, divided by the square of the share of capacity that is idle."""


def _simulated_s(plan: Plan) -> float | None:
    found = plan.estimate.capacity
    if found is None or not found.rate_per_s or plan.workload.sessions is not None:
        return None
    idle = max(1 - found.rate_per_s / plan.estimate.throughput_rps, 0.0)
    return found.num_requests / found.rate_per_s if found.num_requests * idle**2 < NEAR else None


def name_of(plan: Plan) -> str:
    """Return policy and placement, as in "chunked, 2 replicas of TP4" or "orca, 4 stages of TP2"."""
    if plan.cluster.num_devices == 1:
        return plan.policy.kind
    degrees = [stage.tp for stage in plan.stages]
    stages = f"TP{degrees[0]}" if len(degrees) == 1 else f"{len(degrees)} stages of TP{'/'.join(map(str, degrees))}"
    if len(degrees) > 1 and len(set(degrees)) == 1:
        stages = f"{len(degrees)} stages of TP{degrees[0]}"
    return f"{plan.policy.kind}, {'' if plan.replicas == 1 else f'{plan.replicas} replicas of '}{stages}"


def _would_change(
    plan: Plan, profile: Profile, offer: Offer, gain: Gain | None, carried: CarriedLoad | None, wanted: float
) -> list[str]:
    found, low, load = list[str](), offer.rate_per_s.low, offer.at_load
    if carried is not None and load is not None and load.holds and load.share_kept is not None:
        # A log comes in waves, so the highest rate of evenly spread arrivals says little.
        found += _growths(plan, profile, carried, load.confidence, wanted)
    elif load is not None and load.holds and offer.rate_per_s.value > load.rate_per_s:
        found.append(f"a load above {per_s(offer.rate_per_s.value, offer.sessions)}")
    elif low is not None and low <= 0 < offer.rate_per_s.value:
        found.append("steps as slow as the slowest of earlier predictions: then no rate keeps the bounds")
    each = None if gain is None else gain.per_device or gain.factor
    if gain is not None and gain.worst and each is not None and (each.low or 1) < 1 <= each.value:
        found.append(f"{gain.worst}: then it serves less for each device than what runs now")
    if (edge := plan.estimate.mixing_edge) is not None:
        now = 0.0 if plan.engine is None else plan.engine.mixing
        side = "above" if edge.mixing > now else "below"
        found.append(f"prompts in a step slowing its decodes by {side} {100 * edge.mixing:.0f}%: then {edge.policy}")
    return found


def _growths(plan: Plan, profile: Profile, load: CarriedLoad, confidence: float | None, wanted: float) -> Iterator[str]:
    """Yield the least growth of a log that is found to change what is said of a plan."""
    lost, sure = load.too_much(plan, profile), load.sure_up_to(plan, profile, wanted)
    if confidence is not None and confidence >= wanted and sure is not None and sure < (lost or GROWTHS[-1]):
        least = max(1.01, ceil(100 * sure) / 100)
        yield f"growth to {least:g} times this load: then it is held less surely than wanted"
    elif lost is not None:
        held = max((growth for growth in GROWTHS if growth < lost), default=1.0)
        still = f" (at {held:g} times it is)" if held > 1 else ""
        yield f"growth to {lost:g} times this load: then it is not held{still}"


def _measurement(
    plan: Plan, offer: Offer, path: str | None, port: int | None = None, key: str = ""
) -> Measurement | None:
    if plan.profile.source == "measured" or offer.needs_xgpt or engine_command(plan) is None:
        return None
    port = port or (offer.processes[0].port if offer.processes else PORT)
    return Measurement(
        narrows=f"step times, on which all figures rest{'' if path else ' (-o current.json writes the file)'}",
        command=f"{key}xgpt check http://127.0.0.1:{port} --plan {path or 'current.json'}",
    )
