"""What a policy takes: its settings, its rule, its forecast, a line in each table. It is planned, simulated, replayed.

The toy is "capped": every step decodes all that run and fills up to 256 tokens a micro-batch with pieces of prompts.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import pytest
from pydantic import PositiveInt

from tests.contract.scenarios import problem
from xgpt.core import policies
from xgpt.core.io import dump_json
from xgpt.core.policies import LaneSettings
from xgpt.core.policies.lane_settings import RULES
from xgpt.core.schema import Plan, PolicySettings, Variable
from xgpt.core.schema.policy import SingleLane
from xscheduler.replanning.reestimate import reestimate
from xscheduler.schedule import Scheduler
from xsimulator.events import replay
from xsimulator.forecast import FORECASTS, Performance
from xsimulator.forecast.base import Columns, column
from xsimulator.forecast.mixed import Mixed
from xsimulator.forecast.one_lane import OneLaneModel
from xsimulator.run import simulate

# The policy -------------------------------------------------------------------------------------------------------

TOKENS = 256


class CappedSettings(SingleLane):
    kind: Literal["capped"] = "capped"
    max_batch: PositiveInt
    microbatches: PositiveInt = 1

    variables: ClassVar[tuple[Variable, ...]] = (Variable("max_batch", "rises", "rises", "requests in a step at most"),)


def capped(settings: CappedSettings, *_: float) -> LaneSettings:
    tokens = TOKENS * settings.microbatches
    return LaneSettings(mix=True, token_budget=tokens, max_batch=settings.max_batch, microbatches=settings.microbatches)


class Capped(Mixed):
    settings = CappedSettings
    cuts_prompts = True

    def predict(self, model: OneLaneModel, columns: Columns) -> Performance:
        return super().predict(model, {**columns, "token_budget": TOKENS * column(columns, "microbatches")})


class CappedPlan(Plan):
    policy: PolicySettings | CappedSettings  # type: ignore[assignment]


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "capped", capped)
    monkeypatch.setitem(FORECASTS, "capped", Capped())
    monkeypatch.setattr("xscheduler.plan_builder.Plan", CappedPlan)  # stands for the line in the schema's union


# What it does ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize("bound_s", [None, 4.0])
def test_a_new_policy_is_planned_simulated_and_replayed(bound_s: float | None) -> None:
    subject = problem("llama-3.1-8b", "h200x1", "orca", bound_s)
    plan = Scheduler(subject).best(["capped"])
    assert plan.policy.kind == "capped"
    assert plan.search.gap is not None and plan.search.gap <= 0.01
    assert CappedPlan.model_validate_json(dump_json(plan)) == plan

    # It plans what the one policy that it is a case of would plan with that budget.
    scheduler = Scheduler(subject)
    placement = scheduler.candidates.spaces("chunked")[0].placement
    settings = FORECASTS["chunked"].settings(max_batch=plan.policy.max_batch, token_budget=TOKENS, **placement.fixed)
    scored = scheduler.score(settings, placement).estimate
    assert scored.throughput_rps == pytest.approx(plan.estimate.throughput_rps, rel=1e-9)
    assert scored.latency_s == pytest.approx(plan.estimate.latency_s, rel=1e-9)

    assert reestimate(plan, subject.profile, subject.workload, 0.9)["latency"] <= plan.estimate.latency_s
    measured, log = simulate(plan, subject.profile, subject.workload, 300, np.random.default_rng(0))
    assert measured.throughput_rps == pytest.approx(plan.estimate.throughput_rps, rel=0.1)
    assert replay(policies.build(plan), log) == log
