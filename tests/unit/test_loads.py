"""Closed loops of clients, and prompts that all begin alike."""

from __future__ import annotations

from typing import Any

import pytest

from xgpt import api
from xgpt.core.errors import InputError
from xgpt.core.schema import Plan
from xsimulator.run import reused_share

ASKED: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "cluster": "h100x1",
    "workload": "chat-short",
    "latency_bound_s": 20,
    "policy": "chunked",
    "objective": "saturated",
    "engine": "vllm",
}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return api.solve(**ASKED).best


@pytest.mark.parametrize("clients", [1, 16])
def test_clients_wait_for_their_last_request(plan: Plan, clients: int) -> None:
    """Little's law: as many requests are out as there are clients, but for those on the way."""
    run = api.simulate(plan, clients=clients, num_requests=300)
    whole_s = run.figures["whole_mean_s"]
    assert run.figures["throughput_rps"] * whole_s == pytest.approx(clients, rel=0.08)
    assert max(len(step.decode) for step in run.steps) <= clients


def test_more_clients_serve_more_and_wait_longer(plan: Plan) -> None:
    few, many = (api.simulate(plan, clients=number, num_requests=200).figures for number in (4, 32))
    assert many["throughput_rps"] > 2 * few["throughput_rps"] and many["tpot_mean_s"] > few["tpot_mean_s"]


def test_clients_go_without_arrivals(plan: Plan) -> None:
    with pytest.raises(InputError, match=r"clients: 4 .*cannot be combined with `arrival_rate_per_s`"):
        api.simulate(plan, clients=4, arrival_rate_per_s=2)


def test_a_shared_prefix_is_computed_once(plan: Plan) -> None:
    longest = plan.workload.input.lengths[-1]
    shared = api.solve(**ASKED, shared_prefix=plan.workload.input.lengths[-1] // 4).best
    assert shared.estimate.reuse is not None
    assert shared.estimate.throughput_rps > 1.02 * plan.estimate.throughput_rps
    assert reused_share(api.simulate(shared, num_requests=300).steps) == pytest.approx(
        shared.estimate.reuse.share, abs=0.1
    )
    with pytest.raises(InputError, match=r"shared_prefix: .*the longest prompt"):
        api.solve(**ASKED, shared_prefix=longest)
    with pytest.raises(InputError, match=r"shared_prefix: .*cannot cache prefixes"):
        api.solve(**ASKED | {"model": "t5-11b", "engine": "xgpt"}, shared_prefix=64)
