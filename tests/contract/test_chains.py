"""Requests that share the K/V of equal blocks: compiled runs and the engine agree to the nanosecond."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import xgpt
from tests.rings import examples
from xgpt.core.schema import PlanDraft, Profile
from xgpt.core.trace_blocks import TracePrefixes
from xgpt.core.workload import TraceLengths
from xprofiler.store import profile_of
from xsimulator.replay import _counted, _stepwise, _times

LONGEST = 90


def _log(count: int, rate: float, seed: int, size: int) -> TraceLengths:
    """Conversations that begin with one of three system prompts, and agents that send one prompt many times."""
    rng = np.random.default_rng(seed)
    said: list[tuple[int, ...]] = [tuple(range(100 * i, 100 * i + int(rng.integers(1, 12)))) for i in range(1, 4)]
    inputs, outputs, prompts, ends, new = [], [], [], [], 10_000
    for _ in range(count):
        begin = said[int(rng.integers(max(0, len(said) - 8), len(said)) if rng.random() < 0.7 else rng.integers(3))]
        length = len(begin) * size + int(rng.integers(1, 5 * size))
        if rng.random() < 0.2:
            length = max(1, len(begin) * size - int(rng.integers(0, size)))  # a part of a known prompt
        output = int(rng.integers(1, LONGEST)) if rng.random() < 0.9 else 1
        blocks, whole = -(-length // size), -(-(length + output) // size)
        ids = (*begin, *range(new, new + blocks))[:blocks]
        later = (*ids[length // size :], *range(new + blocks, new + whole))[: whole - length // size]
        new += blocks + whole
        is_known = rng.random() < 0.6
        inputs.append(length), outputs.append(output), prompts.append(ids), ends.append(later if is_known else ())
        if is_known:
            said.append((*ids[: length // size], *later)[: (length + output - 1) // size] or begin)
    times = np.cumsum(rng.exponential(1 / rate, count))
    return TraceLengths(np.array(inputs), np.array(outputs), times, TracePrefixes(size, tuple(prompts), tuple(ends)))


@pytest.fixture(scope="module", params=[None, "vllm", "sglang"])
def planned(request: pytest.FixtureRequest) -> tuple[list[PlanDraft], Profile]:
    profile = xgpt.profile(model="llama-3.1-8b", cluster="h100x1")
    given = {"model": "llama-3.1-8b", "cluster": "h100x1", "workload": "azure-conv", "latency_bound_s": None}
    kinds = product(("chunked", "orca"), ("reserve", "quantile")) if request.param is None else [("chunked", None)]
    plans = [
        xgpt.plan(**given, objective="saturated", policy=policy, kv=kv, profile=profile, engine=request.param)
        for policy, kv in kinds
    ]
    return plans, profile_of(plans[0])


@pytest.mark.parametrize("size", [16, pytest.param(64, marks=pytest.mark.long), 24])
def test_counts_and_engine_agree(planned: tuple[list[PlanDraft], Profile], size: int) -> None:
    plans, profile = planned
    for seed, plan, blocks in product(range(examples(2, 1)), plans, (4000, 500, 60)):
        log = _log(examples(100, 50), 40.0, seed, size)
        least = -(-int((log.input + LONGEST).max()) // plan.block_size) + 1
        plan = plan.but(stages=tuple(stage.but(kv_blocks=max(blocks, least)) for stage in plan.stages))
        run = _counted(plan, profile, log, LONGEST, len(log.input))
        assert run is not None
        counted, engine = _times(plan, run, log), _stepwise(plan, profile, log, LONGEST, len(log.input))
        assert (counted.ttft_s == engine.ttft_s).all() and (counted.whole_s == engine.whole_s).all()
        assert run.state.requests["found"].sum() > 0
