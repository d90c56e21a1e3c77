"""Fit a measured profile to the steps of a served engine. These take longer, because of the endpoint and the clients.

For a profile, single steps are timed on an idle machine. A served engine shares cores with the front and with clients,
chunks prompts, and writes K/V memory for the first time. In vLLM, xgpt's scheduler also runs between the steps. So a
short load is served, and each of the profile's tables is multiplied by the factor that fits the load's steps best
(`xsimulator.calibrate`).
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xgpt.benchmark import Drawn, Load, replayed
from xgpt.core.errors import InfeasibleError, XgptError
from xgpt.core.machine import num_cores
from xgpt.core.progress import Progress, silent
from xgpt.core.schema import (
    SERVED,
    ClusterSpec,
    Constraint,
    EngineKind,
    Histogram,
    Jitter,
    ModelSpec,
    Plan,
    Profile,
    ProfileRef,
    Workload,
)
from xgpt.core.schema.step_log import StepRecord
from xgpt.core.workload import ArrivalProcess, sample
from xprofiler.others import NOTABLE, Others
from xscheduler.objectives.best_plans import plan_each
from xscheduler.problem import Problem
from xsimulator.calibrate import PARTS, Steps, corrected, fit, steps_of

STAGES = (0.35, 0.7, 0.95)
"""Stages of the load: arrival rate as a share of the throughput at saturation."""
INPUTS, OUTPUTS = (16, 64, 128, 256, 448), (8, 32, 64)
"""Lengths of the load's prompts and outputs. All lengths are equally frequent."""
LEAST_REQUESTS = 12
LEAST_STEPS = 100
MOST_LOADS = 2
"""Largest number of loads. If other processes use more than `NOTABLE` of the cores during a load, another load is
served, unless the machine was already busy before.
"""


class _Load(NamedTuple):
    """The short load for an engine and a kind of device: step sizes of typical plans, seconds for each arrival rate,
    and the largest number of requests.
    """

    token_budget: int
    max_batch: int
    stage_s: float
    most_requests: int


LOADS = {
    ("xgpt", "cpu"): _Load(64, 32, 4.0, 400),
    ("xgpt", "gpu"): _Load(1024, 128, 4.0, 2000),
    ("vllm", "cpu"): _Load(64, 32, 12.0, 400),
    ("vllm", "gpu"): _Load(2048, 512, 4.0, 2000),
}
"""The load for each engine and kind of device. On a CPU, vLLM executes few steps in a second."""
QUANTILES = 100
STALL = 4.0
PRIOR = 0.01


def as_served(
    profile: Profile, spec: ModelSpec, checkpoint: Path | None, cluster: ClusterSpec, progress: Progress | None = None
) -> Profile:
    """Serve a short load on this machine, and return the profile fitted to the load's steps.

    The profile is returned unchanged for several devices, for an encoder-decoder, if the load fails, and if it has too
    few steps. For a profile of vLLM, one GPU of the machine serves the load. The fitted profile's `others` lists the
    other processes that used cores during the measurement or, if these disturbed more, during the load.
    """
    if profile.engine == "vllm" and cluster.device.type == "gpu":
        cluster = cluster.but(devices_per_node=1)
    if cluster.num_devices > 1 or spec.is_encoder_decoder:
        return profile
    progress = progress or silent
    progress(0, 1, "serving a short load")
    try:
        plan = _plan(profile, spec, checkpoint, cluster)
        others, log = _quieter_load(plan, progress, 1 if profile.is_brief else MOST_LOADS)
        steps = steps_of(plan, profile, log)
    except XgptError as error:
        progress(1, 1, f"the short load could not be served: {error}")
        return profile
    if (count := len(steps.seconds)) < LEAST_STEPS:
        progress(
            1, 1, f"the profile is not fitted to the short load: it has {count} steps, and {LEAST_STEPS} are needed"
        )
        return profile
    busier = max(profile.others, others, key=lambda cores: sum(cores.values()))
    return _fitted(profile, steps).but(others=busier)


def _quieter_load(plan: Plan, progress: Progress, most: int) -> tuple[dict[str, float], list[StepRecord]]:
    """Serve the load, and serve it again while other processes disturb it, at most `most` times in all. For the least
    disturbed load, return how many cores each other process used, and the steps.
    """
    loads: list[tuple[dict[str, float], list[StepRecord]]] = []
    for _ in range(most):
        watched = Others()
        log = _steps_of_load(plan)
        loads.append((watched.cores(), log))
        if len(loads) == most or sum(loads[-1][0].values()) <= NOTABLE * num_cores():
            break
        progress(len(loads), most, "other processes used the cores: serving the short load again")
    return min(loads, key=lambda load: sum(load[0].values()))


def _steps_of_load(plan: Plan) -> list[StepRecord]:
    """This works even in a thread with a running event loop, as in a notebook."""
    rng, rate, sizes = np.random.default_rng(0), plan.estimate.throughput_rps, _load_for(plan.profile, plan.cluster)
    stage_s = min(sizes.stage_s, sizes.most_requests / (rate * sum(STAGES)))
    stages = [(share * rate, stage_s) for share in STAGES]
    arrivals = ArrivalProcess.at([*stages[:-1], (stages[-1][0], None)])
    count = max(LEAST_REQUESTS, round(sum(each * seconds for each, seconds in stages)))
    drawn = Drawn(*sample(plan.workload, count, rng), arrivals.times(count, rng), max(OUTPUTS))
    engine: EngineKind = "vllm" if plan.profile.engine == "vllm" else "xgpt"
    serve = partial(replayed, plan, Load(count, arrivals=arrivals), rng, drawn, engine=engine)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return serve().log
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(serve).result().log


def _load_for(profile: Profile | ProfileRef, cluster: ClusterSpec) -> _Load:
    return LOADS[profile.engine or "xgpt", cluster.device.type]


def _plan(profile: Profile, spec: ModelSpec, checkpoint: Path | None, cluster: ClusterSpec) -> Plan:
    def equally_often(lengths: tuple[int, ...]) -> Histogram:
        some = sorted({min(length, spec.max_context // 4) for length in lengths})
        return Histogram(lengths=tuple(some), probabilities=(1 / len(some),) * len(some))

    load = _load_for(profile, cluster)
    problem = Problem(
        model=spec,
        checkpoint=None if checkpoint is None else str(checkpoint),
        cluster=cluster,
        workload=Workload(name="served", input=equally_often(INPUTS), output=equally_often(OUTPUTS)),
        profile=profile,
        constraint=Constraint(latency_bound_s=None),
    )
    max_batch = load.max_batch
    while True:
        fixed = {"token_budget": load.token_budget, "max_batch": max_batch}
        try:
            (plan,) = plan_each(replace(problem, fixed=fixed), "chunked").values()
            return plan
        except InfeasibleError:
            if max_batch == 1:
                raise
            max_batch //= 2


def _fitted(profile: Profile, steps: Steps) -> Profile:
    """Return the profile with each table multiplied by a fitted factor. Its jitter is that of the load's steps.

    A few seconds of load do not determine each table's factor separately, so a prior keeps all factors close to a
    common one. Stalled steps are ignored.
    """
    counted = steps.where(steps.seconds < STALL * steps.parts.sum(axis=1))
    pace = float(counted.seconds.sum() / counted.parts.sum())
    factors = fit(counted, pace, PRIOR)
    predicted = counted.parts @ factors
    rest = float(counted.seconds.sum() / predicted.sum())
    levels = (np.arange(QUANTILES) + 0.5) / QUANTILES
    jitter = Jitter(
        seconds=float(np.mean(counted.seconds)),
        ratios=tuple(np.quantile(counted.seconds / predicted / rest, levels).round(4).tolist()),
    )
    by = {part: round(rest * float(factor), 4) for part, factor in zip(PARTS, factors, strict=True)}
    text = f"fitted to {len(steps.seconds)} steps of a served load, which took {pace:.2f} times as long as single steps"
    return corrected(profile, by, SERVED, text).but(jitter=jitter)
