"""The nearest bound that a plan keeps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from xgpt.core.errors import InfeasibleError
from xgpt.core.schema import Constraint
from xgpt.core.schema.policy import PolicyChoice
from xgpt.problems import resolve
from xgpt.requests import plan_request
from xscheduler.objectives.best_plans import found_each
from xscheduler.objectives.nearest_bound import _nearest, never_kept


@pytest.mark.parametrize("least_s", [0.9083, 0.91, 7.3])
def test_the_nearest_bound_is_kept_and_the_same_whatever_was_asked(least_s: float) -> None:
    def keeps(constraint: Constraint) -> bool:
        assert constraint.latency_bound_s is not None
        return constraint.latency_bound_s >= least_s

    asked = (0.05 * least_s, 0.88 * least_s, 0.999 * least_s)
    found = [_nearest(Constraint(), {"latency_bound_s": bound}, 1.0, keeps, None) for bound in asked]
    assert found[0] is not None and found[0] == found[1] == found[2]
    assert least_s <= found[0].bounds["latency_bound_s"] <= 1.0101 * least_s and found[0].ratio < 1.011


def test_bounds_that_break_together_are_loosened_together() -> None:
    def keeps(constraint: Constraint) -> bool:
        return (constraint.ttft_s or 9) >= 0.5 and (constraint.tpot_s or 9) >= 0.02

    found = _nearest(Constraint(), {"ttft_s": 0.4, "tpot_s": 0.01}, 1.0, keeps, None)
    assert found is not None and found.bounds["tpot_s"] == pytest.approx(0.02, rel=0.011)
    assert found.bounds["ttft_s"] / 0.4 == pytest.approx(found.bounds["tpot_s"] / 0.01, rel=0.01)


def test_bounds_that_are_loosened_together_are_not_called_the_nearest() -> None:
    """Both were "the nearest bounds that can be kept together", although one of them could be a third tighter."""
    constraint = Constraint(ttft_s=0.4, tpot_s=0.01)
    problem = SimpleNamespace(constraint=constraint, cluster=SimpleNamespace(name="h100x8"))
    scheduler = SimpleNamespace(problem=problem, found=lambda _: None)

    def keeps(tried: Constraint) -> bool:
        return (tried.ttft_s or 9) >= 0.5 and (tried.tpot_s or 9) >= 0.02

    refusal = never_kept(scheduler, ["chunked"], keeps)  # type: ignore[arg-type]
    said = "at any arrival rate; each bound 2.01 times as long can be kept: `ttft_s=0.80"
    assert said in str(refusal) and "nearest" not in str(refusal) + refusal.reason
    assert refusal.nearest_bound_s is None and refusal.nearest["tpot_s"] == pytest.approx(0.02, rel=0.011)
    alone = never_kept(scheduler, ["chunked"], lambda tried: (tried.ttft_s or 9) >= 0.5)  # type: ignore[arg-type]
    assert "the nearest bound found that can be kept is `ttft_s=0.50" in str(alone)


def test_the_nearest_bounds_are_kept_by_a_policy_that_the_engine_runs_by_itself() -> None:
    """Of vLLM, bounds were said to be kept that only orca keeps, with xgpt's scheduler."""
    bounds = {"ttft_s": 0.02, "tpot_s": 3e-3, "latency_bound_s": None, "quantile": 0.9}
    asked = {"model": "llama-3.1-8b", "cluster": "h100x1", "workload": "azure-code", "engine": "vllm"}
    problem = resolve(plan_request(**asked, **bounds))

    def nearest(policy: PolicyChoice) -> float:
        with pytest.raises(InfeasibleError) as refused:
            found_each(problem, policy)
        return refused.value.nearest["tpot_s"]

    assert nearest("orca") < nearest("chunked") == nearest("auto")
