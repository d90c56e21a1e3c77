"""Compare the policies, each at its best under one bound: predicted and, on this machine's devices, measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import floor
from typing import NamedTuple

import numpy as np

from xgpt.benchmark import Load, bench_plan
from xgpt.comparing.vllm_command import CurrentEngine, read_vllm_command
from xgpt.core.errors import InputError
from xgpt.core.progress import Progress
from xgpt.core.schema import BenchReport, ChunkedSettings, Plan, Profile
from xgpt.problems import resolve
from xgpt.requests import PlanRequest
from xgpt.resolve import load_engine
from xscheduler.objectives.best_plans import plan_each
from xscheduler.objectives.rates import predicted_rate, rate_of, with_capacities, with_capacity
from xscheduler.problem import Problem
from xscheduler.schedule import scheduler
from xscheduler.search import Method

RELAXATIONS = (1.25, 1.5, 2.0, None)
"""Factors by which the latency bound is relaxed to see what that gains; None: no bound."""


OnStart = Callable[[Plan], None]
"""A function that is given each plan before it is measured."""


class Gain(NamedTuple):
    """The factor by which the best plan's highest arrival rate exceeds that of the current deployment.

    Attributes:
        per_device: the same for each device.
        num_devices, current_devices: devices of the best plan, and of the current deployment.
    """

    arrivals: float
    per_device: float
    num_devices: int
    current_devices: int


@dataclass(frozen=True)
class Compared:
    """Every policy at its own best under one bound.

    Attributes:
        plans: the best plan of each policy, the best of all first.
        relaxed: the best plan under each looser latency bound, s; None: under none.
        current: the current deployment, scored as a plan; None: none was given.
        notes: assumptions about the current deployment.
        measured: figures of each plan measured on this machine, by policy.
    """

    plans: dict[str, Plan]
    relaxed: dict[float | None, Plan]
    current: Plan | None = None
    notes: tuple[str, ...] = ()
    measured: dict[str, BenchReport] = field(default_factory=dict)

    @property
    def best(self) -> Plan:
        """The best plan of all."""
        return next(iter(self.plans.values()))

    @property
    def gain(self) -> Gain | None:
        """The best plan's gain over the current deployment; None: none was given, or it keeps the bounds at no rate."""
        return None if self.current is None else gain_of(self.best, self.current)


def compare(
    request: PlanRequest,
    current: str | None = None,
    measured: Load | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    on_start: OnStart = lambda plan: None,
) -> Compared:
    """Plan each policy at its best; if asked for, score the current deployment and measure the plans on this machine.

    Args:
        current: the `vllm serve` command of the current deployment.
        measured: the load with which each plan is measured; None: no plan is measured.
        seed: seed of that load's requests.

    Raises:
        InputError: a name is not known, plans for another machine are to be measured, or the current deployment
            cannot run the same work as the plans.
        InfeasibleError: nothing keeps the constraint.
        MachineError: this machine cannot be profiled, or a server does not start.
    """
    problem = resolve(request, progress)
    if measured is not None and not problem.cluster.is_local:
        accepted = "only plans for the machine at hand (`cluster=local`) can be measured"
        raise InputError("measure", problem.cluster.name, accepted)
    running = None if current is None else read_vllm_command(current, problem.cluster)
    scored = None if running is None else score_current(problem, running)
    plans = with_capacities(plan_each(problem, request.policy, request.search), problem.profile)
    return Compared(
        plans=plans,
        relaxed=relax(problem, request.search),
        current=scored,
        notes=() if running is None else running.notes,
        measured={}
        if measured is None
        else measure_each(plans, problem.profile, measured, np.random.default_rng(seed), on_start),
    )


def score_current(problem: Problem, current: CurrentEngine) -> Plan:
    """Return a plan with the settings and figures of a running engine: chunked prompts, K/V taken as requests grow.

    Raises:
        InputError: it takes more devices than the cluster has, runs in another dtype than the plans, or refuses
            requests of the workload.
        InfeasibleError: the model does not fit on them.
    """
    check_current(problem, current)
    device = problem.cluster.device
    if current.usable_memory is not None:
        device = device.model_copy(update={"usable_memory": current.usable_memory})
    cluster = problem.cluster.model_copy(update={"device": device})
    deployed = problem.engine
    if cluster.device.type == "gpu":
        deployed = (deployed or load_engine("vllm")).model_copy(update={"max_batch": current.max_num_seqs})
    of = scheduler(replace(problem, cluster=cluster, kv="quantile", deployed=deployed))
    ep_degree = 1 if problem.model.experts is None else current.ep_degree
    placement = of.candidates.uniform_placement(
        "chunked", current.tp_degree, current.num_stages, current.replicas, ep_degree
    )
    micro = placement.microbatches
    step_tokens = np.asarray([current.max_num_batched_tokens])
    most = floor(of.candidates.space("chunked", placement).capacity_beside(step_tokens)[0])
    settings = ChunkedSettings(
        # A step is a micro-batch's; vLLM's limits are those of a step, and of all requests inside.
        token_budget=micro * current.max_num_batched_tokens,
        max_batch=max(1, min(current.max_num_seqs, most)),
        **placement.fixed,
    )
    plan = of.score(settings, placement)
    return with_capacity(plan, problem.profile, predicted_rate(plan, problem.profile))


def gain_of(best: Plan, current: Plan) -> Gain | None:
    """Return a plan's gain over the current deployment; None: the latter keeps the bounds at no arrival rate."""
    if rate_of(current) <= 0:
        return None
    devices = [plan.num_devices for plan in (best, current)]
    gain = rate_of(best) / rate_of(current)
    return Gain(gain, gain * devices[1] / devices[0], devices[0], devices[1])


def gain_in_words(best: Plan, current: Plan) -> str:
    """Return a sentence that compares the arrival rates, in all and for each device, of plan and current deployment."""
    gain = gain_of(best, current)
    if gain is None:
        return "what runs now keeps the bounds at practically no arrival rate"
    return (
        f"{best.policy.kind} keeps the bounds up to {rate_of(best):.4g} requests/s on {gain.num_devices} devices, what "
        f"runs now up to {rate_of(current):.4g} on {gain.current_devices}: {gain.per_device:.2f} times as many for "
        f"each device, {gain.arrivals:.2f} times in all"
    )


def check_current(problem: Problem, current: CurrentEngine) -> None:
    """Refuse a current deployment that cannot be compared with plans for the same work.

    Raises:
        InputError: it takes more devices than the cluster has, runs in another dtype than the plans, or refuses
            requests of the workload.
    """
    cluster, lengths = problem.cluster, problem.workload
    if current.num_devices > cluster.num_devices:
        raise InputError("current", f"{current.num_devices} devices", f"{cluster.name} has {cluster.num_devices}")
    # On a CPU vLLM runs in what the config says, and plans are in float32: their step times are all there is.
    runs_in = current.dtype or (problem.model.default_dtype if cluster.device.type == "gpu" else problem.profile.dtype)
    if runs_in != problem.profile.dtype:
        eight = "" if problem.profile.dtype != "float8" else ", or give it --quantization fp8 --kv-cache-dtype fp8"
        accepted = f"the plans are in {problem.profile.dtype}: compare with `dtype={runs_in}`{eight}"
        raise InputError("current: --dtype", runs_in, accepted)
    longest = lengths.input.lengths[-1] + lengths.output.lengths[-1]
    if current.max_model_len is not None and current.max_model_len < longest:
        accepted = f"requests of {lengths.name} have up to {longest} tokens, which it refuses"
        raise InputError("current: --max-model-len", current.max_model_len, accepted)


def relax(problem: Problem, search: Method) -> dict[float | None, Plan]:
    """Return the best plan under each relaxed latency bound, in s (None: no bound); empty if there is no bound."""
    bound = problem.constraint.latency_bound_s
    if bound is None:
        return {}
    best = {}
    for factor in RELAXATIONS:
        relaxed = None if factor is None else factor * bound
        loose = problem.constraint.model_copy(update={"latency_bound_s": relaxed})
        best[relaxed] = next(iter(plan_each(problem.under(loose), search=search).values()))
    return best


def measure_each(
    plans: dict[str, Plan],
    profile: Profile,
    load: Load,
    rng: np.random.Generator,
    on_start: OnStart = lambda plan: None,
) -> dict[str, BenchReport]:
    """Run each plan on the same engine, one after the other, with the same load.

    Args:
        profile: the profile of all plans.
        on_start: is called with each plan before it runs, so that its prediction is on record.
    """
    reports = {}
    for kind, plan in plans.items():
        on_start(plan)
        reports[kind] = bench_plan(plan, load, rng, profile=profile)[0]
    return reports
