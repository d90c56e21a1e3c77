"""What a policy with a rule of its own takes. It is planned, simulated, served and replayed without code elsewhere.

The toy is "watermark": a lane decodes alone until a percentage of its largest batch is left, then encodes whole prompts
up to that batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
import pytest
from pydantic import Field, PositiveInt

from tests.contract.scenarios import problem
from tests.fakes import FakeExecutor, expected_tokens
from xgpt.core import policies
from xgpt.core.io import dump_json
from xgpt.core.policies import LaneSettings, OneLane, Pool, lane_settings
from xgpt.core.policies.request import Chunk, MicroBatch
from xgpt.core.policies.rule import RULES, OneLaneRule, rest_of_prompt
from xgpt.core.schema import Plan, PlanDraft, PolicySettings, Variable
from xgpt.core.schema.policy import SingleLane
from xgpt.core.schema.step_log import StepRecord
from xrunner.engine import Engine
from xrunner.generation import Generation
from xscheduler.replanning.situation import reestimate
from xscheduler.schedule import Scheduler
from xsimulator.capacity import Trial
from xsimulator.costs.curves import Array
from xsimulator.counts.counted_run import counted_run, is_counted
from xsimulator.events import replay
from xsimulator.forecast import FORECASTS, Performance
from xsimulator.forecast.base import Columns, Forecast, Ints, PlacementLimits, column
from xsimulator.forecast.one_lane import OneLaneModel
from xsimulator.forecast.rra import Rra
from xsimulator.lengths import Lengths, steady_decode_batch
from xsimulator.run import simulate

# The policy -------------------------------------------------------------------------------------------------------


class WatermarkSettings(SingleLane):
    kind: Literal["watermark"] = "watermark"
    max_batch: PositiveInt
    refill_percent: int = Field(ge=1, lt=100)
    microbatches: PositiveInt = 1

    mixes: ClassVar[bool] = False
    variables: ClassVar[tuple[Variable, ...]] = (
        Variable("max_batch", "rises", "rises", "largest number of running requests"),
        Variable("refill_percent", "none", "none", "percentage of the batch at which prompts enter"),
    )


class WatermarkRule(OneLaneRule):
    def is_phase_over(self, batch: MicroBatch) -> bool:
        most, policy = self.settings.max_batch, self.settings.policy
        assert most is not None and isinstance(policy, WatermarkSettings)
        return batch.num_running <= most * policy.refill_percent // 100

    def prompts_of_phase(self, pool: Pool, batch: MicroBatch) -> tuple[Chunk, ...]:
        chunks = []
        while self.has_slot(batch) and (admitted := pool.admit(batch)) is not None:
            chunks.append(rest_of_prompt(admitted))
        return tuple(chunks)


class Watermark(Rra):
    """A batch falls to its watermark after about the same number of iterations each time: this is rra with that
    number."""

    settings = WatermarkSettings
    line = load = "max_batch"
    num_curves = 3
    swaps_between_steps = False

    def values(self, name: str, room: PlacementLimits) -> Ints:
        return np.asarray([25, 50, 75]) if name == "refill_percent" else Forecast.values(self, name, room)

    line_counts = Forecast.line_counts
    reestimate = Forecast.reestimate

    def predict(self, model: OneLaneModel, columns: Columns) -> Performance:
        inside = _inside(model.lengths)
        left = 1 - 1 / inside  # the share of the largest batch that is left at the end of a phase
        iterations = 1 + np.minimum(np.searchsorted(-left, -columns["refill_percent"] / 100), len(inside) - 1)
        found = {"encode_batch": columns["max_batch"] / inside[iterations - 1], "decode_iterations": iterations}
        return super().predict(model, found | {"microbatches": column(columns, "microbatches")})


@lru_cache(maxsize=2)
def _inside(lengths: Lengths) -> Array:
    """Return the requests inside after a phase's prompts, for each of these, by the iterations of a phase."""
    at_once = 1 - lengths.survival[0]
    return np.asarray([at_once + steady_decode_batch(lengths, 1.0, n) for n in range(1, max(2, lengths.max_output))])


class WatermarkDraft(PlanDraft):
    policy: PolicySettings | WatermarkSettings  # type: ignore[assignment]


class WatermarkPlan(Plan):
    policy: PolicySettings | WatermarkSettings  # type: ignore[assignment]


@pytest.fixture(scope="module", autouse=True)
def added() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, WatermarkSettings, WatermarkRule)
        patch.setitem(FORECASTS, "watermark", Watermark())
        patch.setattr("xscheduler.plan_builder.PlanDraft", WatermarkDraft)  # stand for the line in the schema's union
        patch.setattr("xgpt.core.schema.plan.PlanDraft", WatermarkDraft)
        patch.setattr("xgpt.core.schema.plan.Plan", WatermarkPlan)
        yield


# What it does ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[None, 4.0])
def plan(request: pytest.FixtureRequest, added: object) -> Plan:
    return Scheduler(problem("llama-3.1-8b", "h200x1", "orca", request.param)).best(["watermark"])


def prompts_enter_only_at_the_watermark(log: list[StepRecord], max_batch: int, refill_at: int) -> bool:
    inside: set[int] = set()
    for record in log:
        entering = {id_ for id_, *_ in record.encode}
        if entering and (record.decode or len(inside) > refill_at or len(inside | entering) > max_batch):
            return False
        inside = (inside | entering) - set(record.finished)
    return any(record.decode for record in log)


def test_a_new_policy_is_planned_simulated_and_replayed(plan: Plan) -> None:
    assert isinstance(plan.policy, WatermarkSettings)
    assert plan.search.gap is not None and plan.search.gap <= 0.01
    assert WatermarkPlan.model_validate_json(dump_json(plan)) == plan

    subject = problem("llama-3.1-8b", "h200x1", "orca")
    assert reestimate(plan, subject.profile, subject.workload, 0.9)["latency"] <= plan.estimate.latency_s
    measured, log = simulate(plan, subject.profile, subject.workload, 300, np.random.default_rng(0))
    most, share = plan.policy.max_batch, plan.policy.refill_percent
    assert prompts_enter_only_at_the_watermark(log, most, most * share // 100)
    assert measured.throughput_rps == pytest.approx(plan.estimate.throughput_rps, rel=0.1)
    assert replay(policies.build(plan), log) == log


def test_its_arrivals_are_simulated_by_its_own_rule(plan: Plan) -> None:
    trial = Trial(plan, problem("llama-3.1-8b", "h200x1", "orca").profile, least_requests=100)
    assert not is_counted(plan)
    assert counted_run(plan, trial.lanes, trial.stream(1.0)) is None
    assert trial.saturated() == pytest.approx(plan.estimate.throughput_rps, rel=0.15)


def test_it_is_served(plan: Plan) -> None:
    assert isinstance(plan.policy, WatermarkSettings)
    served = plan.model_copy(update={"policy": plan.policy.model_copy(update={"max_batch": 8, "refill_percent": 50})})
    log: list[StepRecord] = []
    engine, tokens = Engine(policies.build(served), FakeExecutor(), on_step=log.append), {}
    for id_ in range(30):
        engine.submit(Generation(id_, (id_, 7), 12, output_length=3 + id_ % 9))
    while not engine.pool.is_idle or not tokens:
        for token in engine.step() or ():
            tokens.setdefault(token.id, []).append(token.token)
    assert tokens == {id_: expected_tokens((id_, 7), 3 + id_ % 9) for id_ in range(30)}
    assert prompts_enter_only_at_the_watermark(log, 8, 4)
    assert replay(policies.build(served), log) == log


def test_a_lane_goes_over_to_the_rule_of_another_policy_only_when_it_is_empty() -> None:
    lane = OneLane(LaneSettings(mix=True, max_batch=8), Pool(100, 16))
    of_it = [lane_settings(WatermarkSettings(max_batch=8, refill_percent=share), 0.0, 0.0) for share in (50, 25)]
    assert not lane.apply(OneLane(of_it[0], Pool(100, 16)))
    assert OneLane(of_it[0], Pool(100, 16)).apply(OneLane(of_it[1], Pool(100, 16)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"line": "refill_percent"}, "the latency of refill_percent, its line, must rise or fall"),
        ({"line": "batch"}, "its line, batch, is none of its variables"),
        ({"values": lambda *_: np.asarray([10, 20, 30])}, "the values of max_batch, its line, are not consecutive"),
    ],
)
def test_what_a_space_cannot_number_is_said(change: dict[str, object], says: str) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match=f"^watermark: {says}"):
        patch.setitem(FORECASTS, "watermark", type("Other", (Watermark,), change)())
        Scheduler(problem("llama-3.1-8b", "h200x1", "orca")).best(["watermark"])


def test_a_policy_has_at_most_two_variables() -> None:
    third = Variable("microbatches", "rises", "rises", "number of micro-batches")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match="at most two control variables"):
        patch.setattr(WatermarkSettings, "variables", (*WatermarkSettings.variables, third))
        Scheduler(problem("llama-3.1-8b", "h200x1", "orca")).best(["watermark"])
