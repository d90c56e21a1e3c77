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
        InputError: it takes more devices than the cluster has.
        InfeasibleError: the model does not fit on them.
    """
    from math import floor

    import numpy as np

    from xgpt.app.planning import scheduler

    if current.num_devices > subject.cluster.num_devices:
        raise InputError(
            "--current", f"{current.num_devices} devices", f"{subject.cluster.name} has {subject.cluster.num_devices}"
        )
    of = scheduler(subject, constraint, "branch-and-bound", "quantile")
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
