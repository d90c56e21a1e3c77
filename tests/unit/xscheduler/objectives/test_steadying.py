"""Settings that steady waa's lanes are taken if they gain in simulation, and left to the user if they are held."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.contract.scenarios import problem
from xgpt.core.schema import Plan, WaaSettings
from xscheduler.objectives import steadying
from xscheduler.schedule import Scheduler


def gaining(monkeypatch: pytest.MonkeyPatch, percent: int, gain: float) -> None:
    """Let plans serve that much more with this adjustment."""
    figures, with_figures = steadying.saturated_figures, steadying.with_simulated_figures

    def factor(plan: Plan) -> float:
        return 1 + gain * (getattr(plan.policy, "adjustment_percent", 0) == percent)

    def more(plan: Plan, profile: object) -> Plan:
        found = with_figures(plan, profile)  # type: ignore[arg-type]
        rps = found.estimate.throughput_rps * factor(plan)
        return found.with_estimate(throughput_rps=rps)

    def of(plan: Plan, profile: object) -> object:
        found = figures(plan, profile)  # type: ignore[arg-type]
        return found._replace(throughput_rps=found.throughput_rps * factor(plan))

    monkeypatch.setattr(steadying, "saturated_figures", of)
    monkeypatch.setattr(steadying, "with_simulated_figures", more)


@pytest.mark.long
def test_a_setting_is_taken_if_it_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = problem("opt-13b", "a40x4", "summarization", 8.0)
    plan = Scheduler(subject).best(("waa-c",))
    assert steadying.steadied(plan, subject) is plan, "nothing gains here: docs/results/correlated.md"
    gaining(monkeypatch, 20, 0.5)
    steadied = steadying.steadied(plan, subject).policy
    assert isinstance(steadied, WaaSettings) and steadied.adjustment_percent == 20
    fixed = replace(subject, fixed={"buffer_iterations": 3})
    assert steadying.steadied(plan, fixed) is plan
    plan = Scheduler(fixed).best(("waa-c",))
    assert isinstance(plan.policy, WaaSettings) and plan.policy.buffer_iterations == 3
