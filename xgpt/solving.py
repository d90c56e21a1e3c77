"""Make plans for a request: choose cluster and devices, plan each policy, and simulate arrival rates. Also plan a day's
fleet.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.progress import Progress
from xgpt.core.refusals import refusal
from xgpt.core.schema import Constraint, Plan, PlanDraft, Profile, Recommendation
from xgpt.core.schema.fleet import FleetPlan
from xgpt.core.schema.plan import rate_of
from xgpt.core.schema.profile import KNOWN_ERROR
from xgpt.core.workload import TraceLengths
from xgpt.deciding.fleets import with_confidence
from xgpt.deciding.keeping import in_larger_batches, keeping_most, with_larger_batches
from xgpt.deciding.load import CarriedLoad, carried
from xgpt.deciding.ranges import ranges_of
from xgpt.deciding.recommend import own_first, recommend
from xgpt.deciding.sizing import Sizing, cheapest_verified, comes_first, of_verified_shape, surest_first
from xgpt.deciding.verified import unverified_shape
from xgpt.problems import model_of, resolve, turns_in
from xgpt.requests import FleetRequest, PlanRequest, as_plan_request, plan_request
from xgpt.resolve import load_of, load_sessions
from xgpt.serving.checking import check_planned
from xprofiler.store import profile_of
from xscheduler.expression import maximised
from xscheduler.fleet.day_load import Day, cut, read_day
from xscheduler.fleet.following import LOOK_S, FollowedFleet, simulate_day
from xscheduler.fleet.planning import FleetCluster, FleetModel, kept_by_interval, plan_day, share_kept
from xscheduler.fleet.replica_kinds import Candidate
from xscheduler.fleet.scaling import Follower, Scaling
from xscheduler.found import Found
from xscheduler.objectives.best_plans import check_held, found_each, kinds_of
from xscheduler.objectives.capacities import mixing_edge, predicted_rate, with_capacities, with_capacity
from xscheduler.objectives.reusing import FindEach, with_reuse
from xscheduler.objectives.saturation import with_simulated_figures
from xscheduler.objectives.sessions import found_in_sessions
from xscheduler.objectives.sizing import ClusterChoice, Fewest, cheapest, fewest_devices
from xscheduler.placement import Placement
from xscheduler.problem import Problem
from xscheduler.schedule import NOT_SEARCHED, Scheduler
from xsimulator.front import fronted
from xsimulator.run import joint_lengths
from xsimulator.session_rate import SharesKept, replay_sessions

AGAIN = "measure again with `xgpt profile` when the machine is idle, or set --headroom"


@dataclass(frozen=True)
class Planned:
    """The plans for a request.

    Attributes:
        ahead: the objective's value by number of draft tokens, for the numbers that were tried. 0 means no draft.
        beside: the best plan of another shape, or None if it was not searched, or there is none. It may be on another
            cluster, whose profile is `beside_profile`.
        steady: plans of higher rates, if others keep more of a log that none holds, and those of other shapes, if
            none holds the load as surely as wanted.
        refusal: why no schedule keeps the constraint. The plans are then those that keep most of the load. None: some
            schedule keeps it.
    """

    request: PlanRequest
    problem: Problem
    plans: dict[str, Plan]
    choices: tuple[ClusterChoice, ...]
    planning_s: float = 0.0
    ahead: dict[int, float] = field(default_factory=dict)
    fewest: Fewest | None = None
    load: CarriedLoad | None = None
    beside: Plan | None = None
    beside_profile: Profile | None = None
    steady: tuple[Plan, ...] = ()
    refusal: InfeasibleError | None = None

    @property
    def others(self) -> tuple[Plan, ...]:
        """Further plans of the same policies."""
        return (*(() if self.beside is None else (self.beside,)), *self.steady)

    @property
    def recommendation(self) -> Recommendation:
        assert self.best.recommendation is not None
        return self.best.recommendation

    def told(self, recommendation: Recommendation) -> Planned:
        best = next(iter(self.plans))
        plans = {**self.plans, best: self.plans[best].told(recommendation)}
        return replace(self, plans=plans)

    def recommend(self, **asked: Any) -> Recommendation:
        """Return what to run. Arguments are those of `xgpt.deciding.recommend` on the present deployment."""
        return recommend(
            self.plans,
            self.problem.profile,
            load=self.load,
            searched=self.problem.max_devices or self.problem.cluster.num_devices,
            tried=() if self.fewest is None else self.fewest.tried,
            choices=self.choices,
            beside=self.beside,
            beside_profile=self.beside_profile,
            steady=self.steady,
            wanted=self.request.confidence,
            nearest={} if self.refusal is None else self.refusal.nearest,
            **asked,
        )

    @property
    def best(self) -> Plan:
        return next(iter(self.plans.values()))


def solve(request: PlanRequest, progress: Progress | None = None, path: str = "plan.json") -> Planned:
    """Return the plans for a request.

    If the workload is a log with times, and the request states neither a rate nor devices, the plan uses the fewest
    devices that carry the log.

    Args:
        path: where the plan will be written, for commands in the recommendation.

    Raises:
        InputError: a name is not known, a file is broken, or the profile does not belong to the request.
        InfeasibleError: no schedule keeps the constraint.
        MachineError: the machine cannot be measured, or cannot run the plan that was made for it.
    """
    planned = sought(request, progress)
    return refused_or(planned, planned.told(planned.recommend(path=path)))


Told = TypeVar("Told")


def refused_or(planned: Planned, told: Told) -> Told:
    """Return what is told about plans.

    Raises:
        InfeasibleError: no schedule keeps the constraint. What is told is the error's `answer`.
    """
    if planned.refusal is None:
        return told
    planned.refusal.answer = told
    raise planned.refusal


def sought(request: PlanRequest, progress: Progress | None = None) -> Planned:
    """Return the plans for a request as `solve` does. If no schedule keeps the constraint, return those that keep most
    of the load, with the refusal, if there is a load.
    """
    started, log = time.perf_counter(), load_of(request.workload, request.growth, model_of(request)[0])
    trace, load = None if log is None else log.requests, carried(log, request.arrival_rate_per_s)
    if (turns := turns_in(request)) is not None:  # a log is then replayed in sessions, and a stated rate is theirs
        rate = request.arrival_rate_per_s
        trace, load = None, None if rate is None else carried(None, turns * rate)
    resolved = _resolve(request, load, progress)
    try:
        planned = _planned(request, resolved, load, trace, progress)
    except InfeasibleError as error:
        profile = resolved.problem.profile
        error.warnings += (f"{profile.unrest}; {AGAIN}",) if profile.is_restless else ()
        raise
    if resolved.problem.cluster.is_local:
        check_planned(planned.best)
    return replace(planned, planning_s=time.perf_counter() - started)


def plan_again(plan: Plan, problem: Problem, load: CarriedLoad) -> Planned:
    """Return the plans for a log as `solve` does, with the policies and settings that a plan pins.

    Args:
        problem: the problem of the plan's model and devices under the log's lengths.

    Raises:
        InfeasibleError: no schedule keeps the constraint.
    """
    asked: dict[str, Any] = {"policy": plan.pinned.policy, "api_servers": None}
    asked |= {"fix": plan.pinned.fixed} if plan.pinned.fixed else {}
    asked |= {} if plan.admission.order in ("fcfs", "in-time") else {"order": plan.admission.order}
    request = plan_request(**asked)
    resolved = _for_load(request, problem, load, None)
    return _planned(request, resolved, load, None if load.log is None else load.log.requests, None)


def _planned(
    request: PlanRequest,
    resolved: _Resolved,
    load: CarriedLoad | None,
    trace: TraceLengths | None,
    progress: Progress | None,
) -> Planned:
    try:
        if resolved.refusal is not None:
            raise resolved.refusal
        return _found(request, resolved, load, trace, progress)
    except InfeasibleError as error:
        if load is None or not error.nearest or resolved.problem.constraint.classes:
            raise
        asked = resolved.problem.constraint.but(arrival_rate_per_s=None, objective="arrivals")
        nearest = resolved.problem.under(asked.but(**error.nearest))
        if progress is not None:  # the search's own lines would read as those of the bounds that were asked
            progress(0, 1, "searching the plan that keeps most of the load, under the nearest bounds")
        try:
            planned = _found(request, _Resolved(nearest), load, trace, None, asked)
        except InfeasibleError:  # the user asked for other bounds than these
            raise error from None
        # A plan for the nearest bounds may keep those that were asked, too.
        rates = map(rate_of, (planned.best, *planned.others))
        is_kept = _is_at_any_rate(error) and max(rates) > 0
        return planned if is_kept else replace(planned, refusal=error)


def _is_at_any_rate(error: InfeasibleError) -> bool:
    """Return whether no schedule keeps the bounds, and not only at the asked rate."""
    return bool(error.nearest) and "arrival_rate_per_s" not in error.nearest


def _found(
    request: PlanRequest,
    resolved: _Resolved,
    load: CarriedLoad | None,
    trace: TraceLengths | None,
    progress: Progress | None,
    asked: Constraint | None = None,
) -> Planned:
    """Return the plans for a problem.

    Args:
        asked: the constraint by which they are then judged. None means the problem's.
    """
    problem, found, ahead = _with_best_draft(request, resolved.problem, resolved.found, progress)
    find = _find_each(request)
    if problem.workload.sessions is None:
        found = with_reuse(find, problem, trace, found)
    elif isinstance(request.workload, str):
        of_log = request.workload
        found = {k: replace(one, draft=in_log(one.draft, problem.profile, of_log)) for k, one in found.items()}
    found = own_first(found)
    first = next(iter(found.values()))
    other = resolved.beside or first.at_side
    judged = None if resolved.fewest is None else resolved.fewest.judged
    if load is not None and judged is None:
        found, judged = surest_first(found, problem, load, request.confidence)
        best = next(iter(found.values()))
        other = other if best is first else first.draft
        if unverified_shape(best.draft):
            drafts = best.draft, other
            other = of_verified_shape(first, drafts, problem, load, request.confidence) or other
    kind, best = next(iter(found.items()))
    if other is not None and resolved.beside_profile is None and comes_first(other, best.draft, problem.profile, load):
        found, other = found | {kind: replace(best, draft=other)}, best.draft
    if load is not None and other is not None and resolved.beside_profile is None:
        other = in_larger_batches(other, problem, load)
    is_unsure = judged is not None and judged.confidence < request.confidence
    shapes = next(iter(found.values())).other_shapes if is_unsure else []  # of which more replicas may do
    if asked not in (None, problem.constraint):
        problem = problem.under(asked)
        found = {kind: Found(_judged(one.draft, problem), NOT_SEARCHED) for kind, one in found.items()}
        other, shapes = None if other is None else _judged(other, problem), []
    steady = tuple[PlanDraft, ...]()
    if load is not None and resolved.fewest is None:
        found, other, steady = keeping_most(found, other, problem, load)
    offered = [next(iter(found.values())).draft, *(() if other is None else (other,)), *steady]
    known = {(Placement.of(draft).degrees, draft.replicas) for draft in offered}
    steady += tuple(draft for draft in shapes if (Placement.of(draft).degrees, draft.replicas) not in known)
    paired = trace if load is None or load.log is None else None  # a replay has the log's own pairs of lengths
    plans = _annotate(found, problem, paired, request.api_servers)

    def also(draft: PlanDraft, profile: Profile = problem.profile) -> Plan:
        told = fronted(draft.with_estimate(**ranges_of(draft, profile)), request.api_servers)
        return told.proven(next(iter(found.values())).ceiling)

    return Planned(
        request,
        problem,
        plans,
        resolved.choices,
        ahead=ahead,
        fewest=resolved.fewest,
        load=load,
        beside=None if other is None else also(other, resolved.beside_profile or problem.profile),
        beside_profile=resolved.beside_profile,
        steady=tuple(map(also, steady)),
    )


def _judged(draft: PlanDraft, problem: Problem) -> PlanDraft:
    asked = draft.but(constraint=problem.constraint).with_estimate(capacity=None)
    return with_capacity(asked, problem.profile)


def in_log(draft: PlanDraft, profile: Profile, name: str) -> PlanDraft:
    """Return a schedule for sessions with the shares of a log's turns and sessions that keep the bounds under it."""
    log, sessions = load_sessions(name), draft.estimate.sessions
    if log is None or log.timestamp_s is None or sessions is None:
        return draft
    run = replay_sessions(draft, profile, log)
    kept = SharesKept.of(run, run.every, draft.constraint)
    return draft.with_estimate(sessions=sessions.but(log_turns_kept=kept.turns, log_sessions_kept=kept.sessions))


def _find_each(request: PlanRequest, progress: Progress | None = None) -> FindEach:
    how: dict[str, Any] = {"policy": request.policy, "search": request.search, "order": request.order}

    def find(problem: Problem) -> dict[str, Found]:
        if problem.workload.sessions is not None:
            return found_in_sessions(problem, **how, progress=progress)
        return with_larger_batches(found_each(problem, **how, progress=progress), problem)

    return find


def _with_best_draft(
    request: PlanRequest, problem: Problem, known: dict[str, Found] | None, progress: Progress | None
) -> tuple[Problem, dict[str, Found], dict[int, float]]:
    """Find the best number of draft tokens. Return the problem and each policy's best schedule with this number, and
    `Planned.ahead`.

    Unless the request states the number, numbers are tried from 0 upwards until two in a row gain nothing.

    Args:
        known: the schedules of the problem, if they have been searched.
    """
    most, plans_of = problem.speculation, _find_each(request, progress)
    if most is None or request.speculative_tokens is not None:
        return problem, known or plans_of(problem), {}
    kinds_of(problem, request.policy, request.order)  # raises before the search without drafts, which takes seconds
    best, found, failed = 0, dict[int, tuple[Problem, dict[str, Found]]](), None
    ahead: dict[int, float] = {}
    for tokens in range(most.tokens + 1):
        tried = replace(problem, speculation=most.ahead(tokens) if tokens else None)
        try:
            found[tokens] = tried, plans_of(tried)
        except InfeasibleError as error:
            failed = error
            continue
        ahead[tokens] = maximised(next(iter(found[tokens][1].values())).draft)
        if best not in ahead or ahead[tokens] > ahead[best]:
            best = tokens
        elif tokens >= best + 2:
            break
    if best not in found:
        assert failed is not None
        raise failed
    return *found[best], ahead


def _annotate(
    found: dict[str, Found], problem: Problem, trace: TraceLengths | None, num_servers: int | None
) -> dict[str, Plan]:
    profile, found = problem.profile, with_capacities(found, problem.profile)
    best = next(iter(found.values()))
    draft, figures = best.draft, ranges_of(best.draft, profile)
    if profile.is_restless:
        figures["warnings"] = (*draft.estimate.warnings, _busy_machine_warning(draft, problem))
    best = best.estimating(
        mixing_edge=mixing_edge([one.draft for one in found.values()], profile),
        joint_lengths=None if trace is None else joint_lengths(draft, profile, trace),
        **figures,
    )
    found |= {next(iter(found)): best}
    return {kind: replace(one, draft=fronted(one.draft, num_servers)).plan for kind, one in found.items()}


def _busy_machine_warning(plan: PlanDraft, problem: Problem) -> str:
    profile, constraint = problem.profile, plan.constraint
    text = f"{profile.unrest}; the headroom is {100 * constraint.headroom:.0f}%; {AGAIN}"
    usual = KNOWN_ERROR[profile.source]
    if constraint.headroom > usual and constraint.maximises_arrivals:
        loose = plan.but(constraint=constraint.but(headroom=usual))
        most, now = predicted_rate(loose, profile), predicted_rate(plan, profile)
        if most and now and most >= 1.01 * now:
            text += (
                f"; with {100 * usual:.0f}% headroom this plan would sustain about {100 * (most / now - 1):.0f}% more"
            )
    return text


def with_settings(plan: Plan, profile: Profile, settings: Mapping[str, Any]) -> Plan:
    """Return a plan on the same stages with other settings of its policy. See `xgpt.with_settings`."""
    kind = type(plan.policy)
    data = {**plan.policy.model_dump(), **settings}
    try:
        policy = kind.model_validate(data)
    except ValidationError as error:
        raise refusal(error, kind, data) from None
    problem = Problem.of(plan, profile)
    draft: PlanDraft = Scheduler(problem).score(policy, Placement.of(plan))
    admission = plan.admission.but(max_running=draft.admission.max_running)
    draft = draft.but(admission=admission, engine=plan.engine, pinned=plan.pinned, seed=plan.seed)
    if not plan.constraint.maximises_arrivals:
        draft = with_simulated_figures(draft, profile)
    found: dict[str, Found] = {policy.kind: Found(draft, NOT_SEARCHED)}
    plans = _annotate(found, problem, None, plan.api_servers)
    return plans[policy.kind].told(recommend(plans, profile))


class _Resolved(NamedTuple):
    problem: Problem
    choices: tuple[ClusterChoice, ...] = ()
    fewest: Fewest | None = None
    found: dict[str, Found] | None = None
    beside: PlanDraft | None = None
    beside_profile: Profile | None = None
    refusal: InfeasibleError | None = None


def _resolve(request: PlanRequest, load: CarriedLoad | None, progress: Progress | None) -> _Resolved:
    check_held(request.policy, request.fix)
    if request.among is None:
        return _for_load(request, resolve(request, progress), load, progress)
    if load is None:
        raise InputError("among", ", ".join(request.among), NEEDS_RATE)
    find = _find_each(request)
    each = [{"cluster": name, "price": price, "among": None} for name, price in request.among.items()]
    sizings = [
        Sizing(resolve(request.but(**update), progress), load, find, request.confidence, progress) for update in each
    ]
    judges = [sizing.judge for sizing in sizings]
    choices = tuple(cheapest([sizing.problem for sizing in sizings], judges, request.confidence))
    best = choices[0]
    if best.fewest is None:
        raise InfeasibleError(
            f"among: no cluster sustains {load.rate_per_s:.3g} requests/s. "
            + " ".join(f"{choice.problem.cluster.name}: {choice.why_not}." for choice in choices),
            binding="arrival_rate_per_s",
        )
    # clusters on which the fewest devices are verified need no further search
    of = {sizing.problem.cluster.name: sizing for sizing in sizings}
    able = [(bool(each.fewest.judged.unverified), of[each.problem.cluster.name]) for each in choices if each.fewest]
    ordered = [sizing for _, sizing in sorted(able, key=lambda each: each[0])]
    return _sized(of[best.problem.cluster.name], best.fewest, choices, ordered)


def _for_load(request: PlanRequest, problem: Problem, load: CarriedLoad | None, progress: Progress | None) -> _Resolved:
    """Return a problem on the fewest devices that hold a load, or on all that it has."""
    is_asked = request.devices == "auto"
    if load is None or not (is_asked or _follows_log(request, problem, load)):
        if is_asked:
            raise InputError("devices", "auto", NEEDS_RATE)
        return _Resolved(problem)
    sizing = Sizing(problem, load, _find_each(request), request.confidence, progress)
    try:
        fewest = fewest_devices(problem.cluster.num_devices, sizing.judge, request.confidence)
        return _sized(sizing, fewest)
    except InfeasibleError as error:
        if is_asked:
            raise
        refusal = error if _is_at_any_rate(error) else None
        known = sizing.found(problem.cluster.num_devices) if load.window and problem == sizing.problem else None
        return _Resolved(problem, found=known, refusal=refusal)


def _sized(
    sizing: Sizing, fewest: Fewest, choices: tuple[ClusterChoice, ...] = (), able: Sequence[Sizing] = ()
) -> _Resolved:
    """Return a problem on the fewest devices. If measurements do not verify the plan on these, and devices have prices,
    the cheapest plan that they verify stands beside it.

    Args:
        able: all clusters that hold the load. Empty means this one.
    """
    problem, beside = replace(sizing.problem, max_devices=fewest.number), sizing.beside(fewest.number)
    is_priced = problem.cluster.price_per_device_hour is not None and bool(fewest.judged.unverified)
    verified = cheapest_verified(able or [sizing]) if is_priced else None
    profile = None
    if verified is not None:
        profile, beside = verified[0].problem.profile, verified[1]
    return _Resolved(problem, choices, fewest, sizing.found(fewest.number), beside, profile)


NEEDS_RATE = "it needs a load: give `arrival_rate_per_s`, or a log with times as `workload`"


def _follows_log(request: PlanRequest, problem: Problem, load: CarriedLoad) -> bool:
    states = request.arrival_rate_per_s or request.devices or request.fix or problem.speculation
    several = problem.cluster.num_devices > 1 and not problem.cluster.is_local
    return not states and several and load.log is not None and problem.constraint.maximises_arrivals


def plan_fleet_of(day: Day, request: FleetRequest, progress: Progress | None = None) -> FleetPlan:
    """Return the cheapest fleet for `day`. `request.trace` is ignored, since `day` has been read already.

    Raises:
        InputError: an argument is not accepted.
        InfeasibleError: no replica keeps the bounds, or the devices cannot serve the load.
        MachineError: this machine cannot be measured.
    """
    model = model_of(as_plan_request(request, objective="arrivals"))[0]
    day = day.within(model)
    intervals = cut(day, request.interval_s, model)
    among: Mapping[str, float | None] = request.among or {}
    if among and "cluster" in request.model_fields_set:
        raise InputError("among", ", ".join(among), "it already contains the clusters: leave `cluster` out")
    unknown = set(request.devices) - set(among) if isinstance(request.devices, dict) else set()
    if unknown:
        raise InputError("devices", min(unknown), "it is not a cluster of `among`")
    same: dict[str, Any] = {"workload": intervals.everything, "objective": "arrivals", "quantile": request.attain}
    clusters = []
    for named in [{"cluster": name, "price": price} for name, price in among.items()] or [{}]:
        of_cluster = as_plan_request(request, **same, **named)
        problem = resolve(of_cluster, progress)
        most = request.devices
        if isinstance(most, dict):
            most = most.get(str(named["cluster"]))
        clusters.append(FleetCluster(problem, of_cluster.policy, most))
    found = plan_day(
        day,
        intervals,
        clusters,
        interval_s=request.interval_s,
        least_stay_s=request.least_stay_s,
        startup_s=request.startup_s,
        least_replicas=request.least_replicas,
        slo_window=request.slo_window,
    )
    return with_confidence(found, {each.problem.cluster.name: each.problem.profile for each in clusters})


def follow_day(fleet: FleetPlan, trace: Path) -> FollowedFleet:
    spec = fleet.kinds[0].plan.model
    day = read_day(trace).within(spec)
    model = FleetModel(
        day,
        cut(day, fleet.interval_s, spec),
        tuple(Candidate(kind, profile_of(kind.plan, None)) for kind in fleet.kinds),
    )
    has_schedule, later_s = Scaling(fleet).has_schedule, 0.0
    if has_schedule and day.begin_s is not None and fleet.begin_s is not None:
        later_s = (day.begin_s - fleet.begin_s) % 86_400
    first = fleet.interval_at(later_s).replicas
    done = simulate_day(fleet, day.requests, day.seconds, Follower(fleet), LOOK_S, first, later_s)
    times = model.simulate_replicas(done.replicas)
    within = kept_by_interval(model, times, fleet.interval_s)
    return FollowedFleet(fleet, done, len(day.requests), share_kept(model, times), within, has_schedule)
