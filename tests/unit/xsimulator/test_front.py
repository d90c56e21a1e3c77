"""API servers in front of an engine."""

from __future__ import annotations

from typing import Any

import pytest

from xgpt import api
from xgpt.core.schema import Plan
from xgpt.deciding.commands import engine_command
from xsimulator.front import MOST_BUSY, request_s, served_rate

pytestmark = pytest.mark.usefixtures("short_simulations")


def planned(**more: Any) -> Plan:
    return api.solve(
        model="llama-3.1-8b",
        cluster="b200x8",
        devices=2,
        workload="chat-short",
        latency_bound_s=20,
        engine="vllm",
        policy="chunked",
        **more,
    ).best


def test_a_plan_has_as_many_api_servers_as_its_rate_needs() -> None:
    """vLLM's pull request 17546: one API server passed at most 76 requests/s of 220 prompt and 198 output tokens."""
    plan = planned()
    assert plan.engine is not None
    assert 76 * (220 * plan.engine.tokenise_s + 198 * plan.engine.stream_s) == pytest.approx(1, rel=0.05)
    each_s = request_s(plan.engine, plan.workload)
    busy = served_rate(plan) * each_s
    assert (plan.api_servers - 1) * MOST_BUSY < busy <= plan.api_servers * MOST_BUSY
    assert f"--api-server-count {plan.api_servers}" in str(engine_command(plan))
    assert not plan.estimate.warnings


def test_fewer_api_servers_are_kept_and_said_to_limit_the_rate() -> None:
    plan = planned(api_servers=1)
    assert "--api-server-count" not in str(engine_command(plan))
    assert any("one API server handles about" in text and "`api_servers=2`" in text for text in plan.estimate.warnings)
    assert Plan.model_validate_json(plan.model_dump_json()).api_servers == 1
