"""The profile of vLLM, from the log of a vLLM whose step times are known."""

from __future__ import annotations

import pytest

from xgpt.resolve import load_cluster, load_model
from xgpt.schema import ModelSpec
from xgpt.schema.step_log import StepRecord
from xprofiler import vllm
from xprofiler.passes import PASSES, in_passes
from xprofiler.vllm import NUM_DECODES, SHORT, Point
from xsimulator.cost import CostModel

SLOW = 10.0
"""How much slower everything is in the first pass."""


@pytest.fixture
def spec() -> ModelSpec:
    return load_model("opt-125m")[0]


def seconds(encode: list[int], contexts: list[int]) -> float:
    """Of a step: tokens through the layers, a row of the head for each request, attention beyond short lengths."""
    attention = sum(1e-6 * (n * n - SHORT * n) for n in encode) + sum(2e-6 * (n - SHORT) for n in contexts)
    return 0.03 + 4e-4 * (sum(encode) + len(contexts)) + 5e-4 * (len(encode) + len(contexts)) + attention


def log_of(jobs: list[Point], num_slow: int) -> list[StepRecord]:
    """What vLLM writes down for these groups, the first of which it is slow at."""
    log: list[StepRecord] = []
    now_ns, number = 0, 0
    for index, job in enumerate(jobs):
        ids = tuple(range(number, number + job.batch))
        number += job.batch
        prompts = [job.length] * job.batch
        if job.kind == "encode":
            steps = [(tuple((id_, 0, job.length) for id_ in ids), (), seconds(prompts, []))]
            steps.append(((), ids, seconds([], [n + 1 for n in prompts])))
        else:
            steps = [((), ids, seconds([], prompts)) for _ in range(NUM_DECODES)]
        for encode, decode, taken in steps:
            taken_ns = round(1e9 * taken * (SLOW if index < num_slow else 1))
            log.append(StepRecord(now_ns, now_ns + taken_ns, encode, decode, (), (), ()))
            now_ns += taken_ns
        now_ns += 10**9  # the next group has yet to come
    return log


def test_what_a_step_costs_is_read_off_the_log(spec: ModelSpec) -> None:
    once = vllm.points(spec.max_context)
    jobs = in_passes(once, lambda point: point.prompt_tokens)
    assert len(jobs) < PASSES * len(once)  # long prompts are not in every pass
    times = vllm._times(log_of(jobs, num_slow=len(once)), jobs)
    profile = vllm.fit(spec, load_cluster("local"), "float32", times, {})
    cost = CostModel(spec, profile)
    for batch, context in ((1, SHORT), (8, 1024), (32, 128), (128, SHORT), (1, 2048)):
        contexts = [context] * batch
        assert cost.step([], contexts, batch) == pytest.approx(seconds([], contexts), rel=0.01)
    for batch, length in ((1, SHORT), (64, SHORT), (1, 1024), (4, 256), (4, 512)):
        encode = [(0, length, 1)] * batch
        assert cost.step(encode, [], batch) == pytest.approx(seconds([length] * batch, []), rel=0.01)
    assert profile.spread == pytest.approx(0.0, abs=1e-6)
