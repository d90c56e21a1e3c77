"""Compare the best plans of all policies under a bound by prediction and, on this machine, by measurement."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Any

import numpy as np

from xgpt.benchmark import Load, bench_plan
from xgpt.checkpoints import hub
from xgpt.comparing.assumptions import keeps_current, ranges
from xgpt.comparing.current import CurrentEngine, planned_with
from xgpt.comparing.flags import VARIABLE, Given
from xgpt.comparing.launched import read_current
from xgpt.comparing.own_times import answer
from xgpt.comparing.scoring import engine_name, has_types, memory_note, runs_in, score_current, types_of
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.progress import Progress
from xgpt.core.schema import (
    BenchReport,
    ClusterSpec,
    Plan,
    Profile,
    SearchMethod,
)
from xgpt.core.schema.documents import GainOutput, RangeOutput
from xgpt.core.schema.plan import rate_of
from xgpt.problems import resolve
from xgpt.requests import PlanRequest
from xgpt.resolve import load_cluster, load_trace
from xscheduler.objectives.best_plans import found_each, plan_each
from xscheduler.objectives.capacities import with_capacities
from xscheduler.problem import Problem
from xsimulator.front import fronted, most_rate

RELAXATIONS = (1.25, 1.5, 2.0, None)
"""Factors by which the latency bound is loosened to show the gain. None means no bound."""


NOT_RELAXED = "the gains from a looser bound could not be computed"
OnStart = Callable[[Plan], None]
"""A function that is called with each plan before the plan is measured."""


@dataclass(frozen=True)
class Compared:
    """The best plan of every policy under one bound, compared with the current deployment if one is given.

    Attributes:
        plans: the best plan of each policy, the best of all first.
        relaxed: the best plan under each looser latency bound. Keys are bounds in s, and None means no bound.
        current: a plan with the current deployment's settings and predicted figures, or None if no deployment was
            given.
        notes: assumptions about the current deployment.
        ranges: for each policy, the lowest and the highest gain per device over the current deployment under all
            assumptions.
        measured: for each policy, the figures of its plan that were measured on this machine.
        answer: lines of text that say whether a log's late requests come from the current deployment's settings.
        kept: options of the current deployment's command that a plan's command repeats.
    """

    plans: dict[str, Plan]
    relaxed: dict[float | None, Plan]
    current: Plan | None = None
    notes: tuple[str, ...] = ()
    measured: dict[str, BenchReport] = field(default_factory=dict)
    ranges: dict[str, RangeOutput] = field(default_factory=dict)
    answer: tuple[str, ...] = ()
    kept: Given = field(default_factory=dict)

    @property
    def best(self) -> Plan:
        """The best plan of all."""
        return next(iter(self.plans.values()))

    @property
    def keeps_current(self) -> bool:
        """Whether to keep the current deployment, because every plan loses under some assumption."""
        return keeps_current(self.ranges)

    @property
    def gain(self) -> GainOutput | None:
        """The best plan's gain over the current deployment. None means that no deployment was given, or that the
        deployment keeps the bounds at no arrival rate.
        """
        return None if self.current is None else gain_of(self.best, self.current)


def compare(
    request: PlanRequest,
    current: str | None = None,
    measured: Load | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    on_start: OnStart = lambda plan: None,
    on_found: Callable[[Compared], None] = lambda found: None,
) -> Compared:
    """Find each policy's best plan. If requested, predict the current deployment's figures, and measure the plans on
    this machine.

    Args:
        current: the command that starts the current deployment, or a Compose file, pod or Helm values with this
            command.
        measured: the load with which each plan is measured. None means that no plan is measured.
        seed: seed of the requests in `measured`.
        on_found: called with the preliminary result, before looser bounds are tried and before plans are measured.

    Raises:
        InputError: a name is not known, plans to measure are for another machine, or the current deployment cannot
            serve the same requests as the plans.
        InfeasibleError: no schedule keeps the constraint.
        MachineError: this machine cannot be profiled, or a server does not start.
    """
    cluster = request.cluster if isinstance(request.cluster, ClusterSpec) else load_cluster(request.cluster)
    running = None if current is None else read_current(current, cluster)
    notes = () if running is None else running.notes
    serves = None if running is None or "model" in request.model_fields_set else running.model
    if running is not None and running.model is None and not {"model", "config"} & request.model_fields_set:
        raise InputError("current", current, "it names no model: add it to the command, or give `model`")
    if serves is not None and "$" in serves:
        raise InputError("current", serves, VARIABLE)
    if serves is not None and (request.config is None or hub.is_id(serves)):
        request = request.but(model=serves)
    if running is not None and request.engine is None and request.profile is None and cluster.device.type == "gpu":
        engine = engine_name(running)
        request = request.but(engine=engine)
        notes = (f"the plans are for {engine}, the engine that the command starts", *notes)
    if running is not None and running.version is not None:
        scored_as = engine_name(running)
        if not f"{running.version}.".startswith(scored_as.rpartition("-")[2] + "."):
            notes = (*notes, f"the command starts version {running.version}, which is scored as {scored_as}")
    if running is not None and running.drafts is not None:
        request, note = planned_with(request, running.drafts)
        notes = (note, *notes)
    problem = resolve(request, progress)
    if measured is not None and not problem.cluster.is_local:
        accepted = "only plans for this machine (`cluster=local`) can be measured"
        raise InputError("measure", problem.cluster.name, accepted)
    scored, scored_profile, trace = None, problem.profile, None
    if running is not None:
        trace = load_trace(request.workload) if isinstance(request.workload, str) else None
        longest = None if trace is None else int((trace.input + trace.output).max())
        running_problem = _as_run(request, problem, running, progress)
        if running_problem.engine != problem.engine:
            assert running_problem.engine is not None
            ours = "no particular engine" if problem.engine is None else problem.engine.name
            scored_with = f"the current deployment is scored with {running_problem.engine.name}, the plans with {ours}"
            notes = (*notes, scored_with)
        if not has_types(problem, running) and running_problem is not problem:
            weights, kv = types_of(problem, running)
            notes = (
                *notes,
                f"only the current deployment is scored with weights in {weights} and K/V in {kv}",
            )
        try:
            scored = score_current(running_problem, running, longest)
        except InfeasibleError as error:
            number, of = running.num_devices, problem.cluster.num_devices
            if error.binding == "memory" and number < of:
                error.args = (f"{error}; the current deployment uses {number} of the {of} devices",)
            raise
        scored_profile = running_problem.profile
        notes = (*notes, *_front_note(scored, running.api_servers), *memory_note(running_problem, running))
    found_plans = with_capacities(found_each(problem, request.policy, request.search), problem.profile)
    plans = {
        kind: replace(one, draft=fronted(one.draft, request.api_servers)).plan for kind, one in found_plans.items()
    }
    gains: dict[str, RangeOutput] = {}
    if scored is not None and rate_of(scored) > 0:
        gains = ranges(plans, problem.profile, scored, scored_profile, trace)
        kind = max(plans, key=lambda kind: gains[kind].least)  # the first of equal ones
        notes = (*notes, *_what_holds(plans, gains, kind))
        plans = {kind: plans[kind], **plans}
    best, lines = next(iter(plans.values())), list[str]()
    if scored is not None:
        lines = answer(scored, scored_profile, best, problem, trace, running_problem)
    kept = {} if running is None or best.engine is None or not runs_in(running, best.engine) else running.kept
    found = Compared(plans, {}, scored, notes, ranges=gains, answer=tuple(lines), kept=kept)
    on_found(found)
    try:
        found = replace(found, relaxed=relax(problem, request.search, best))
    except Exception as error:  # the comparison is complete without this table
        if os.environ.get("XGPT_TRACEBACK"):
            raise
        reason = f"{NOT_RELAXED}: {type(error).__name__}: {error}"
        found = replace(found, notes=(*found.notes, reason))
    if measured is not None:
        rng = np.random.default_rng(seed)
        found = replace(found, measured=measure_each(plans, problem.profile, measured, rng, on_start))
    return found


def _front_note(current: Plan, num_servers: int | None) -> list[str]:
    """Return a note if a deployment's API servers handle fewer requests per second than its devices. Otherwise return
    nothing.
    """
    most = inf if num_servers is None else most_rate(current, num_servers)
    if most >= rate_of(current):
        return []
    needed = ceil(rate_of(current) / most_rate(current, 1))
    return [
        f"API servers: {num_servers} in the current deployment, for about {most:.3g} requests/s of these lengths; its "
        f"predicted rate needs --api-server-count {needed}"
    ]


def _what_holds(plans: dict[str, Plan], gains: dict[str, RangeOutput], kind: str) -> list[str]:
    """Return up to two notes on worst cases: that the plan `kind` gains more in its worst case than the first plan
    does, and that no plan gains in its worst case.
    """
    first, lines = next(iter(plans)), []
    if kind != first:
        lines.append(
            f"{first} gains more under the plan's assumptions, but only {_in_words(gains[first])} if they vary; in "
            f"its worst case {kind} gains more, so it comes first"
        )
    if keeps_current(gains):
        lines.append(
            f"no plan gains under all assumptions (worst case: {gains[kind].worst}): keep the current deployment "
            "unless you measure a gain"
        )
    return lines


def _as_run(
    request: PlanRequest, problem: Problem, current: CurrentEngine, progress: Progress | None = None
) -> Problem:
    """Return the problem for the current deployment's engine, data types and devices, with step times for these."""
    if problem.cluster.device.type != "gpu" or request.profile is not None:
        return problem
    changes: dict[str, Any] = {}
    if problem.engine is not None and not runs_in(current, problem.engine):
        changes["engine"] = engine_name(current)
    if not has_types(problem, current):
        changes |= dict(zip(("dtype", "kv_dtype"), types_of(problem, current), strict=True))
    if current.ep_degree > current.tp_degree and problem.model.experts is not None:  # replicas share the experts
        nodes, rest = divmod(current.num_devices, problem.cluster.devices_per_node)
        size = {"num_nodes": nodes} if not rest else {"num_nodes": 1, "devices_per_node": rest} if not nodes else {}
        if size and current.num_devices < problem.cluster.num_devices:
            changes["cluster"] = problem.cluster.but(**size)
    return resolve(request.but(**changes), progress) if changes else problem


def gain_of(best: Plan, current: Plan) -> GainOutput | None:
    """Return a plan's gain in arrival rate over the current deployment, or None if the deployment keeps the bounds at
    no arrival rate.
    """
    if rate_of(current) <= 0:
        return None
    devices = [plan.num_devices for plan in (best, current)]
    gain = rate_of(best) / rate_of(current)
    per_device = gain * devices[1] / devices[0]
    return GainOutput(arrivals=gain, per_device=per_device, num_devices=devices[0], current_devices=devices[1])


def gain_in_words(best: Plan, current: Plan, range_: RangeOutput | None = None) -> str:
    """Return a sentence that compares the arrival rates of a plan and the current deployment, in total and per device.

    Args:
        range_: lowest and highest gain per device under all assumptions, or None if not known.
    """
    gain = gain_of(best, current)
    if gain is None:
        return "the current deployment breaks the bounds at practically any arrival rate"
    return (
        f"{best.policy.kind} keeps the bounds up to {rate_of(best):.4g} requests/s on {gain.num_devices} devices, the "
        f"current deployment up to {rate_of(current):.4g} on {gain.current_devices}: {gain.per_device:.2f} times as "
        f"many requests/s per device, {gain.arrivals:.2f} times in all"
        + ("" if range_ is None else f"; if assumptions vary, per device {_in_words(range_)}")
    )


def _in_words(gain: RangeOutput) -> str:
    return f"{gain.least:.2f} to {gain.most:.2f} times as many (worst case: {gain.worst})"


def relax(problem: Problem, search: SearchMethod, plan: Plan) -> dict[float | None, Plan]:
    """Return the best plan under each looser latency bound. Keys are bounds in s, and None means no bound. Return
    nothing if the problem has no latency bound.

    Args:
        plan: the best plan under the original bound. It keeps every looser bound, too.
    """
    bound = problem.constraint.latency_bound_s
    if bound is None:
        return {}
    best: dict[float | None, Plan] = {}
    for factor in RELAXATIONS:
        relaxed = None if factor is None else factor * bound
        loose = problem.constraint.but(latency_bound_s=relaxed)
        looser = next(iter(plan_each(problem.under(loose), search=search).values()))
        plan = max(plan, looser, key=rate_of)
        best[relaxed] = plan
    return best


def measure_each(
    plans: dict[str, Plan],
    profile: Profile,
    load: Load,
    rng: np.random.Generator,
    on_start: OnStart = lambda plan: None,
) -> dict[str, BenchReport]:
    """Measure each plan in xgpt's engine on this machine, one after the other. Return reports by policy.

    All plans share the load's settings, such as its workload and arrival rate, but each gets requests of its own, since
    `rng` draws anew for each plan.

    Args:
        profile: the profile of all plans.
        on_start: called with each plan before the plan runs. A caller can then show the prediction first.
    """
    reports = {}
    for kind, plan in plans.items():
        on_start(plan)
        reports[kind] = bench_plan(plan, load, rng, profile=profile)[0]
    return reports
