"""The closed loop of clients that benchmarks.fidelity predicts."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fidelity import FIRST_TOKEN_S, closed_loop
from xgpt.resolve import load_cluster, load_model
from xprofiler import analytic
from xsimulator.placement import whole
from xsimulator.step_cost import LaneCost, StepCounts

INPUT, OUTPUT = 512, 64


@pytest.fixture(scope="module")
def cost() -> LaneCost:
    spec, _ = load_model("llama-3.1-8b")
    return LaneCost(spec, analytic.profile(spec, load_cluster("h100x8"), "bfloat16"), whole(spec, 2))


def prompts_s(cost: LaneCost, count: int) -> float:
    return sum(cost.step(StepCounts.of([(0, INPUT, 1)] * count, [])))


def test_one_client_waits_for_its_own_prompt_alone(cost: LaneCost) -> None:
    lengths = [np.full(5, n) for n in (INPUT, OUTPUT)]
    ttft_s, tpot_s = closed_loop(cost, 1, *lengths, kv_blocks=10**6)
    assert ttft_s == pytest.approx(prompts_s(cost, 1) + FIRST_TOKEN_S)
    steps = [sum(cost.step(StepCounts.of([], [INPUT + i]))) for i in range(1, OUTPUT)]
    assert tpot_s == pytest.approx(np.mean(steps), rel=1e-3)


def test_clients_that_start_together_share_steps(cost: LaneCost) -> None:
    """Thirty-two prompts of 512 tokens are two steps of 8,192; equal requests then stay in step for good."""
    lengths = [np.full(320, n) for n in (INPUT, OUTPUT)]
    ttft_s, _ = closed_loop(cost, 32, *lengths, kv_blocks=10**6)
    assert 0.9 * prompts_s(cost, 16) < ttft_s - FIRST_TOKEN_S < 1.5 * prompts_s(cost, 16)


def test_without_room_clients_wait_for_others_to_end(cost: LaneCost) -> None:
    lengths = [np.full(40, n) for n in (INPUT, OUTPUT)]
    plenty, _ = closed_loop(cost, 8, *lengths, kv_blocks=10**6)
    little, _ = closed_loop(cost, 8, *lengths, kv_blocks=2 * (INPUT + OUTPUT) // 16)
    assert little > 10 * plenty
