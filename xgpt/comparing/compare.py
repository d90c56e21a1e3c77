"""Compare a current deployment with the plan to run instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, inf
from pathlib import Path
from typing import Any

from xgpt.checkpoints import hub
from xgpt.comparing.assumptions import ranges
from xgpt.comparing.current import CurrentEngine, planned_with
from xgpt.comparing.flags import VARIABLE, Given
from xgpt.comparing.launched import NONE_SET, read_current
from xgpt.comparing.own_times import why_late
from xgpt.comparing.scoring import (
    batch_note,
    cache_note,
    engine_name,
    has_types,
    kept_options,
    memory_note,
    runs_in,
    score_current,
    types_of,
)
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.io import load_json
from xgpt.core.progress import Progress
from xgpt.core.schema import ClusterSpec, Pinned, Plan, Profile, Recommendation
from xgpt.core.schema.documents import RangeOutput
from xgpt.core.schema.plan import rate_of
from xgpt.deciding.recommend import name_of
from xgpt.problems import resolve
from xgpt.reporting.plan_text import settings_text
from xgpt.requests import PlanRequest
from xgpt.resolve import load_cluster, load_of
from xgpt.solving import Planned, in_log, refused_or, solve, sought
from xscheduler.objectives.best_plans import plan_each
from xscheduler.problem import Problem
from xscheduler.schedule import NOT_SEARCHED
from xsimulator.front import most_rate

RELAXATIONS = (1.25, 1.5, 2.0, None)
"""Factors by which the bounds are loosened to show the gain. None means no bounds."""


@dataclass(frozen=True)
class Compared:
    """The plan to run and, if a current deployment is given, whether it should replace this deployment.

    Attributes:
        planned: the plans of `xgpt plan` for the same request.
        current: a plan with the current deployment's settings and predicted figures, or None if no deployment was
            given.
        ranges: for each policy, the lowest and the highest gain per device over the current deployment under all
            assumptions.
        answer: lines of text on why requests of a log are late under the current deployment.
        kept: options of the current deployment's command that a plan's command repeats.
    """

    planned: Planned
    current: Plan | None = None
    notes: tuple[str, ...] = ()
    ranges: dict[str, RangeOutput] = field(default_factory=dict)
    answer: tuple[str, ...] = ()
    kept: Given = field(default_factory=dict)

    @property
    def plans(self) -> dict[str, Plan]:
        """The best plan of each policy, the recommended one first."""
        return self.planned.plans

    @property
    def best(self) -> Plan:
        return self.planned.best

    @property
    def recommendation(self) -> Recommendation:
        return self.planned.recommendation

    @property
    def highest(self) -> Plan:
        """The plan of the highest rate under the given bounds, on at most the devices of the best plan. As under looser
        bounds, measurements need not verify it.
        """
        found, best = (*self.plans.values(), *self.planned.others), self.best
        here = (plan for plan in found if plan.cluster == best.cluster and plan.num_devices <= best.num_devices)
        return max(here, key=rate_of)

    @cached_property
    def relaxed(self) -> dict[float | None, Plan]:
        """The best plan under looser bounds, by the factor on all bounds. None means no bounds. Without bounds, for
        sessions, or if no plan keeps them, it is empty.
        """
        problem, plan = self.planned.problem, self.highest
        constraint = problem.constraint.but(arrival_rate_per_s=None)
        best: dict[float | None, Plan] = {}
        is_searched = constraint.bounds_latency and self.planned.refusal is None and problem.workload.sessions is None
        for factor in RELAXATIONS if is_searched else ():
            loose = problem.under(constraint.looser(factor))
            looser = next(iter(plan_each(loose, search=self.planned.request.search).values()))
            best[factor] = plan = max(plan, looser, key=rate_of)
        return best


def compare(
    request: PlanRequest,
    current: str | None = None,
    variables: Mapping[str, str] = NONE_SET,
    progress: Progress | None = None,
    path: str | None = None,
) -> Compared:
    """Find the plan to run. If requested, judge whether it should replace the current deployment.

    Args:
        current: the command that starts the current deployment, or a Compose file, pod or Helm values with this
            command.
        variables: values of shell variables that the command does not set.
        path: where the current deployment will be written as a plan, for the command of a measurement.

    Raises:
        InputError: a name is not known, or the current deployment cannot serve the same requests as the plans.
        InfeasibleError: no schedule keeps the constraint.
        MachineError: this machine cannot be profiled.
    """
    if variables and current is None:
        raise InputError("variables", ", ".join(variables), "they need `current`")
    if current is None:
        return Compared(solve(request, progress))
    cluster = request.cluster if isinstance(request.cluster, ClusterSpec) else load_cluster(request.cluster)
    return _with_current(request, current, variables, cluster, progress, path)


def in_engine_of(request: PlanRequest, running: CurrentEngine, cluster: ClusterSpec) -> PlanRequest:
    """Return a request for the engine that runs now, unless the request or its profile names one. A profile of this
    engine on this machine serves plans for the engine's own scheduler, too.
    """
    given, of_running = request.profile, cluster.device.type == "gpu"
    if request.engine is not None or (given is not None and not cluster.is_local):
        return request
    if given is not None:
        profile = load_json(Path(given), Profile, "profile") if isinstance(given, str) else given
        of_running = profile.engine == running.framework
    return request.but(engine=engine_name(running)) if of_running else request


def _with_current(
    request: PlanRequest,
    current: str,
    variables: Mapping[str, str],
    cluster: ClusterSpec,
    progress: Progress | None,
    path: str | None,
) -> Compared:
    running = read_current(current, cluster, variables)
    notes = running.notes
    if running.model is None and not {"model", "config"} & request.model_fields_set:
        raise InputError("current", current, "it names no model: add it to the command, or give `model`")
    serves = None if "model" in request.model_fields_set else running.model
    if serves is not None and "$" in serves:
        raise InputError("current", serves, VARIABLE)
    if serves is not None and (request.config is None or hub.is_id(serves)):
        request = request.but(model=serves)
    if (planned_in := in_engine_of(request, running, cluster)) is not request:
        request = planned_in
        notes = (f"the plans are for {request.engine}, the engine that the command starts", *notes)
    if running.version is not None:
        scored_as = engine_name(running)
        if not f"{running.version}.".startswith(scored_as.rpartition("-")[2] + "."):
            notes = (*notes, f"the command starts version {running.version}, which is scored as {scored_as}")
    if running.drafts is not None:
        request, note = planned_with(request, running.drafts)
        notes = (note, *notes)
    problem = resolve(request, progress)
    weights, kv = types_of(problem, running)
    states = request.profile is not None or {"dtype", "kv_dtype"} & request.model_fields_set
    if problem.cluster.device.type == "gpu" and not states and not has_types(problem, running):
        request = request.but(dtype=weights, kv_dtype=kv)
        problem = resolve(request, progress)
        notes = (*notes, f"the plans are in the types that run, weights in {weights} and K/V in {kv}")
    log = load_of(request.workload, request.growth, problem.model)
    trace = None if log is None else log.requests
    as_run = _as_run(request, problem, running, progress)
    if as_run.engine != problem.engine and as_run.engine is not None:
        ours = "no particular engine" if problem.engine is None else problem.engine.name
        notes = (*notes, f"the current deployment is scored with {as_run.engine.name}, the plans with {ours}")
    if not has_types(problem, running) and as_run is not problem:
        notes = (*notes, f"only the current deployment is scored with weights in {weights} and K/V in {kv}")
    longest = None if trace is None else int((trace.input + trace.output).max())
    try:
        scored = score_current(as_run, running, longest)
    except InfeasibleError as error:
        number, of = running.num_devices, problem.cluster.num_devices
        if error.binding == "memory" and number < of:
            error.args = (f"{error}; the current deployment uses {number} of the {of} devices",)
        raise
    notes = (*notes, *batch_note(scored, running), *_front_note(scored, running.api_servers))
    notes = (*notes, *cache_note(problem, running), *memory_note(as_run, running))
    planned = sought(request, progress)
    profiles = problem.profile, as_run.profile
    compared = planned.plans if planned.beside is None else {**planned.plans, name_of(planned.beside): planned.beside}
    is_best = as_run is problem and _is_same(scored, planned.best)
    if is_best:  # one deployment has one figure
        scored = planned.best.model_copy(update={"recommendation": None})
    elif scored.estimate.sessions is not None and isinstance(request.workload, str):
        scored = in_log(scored, profiles[1], request.workload).proven(NOT_SEARCHED)
    gains = ranges(compared, profiles[0], scored, profiles[1], trace) if rate_of(scored) > 0 and not is_best else {}
    kept = {} if planned.best.engine is None else kept_options(running, planned.best.engine)
    scored = scored.deployed(pinned=Pinned(policy=request.policy, fixed=dict(request.fix)))
    judged = planned.recommend(
        now=scored,
        now_profile=profiles[1],
        gains=gains,
        kept=kept,
        now_path=path,
        now_port=running.published,
        now_command=running.command,
    )
    late = () if planned.load is None else tuple(why_late(scored, planned.best, as_run, problem, planned.load))
    return refused_or(planned, Compared(planned.told(judged), scored, notes, ranges=gains, answer=late, kept=kept))


def _is_same(scored: Plan, plan: Plan) -> bool:
    """Return whether a command starts a plan."""
    one, other = (
        (settings_text(each), each.stages, each.cluster, each.engine, each.precision, each.speculation)
        for each in (scored, plan)
    )
    return one == other


def _front_note(current: Plan, num_servers: int | None) -> list[str]:
    most = inf if num_servers is None else most_rate(current, num_servers)
    if most >= rate_of(current):
        return []
    needed = ceil(rate_of(current) / most_rate(current, 1))
    return [
        f"API servers: {num_servers} in the current deployment, for about {most:.3g} requests/s of these lengths; its "
        f"predicted rate needs --api-server-count {needed}"
    ]


def _as_run(
    request: PlanRequest, problem: Problem, current: CurrentEngine, progress: Progress | None = None
) -> Problem:
    if problem.cluster.device.type != "gpu" or request.profile is not None:
        return problem
    changes: dict[str, Any] = {}
    if problem.engine is not None and not runs_in(current, problem.engine):
        changes["engine"] = engine_name(current)
    if not has_types(problem, current):
        changes |= dict(zip(("dtype", "kv_dtype"), types_of(problem, current), strict=True))
    is_known = problem.model.experts is None or (current.tp_degree, current.ep_degree) in problem.profile.groups
    shared = 0 if is_known else current.ep_degree
    return resolve(request.but(**changes), progress, shared) if changes or shared else problem
