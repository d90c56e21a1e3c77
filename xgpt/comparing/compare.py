"""Compare the best plans of all policies under a bound by prediction and, on this machine, by measurement."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil, floor, inf
from typing import Any

import numpy as np

from xgpt.benchmark import Load, bench_plan
from xgpt.checkpoints import hub
from xgpt.comparing.assumptions import keeps_current, ranges
from xgpt.comparing.current import CurrentEngine, check_model, planned_with
from xgpt.comparing.flags import VARIABLE, Given
from xgpt.comparing.launched import read_current
from xgpt.comparing.own_times import answer
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.io import config_names
from xgpt.core.progress import Progress
from xgpt.core.schema import (
    BenchReport,
    ChunkedSettings,
    ClusterSpec,
    DType,
    EngineSpec,
    Plan,
    Precision,
    Profile,
    SearchMethod,
)
from xgpt.core.schema.documents import GainOutput, RangeOutput
from xgpt.core.schema.plan import rate_of
from xgpt.problems import resolve
from xgpt.requests import PlanRequest
from xgpt.resolve import load_cluster, load_engine, load_trace, version_of
from xscheduler.objectives.best_plans import plan_each
from xscheduler.objectives.capacities import predicted_rate, with_capacities, with_capacity
from xscheduler.problem import Problem
from xscheduler.schedule import scheduler
from xsimulator.front import most_rate, with_api_servers

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
        if not _has_types(problem, running) and running_problem is not problem:
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
        notes = (*notes, *_front_note(scored, running.api_servers))
    plans = with_capacities(plan_each(problem, request.policy, request.search), problem.profile)
    plans = {kind: with_api_servers(plan, request.api_servers) for kind, plan in plans.items()}
    gains: dict[str, RangeOutput] = {}
    if scored is not None and rate_of(scored) > 0:
        gains = ranges(plans, problem.profile, scored, scored_profile, trace)
        kind = max(plans, key=lambda kind: gains[kind].least)  # the first of equal ones
        notes = (*notes, *_what_holds(plans, gains, kind))
        plans = {kind: plans[kind], **plans}
    best, lines = next(iter(plans.values())), list[str]()
    if scored is not None:
        lines = answer(scored, scored_profile, best, problem, trace, running_problem)
    kept = {} if running is None or best.engine is None or not _runs_in(running, best.engine) else running.kept
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


def engine_name(current: CurrentEngine) -> str:
    """Return the name of the shipped engine with which to score a deployment: the newest version that is not newer than
    the deployment's or, if there is none, the oldest version.
    """
    if current.version is None:
        return load_engine(current.framework).name
    known = [name for name in config_names("engines") if name.startswith(f"{current.framework}-")]
    up_to = [name for name in known if version_of(name) <= version_of(f"x-{current.version}")]
    return max(up_to, key=version_of) if up_to else min(known, key=version_of)


def _runs_in(current: CurrentEngine, engine: EngineSpec) -> bool:
    """Return whether a deployment's engine is this engine, in any version."""
    return engine.framework == load_engine(engine_name(current)).framework


def types_of(problem: Problem, current: CurrentEngine) -> tuple[DType, DType]:
    """Return the data types of a GPU deployment: that of weights and that of K/V."""
    dtype = current.dtype or problem.model.default_dtype
    return dtype, current.kv_dtype or ("bfloat16" if dtype == "float8" else dtype)


def _as_run(
    request: PlanRequest, problem: Problem, current: CurrentEngine, progress: Progress | None = None
) -> Problem:
    """Return the problem for the current deployment's engine, data types and devices, with step times for these."""
    if problem.cluster.device.type != "gpu" or request.profile is not None:
        return problem
    changes: dict[str, Any] = {}
    if problem.engine is not None and not _runs_in(current, problem.engine):
        changes["engine"] = engine_name(current)
    if not _has_types(problem, current):
        changes |= dict(zip(("dtype", "kv_dtype"), types_of(problem, current), strict=True))
    if current.ep_degree > current.tp_degree and problem.model.experts is not None:  # replicas share the experts
        nodes, rest = divmod(current.num_devices, problem.cluster.devices_per_node)
        size = {"num_nodes": nodes} if not rest else {"num_nodes": 1, "devices_per_node": rest} if not nodes else {}
        if size and current.num_devices < problem.cluster.num_devices:
            changes["cluster"] = problem.cluster.but(**size)
    return resolve(request.but(**changes), progress) if changes else problem


def _has_types(problem: Problem, current: CurrentEngine) -> bool:
    profile = problem.profile
    planned = profile.dtype, profile.kv_dtype or Precision.of(profile.dtype, problem.cluster.device.type).kv
    return types_of(problem, current) == planned


def score_current(problem: Problem, current: CurrentEngine, longest: int | None = None) -> Plan:
    """Return a plan with the settings and the predicted figures of a running engine. The engine is assumed to chunk
    prompts, and to allocate K/V as requests grow.

    Args:
        longest: length of the workload's longest request in tokens, input and output together. None means the longest
            input plus the longest output.

    Raises:
        InputError: as in `check_current`, or the engine uses drafts with pipeline stages.
        InfeasibleError: the model does not fit on the devices, or K/V memory cannot hold the longest request.
    """
    check_current(problem, current, longest)
    if current.drafts is None:
        problem = replace(problem, speculation=None)
    elif current.num_stages > 1:
        raise InputError("current", f"{current.num_stages} stages", "xgpt scores drafts only without pipeline stages")
    if current.text_only:
        problem = replace(problem, model=problem.model.but(tower_params=0))
    device = problem.cluster.device
    engine = None if problem.engine is None else current.as_started(problem.engine)
    deployed, share = engine, current.usable_memory
    if device.type == "gpu":
        deployed = (engine or load_engine(engine_name(current))).but(max_batch=current.max_num_seqs)
        share = share or deployed.memory_share
    cluster = problem.cluster.but(device=device if share is None else device.but(usable_memory=share))
    chooser = scheduler(replace(problem, cluster=cluster, kv="quantile", engine=engine, deployed=deployed))
    ep_degree = 1 if problem.model.experts is None else current.ep_degree
    placement = chooser.candidates.uniform_placement(
        "chunked", current.tp_degree, current.num_stages, current.replicas, ep_degree
    )
    micro = placement.microbatches
    step_tokens = current.step_tokens(problem.model.max_context)
    space = chooser.candidates.space("chunked", placement)
    if cluster.device.type == "gpu":
        steps = max(current.num_stages, 1 + (deployed is not None and deployed.schedules_ahead))
        holds = space.limits.memory.longest_request(step_tokens, steps * step_tokens)
        _check_room(current, problem, holds, longest or _longest(problem))
    most = floor(space.capacity_beside(np.asarray([step_tokens]))[0])
    settings = ChunkedSettings(
        # A step runs one micro-batch. vLLM limits the tokens of a step, and the number of all running requests.
        token_budget=micro * step_tokens,
        max_batch=max(1, min(current.max_num_seqs, most)),
        **placement.fixed,
    )
    plan = chooser.score(settings, placement)
    return with_capacity(plan, problem.profile, predicted_rate(plan, problem.profile))


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


def _check_room(current: CurrentEngine, problem: Problem, holds: float, longest: int) -> None:
    """Check that the deployment's K/V memory lets it start, and holds the workload's longest request.

    Args:
        holds: length in tokens of the longest request that fits into an otherwise empty K/V memory.
        longest: length in tokens of the workload's longest request.

    Raises:
        InfeasibleError: K/V memory is too small.
    """
    model, needs, will = problem.model, longest, "refuse requests"
    where = f"the longest request of {problem.workload.name}"
    if not current.shortens:
        needs, will = current.max_model_len or model.max_context, "not start"
        where = "--max-model-len" if current.max_model_len else f"the context of {model.name}"
    if holds < needs:
        message = (
            f"the current deployment would {will}: its K/V memory holds {holds:.0f} tokens, but {where} needs "
            f"{needs}; give shorter requests or a smaller context, more devices, or the engine more of their memory"
        )
        raise InfeasibleError(message, binding="memory")


def check_current(problem: Problem, current: CurrentEngine, longest: int | None = None) -> None:
    """Check that the current deployment can be compared with plans for the same requests.

    Raises:
        InputError: the deployment needs too many devices, serves another model, has data types without step times or a
            division of experts that cannot be scored, or rejects requests of the workload.
    """
    cluster, lengths = problem.cluster, problem.workload
    check_model(current, problem.model.name)
    if current.quantization is not None and problem.model.quantization is None and problem.profile.dtype != "float8":
        accepted = (
            f"the weights of {problem.model.name} are in {problem.profile.dtype}: set `model` to the quantised "
            "checkpoint that is served"
        )
        raise InputError("current: --quantization", current.quantization, accepted)
    if current.num_devices > cluster.num_devices:
        raise InputError(
            "current",
            f"{current.num_devices} devices",
            f"{cluster.name} has only {cluster.num_devices}: give a larger `cluster`",
        )
    cuts_experts = current.framework == "vllm" and current.replicas > 1 and current.ep_degree <= current.tp_degree
    if cuts_experts and problem.model.experts is not None:
        accepted = (
            "with several replicas vLLM divides each expert among all of them, which xgpt cannot score: add "
            "--enable-expert-parallel"
        )
        raise InputError("current: --data-parallel-size", current.replicas, accepted)
    # On a CPU vLLM uses the config's dtype, but step times are known only for the plans' dtype, float32.
    is_known = current.dtype in (None, problem.profile.dtype)
    if cluster.device.type == "gpu":
        is_known = _has_types(problem, current)
    if not is_known:
        weights, kv = types_of(problem, current)
        accepted = f"the step times are for {problem.profile.dtype}: compare with `dtype={weights}` and `kv_dtype={kv}`"
        raise InputError("current: --dtype", f"{weights}, K/V in {kv}", accepted)
    longest = longest or _longest(problem)
    if current.max_model_len is not None and current.max_model_len < longest:
        accepted = (
            f"{lengths.name} has requests of {longest} tokens, which the engine would reject: give at least {longest}"
        )
        raise InputError("current: --max-model-len", current.max_model_len, accepted)


def _longest(problem: Problem) -> int:
    """Return the sum of a workload's longest input and longest output, in tokens."""
    return problem.workload.input.lengths[-1] + problem.workload.output.lengths[-1]


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
