"""Closed forms of rra and static against recursions without steady states: phase by phase, draw by draw."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.scenarios import problem
from xgpt.core.schema import Constant, Histogram, RraSettings, StaticSettings, Workload
from xgpt.core.workload import histogram
from xsimulator.costs.step_cost import LaneCost
from xsimulator.forecast import OneLaneModel, estimate
from xsimulator.lengths import Lengths
from xsimulator.stages import whole

INPUT = 128
SUBJECT = problem("opt-13b", "a40x4", "summarization")
LANE = LaneCost(SUBJECT.model, SUBJECT.profile, whole(SUBJECT.model))
OUTPUTS = st.dictionaries(st.integers(2, 60), st.floats(0.05, 1.0), min_size=1, max_size=6)
BATCHES = st.integers(8, 64)
Times = npt.NDArray[np.float64]


def model_of(outputs: dict[int, float]) -> OneLaneModel:
    lengths, total = sorted(outputs), sum(outputs.values())
    output = Histogram(lengths=tuple(lengths), probabilities=tuple(outputs[n] / total for n in lengths))
    return OneLaneModel(LANE, Lengths(Workload(name="drawn", input=histogram(Constant(value=INPUT)), output=output)))


def step_s(model: OneLaneModel, requests: Times, decoded: Times) -> Times:
    """Return the seconds of decode steps of so many requests, which have decoded so many tokens on average."""
    seconds: Times = model.decode_table(requests[None], model.decode_table.locate(INPUT + decoded[None]))[0, 0]
    return seconds


def encode_s(model: OneLaneModel, requests: float) -> float:
    return float(model.encode_table(np.asarray([requests]))[0, 0])


def staying(outputs: dict[int, float]) -> Times:
    """Return the probability that a request decodes more than n times. Its first token comes with its prompt."""
    total = sum(outputs.values())
    return np.asarray([sum(p for d, p in outputs.items() if d - 1 > n) / total for n in range(max(outputs))])


@given(OUTPUTS, BATCHES, st.integers(1, 40))
def test_rra_is_its_recursion_over_phases(outputs: dict[int, float], batch: int, iterations: int) -> None:
    model, stay = model_of(outputs), staying(outputs)
    cohorts: list[int] = []  # decode steps so far of the requests of each phase
    for _ in range(max(outputs) // iterations + 2):
        cohorts, seconds = [*cohorts, 0], [encode_s(model, batch)]
        for _ in range(iterations):
            running = np.asarray([batch * stay[age] if age < len(stay) else 0.0 for age in cohorts])
            cohorts = [age + 1 for age in cohorts]
            if running.sum():
                mean = np.asarray([(running @ np.asarray(cohorts)) / running.sum()])
                seconds.append(float(step_s(model, running.sum(keepdims=True), mean)[0]))
            else:
                seconds.append(0.0)
    found = estimate(model, RraSettings(encode_batch=batch, decode_iterations=iterations))
    assert found["throughput"] == pytest.approx(batch / sum(seconds), rel=0.04)
    decodes = model.quantile_decodes
    last = decodes - (-(-decodes // iterations) - 1) * iterations
    latency = (-(-decodes // iterations) - 1) * sum(seconds) + sum(seconds[: 1 + last])
    assert found["latency"] == pytest.approx(latency, rel=0.06)


@given(OUTPUTS, BATCHES, st.integers(0, 2**32 - 1))
def test_static_is_the_mean_of_drawn_batches(outputs: dict[int, float], batch: int, seed: int) -> None:
    model, total = model_of(outputs), sum(outputs.values())
    draws = np.random.default_rng(seed).choice(list(outputs), (8000, batch), p=[p / total for p in outputs.values()])
    steps = step_s(model, np.full(max(outputs) - 1, float(batch)), np.arange(1.0, max(outputs)))
    until = np.concatenate([[0.0], np.cumsum(steps)])
    cycle = encode_s(model, batch) + until[draws.max(axis=1) - 1].mean()
    found = estimate(model, StaticSettings(batch=batch))
    assert found["throughput"] == pytest.approx(batch / cycle, rel=0.03)
    assert found["latency"] == pytest.approx(encode_s(model, batch) + until[model.quantile_decodes], rel=0.02)
