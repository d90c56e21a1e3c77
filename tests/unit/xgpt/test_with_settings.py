"""A variable changed by hand: checked, scored and simulated on the same stages, never searched again."""

from __future__ import annotations

from pathlib import Path

import pytest

import xgpt
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.schema import Plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    asked = {"model": "opt-13b", "cluster": "a40x4", "workload": "summarization", "policy": "rra"}
    return xgpt.plan(**asked, latency_bound_s=8.0, objective="saturated")


def test_another_setting_has_its_own_figures_and_no_proof(plan: Plan, tmp_path: Path) -> None:
    fewer = plan.policy.encode_batch // 2  # type: ignore[union-attr]
    other = xgpt.with_settings(plan, encode_batch=fewer)
    assert other.policy == plan.policy.but(encode_batch=fewer) and other.stages == plan.stages
    assert other.estimate.throughput_rps < plan.estimate.throughput_rps
    assert other.estimate.latency_s != plan.estimate.latency_s and other.search.gap is None
    path = tmp_path / "plan.json"
    path.write_text(other.model_dump_json(), encoding="utf-8")
    run = xgpt.simulate(path, num_requests=2000)
    assert abs(run.figures["throughput_rps"] / other.estimate.throughput_rps - 1) < 0.05


def test_the_same_settings_are_the_same_plan(plan: Plan) -> None:
    told = {"search", "recommendation"}
    assert xgpt.with_settings(plan).model_dump(exclude=told) == plan.model_dump(exclude=told)


def test_what_no_policy_has_and_what_does_not_fit_are_refused(plan: Plan) -> None:
    with pytest.raises(InputError, match="encode_batches"):
        xgpt.with_settings(plan, encode_batches=3)
    with pytest.raises(InputError, match="encode_batch"):
        xgpt.with_settings(plan, encode_batch=0)
    with pytest.raises(InfeasibleError, match="memory"):
        xgpt.with_settings(plan, encode_batch=4000)


def test_a_limit_beyond_what_memory_holds_is_scored_and_drawn_as_it_was_planned() -> None:
    """Both were refused, as was a report on a present deployment whose memory is short."""
    asked = {"model": "llama-3.1-8b", "cluster": "h100x1", "workload": "azure-conv", "engine": "vllm"}
    bounds = {"latency_bound_s": 60, "objective": "saturated", "policy": "chunked"}
    plan = xgpt.plan(**asked, **bounds, fix={"max_batch": 1024})
    told = {"search", "recommendation"}
    assert xgpt.with_settings(plan).model_dump(exclude=told) == plan.model_dump(exclude=told)
    searched = xgpt.plan(**asked, **bounds)
    assert searched.admission.max_running is not None
    assert xgpt.with_settings(searched, max_batch=1024).admission.max_running is None
    assert "highest throughput of each policy" in xgpt.report(plan)
