"""Every policy at its own best under one bound, predicted and, where the devices are here, measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xgpt.app.arrivals import predicted_rate, rate_of, with_capacity
from xgpt.errors import InputError
from xgpt.schema import BenchReport, ChunkedSettings, Constraint, KvPromise, Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from xgpt.app.current import Deployment
    from xgpt.app.planning import PolicyChoice, Subject

RELAXATIONS = (1.25, 1.5, 2.0, None)
"""By how much the latency bound is relaxed to see what that buys; None: no bound."""


def score_current(subject: Subject, constraint: Constraint, current: Deployment) -> Plan:
    """What an engine that was started like this does: chunked prompts, K/V blocks taken as requests grow.

    Raises:
        InputError: it takes more devices than the cluster has, runs in another dtype than the plans, or refuses
            requests of the workload.
        InfeasibleError: the model does not fit on them.
    """
    from dataclasses import replace
    from math import floor

    import numpy as np

    from xgpt.app.planning import scheduler

    check_current(subject, current)
    device = subject.cluster.device
    if current.usable_memory is not None:
        device = device.model_copy(update={"usable_memory": current.usable_memory})
    cluster = subject.cluster.model_copy(update={"device": device})
    of = scheduler(replace(subject, cluster=cluster), constraint, "branch-and-bound", "quantile")
    placement = of.uniform_placement("chunked", current.tp_degree, current.num_stages, current.replicas)
    micro = placement.microbatches
    step_tokens = np.asarray([current.max_num_batched_tokens])
    most = floor(of.space("chunked", placement).capacity_beside(step_tokens)[0])
    settings = ChunkedSettings(
        # A step is a micro-batch's; vLLM's limits are those of a step, and of all requests inside.
        token_budget=micro * current.max_num_batched_tokens,
        max_batch=max(1, min(current.max_num_seqs, most)),
        **placement.fixed,
    )
    plan = of.score(settings, placement)
    return with_capacity(plan, subject.profile, predicted_rate(plan, subject.profile))


def gain_in_words(best: Plan, current: Plan) -> str:
    """How the best plan compares with what runs now: arrival rates at which both keep the bounds, for each device."""
    devices = [plan.replicas * sum(stage.tp for stage in plan.stages) for plan in (best, current)]
    if rate_of(current) <= 0:
        return "what runs now keeps the bounds at no arrival rate worth speaking of"
    gain = rate_of(best) / rate_of(current)
    each = gain * devices[1] / devices[0]
    return (
        f"{best.policy.kind} keeps the bounds up to {rate_of(best):.4g} requests/s on {devices[0]} devices, what runs "
        f"now up to {rate_of(current):.4g} on {devices[1]}: {gain:.2f} times as many, {each:.2f} times for each device"
    )


def check_current(subject: Subject, current: Deployment) -> None:
    """Refuse what cannot be compared with plans for the same work.

    Raises:
        InputError: it takes more devices than the cluster has, runs in another dtype than the plans, or refuses
            requests of the workload.
    """
    cluster, lengths = subject.cluster, subject.workload
    if current.num_devices > cluster.num_devices:
        raise InputError("--current", f"{current.num_devices} devices", f"{cluster.name} has {cluster.num_devices}")
    # On a CPU vLLM runs in what the config says, and plans are in float32: their step times are all there is.
    runs_in = current.dtype or (subject.model.default_dtype if cluster.device.type == "gpu" else subject.profile.dtype)
    if runs_in != subject.profile.dtype:
        eight = "" if subject.profile.dtype != "float8" else ", or give it --quantization fp8 --kv-cache-dtype fp8"
        accepted = f"the plans are in {subject.profile.dtype}: compare with --dtype {runs_in}{eight}"
        raise InputError("--current: --dtype", runs_in, accepted)
    longest = lengths.input.lengths[-1] + lengths.output.lengths[-1]
    if current.max_model_len is not None and current.max_model_len < longest:
        accepted = f"requests of {lengths.name} have up to {longest} tokens, which it refuses"
        raise InputError("--current: --max-model-len", current.max_model_len, accepted)


def relax(
    subject: Subject, constraint: Constraint, policy: PolicyChoice, search: str, kv: KvPromise
) -> dict[float | None, Plan]:
    """The best plan for each relaxed latency bound (None: without one); empty where there is no bound to relax."""
    from xgpt.app.planning import plan_each

    bound = constraint.latency_bound_s
    if bound is None:
        return {}
    best = {}
    for factor in RELAXATIONS:
        relaxed = None if factor is None else factor * bound
        loose = constraint.model_copy(update={"latency_bound_s": relaxed})
        best[relaxed] = next(iter(plan_each(subject, loose, policy, search, kv).values()))
    return best


def measure_each(
    plans: dict[str, Plan],
    num_requests: int,
    rng: np.random.Generator,
    on_start: Callable[[Plan], None] = lambda plan: None,
) -> dict[str, BenchReport]:
    """Bench each plan on the same engine, one after the other.

    Args:
        on_start: told each plan before it runs, so that its prediction is on record first.
    """
    from xgpt.app.bench import bench_plan

    reports = {}
    for kind, plan in plans.items():
        on_start(plan)
        reports[kind] = bench_plan(plan, plan.workload, num_requests, rng)
    return reports
