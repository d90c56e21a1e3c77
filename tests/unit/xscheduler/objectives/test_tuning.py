"""Budgets from slack: tuned by simulation, never worse than what they are tuned from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.rings import examples
from xgpt.core import policies
from xgpt.core.errors import InputError
from xgpt.core.schema import Plan, SlackBudget
from xgpt.core.schema.plan import rate_of
from xgpt.core.workload import ArrivalProcess
from xgpt.problems import resolve
from xgpt.requests import plan_request
from xgpt.solving import Planned, solve
from xscheduler.objectives import tuning
from xscheduler.schedule import scheduler
from xsimulator.capacity import Trial
from xsimulator.costs.step_times import with_step_times
from xsimulator.events import replay
from xsimulator.run import simulate

ASKED = {
    "model": "llama-3.1-8b",
    "cluster": "h200x1",
    "workload": "azure-code",
    "ttft_s": 0.4,
    "tpot_s": 0.02,
    "headroom": 0.0,
}


@pytest.fixture(autouse=True)
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "NUM_TRIALS", 3)
    monkeypatch.setattr(tuning, "ROUND", 1)
    monkeypatch.setattr(tuning, "DRAWS", (1,))
    monkeypatch.setattr(tuning, "NUM_PROCESSES", 1)


def planned(**changes: object) -> Planned:
    return solve(plan_request(**(ASKED | changes)))


@pytest.fixture(scope="module")
def fixed() -> Plan:
    """The best plan with a fixed budget of tokens a step."""
    return planned(policy="chunked", order="fcfs").best


@pytest.mark.long
def test_a_tuned_plan_keeps_a_higher_rate_and_its_log_replays(fixed: Plan) -> None:
    found = planned(policy="slack")
    plan = found.best
    assert plan.policy.kind == "chunked"
    assert rate_of(plan) >= 1.1 * rate_of(fixed) and plan.search.gap is None
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert plan.estimate.capacity is not None and plan.estimate.capacity.error is not None
    assert plan.policy.slack is not None and plan.estimate.capacity.rate_under_tighter_per_s is None
    assert plan.estimate.step_times is not None and plan.estimate.step_times.error < 0.05
    rng = np.random.default_rng(0)
    _, log = simulate(
        plan, found.problem.profile, found.problem.workload, 200, rng, ArrivalProcess.at(0.8 * rate_of(plan))
    )
    assert replay(policies.build(plan), log) == log


@pytest.mark.usefixtures("short_simulations")
def test_plans_to_tune_from_leave_the_headroom_that_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those made for tighter times per token lost it: tuning began with the fastest, and stated rates without it."""
    monkeypatch.setattr(tuning, "TIGHTER", tuning.TIGHTER[: examples(len(tuning.TIGHTER), 1)])
    problem = resolve(plan_request(**(ASKED | {"policy": "chunked", "headroom": None})))
    objective = tuning.TunedArrivals(scheduler(problem), lambda plan: plan, None, "slack", None)
    plans = list(objective._under_tighter())
    assert problem.profile.headroom > 0
    assert {(plan.constraint.headroom, plan.constraint.tpot_s) for plan in plans} == {(problem.profile.headroom, 0.02)}


@pytest.mark.long
def test_slack_keeps_the_steps_of_a_pipeline_alike() -> None:
    """One micro-batch took all the time that there was, the next was late behind it: a third of the rate was left."""
    asked = {"model": "llama-3.1-70b", "cluster": "h100x8", "devices": 4, "workload": "azure-conv"}
    found = planned(**asked, ttft_s=1.0, tpot_s=0.1, policy="chunked", fix={"pp": 2, "tp": 2})
    fixed = with_step_times(found.best, found.problem.profile)
    assert fixed.policy.kind == "chunked" and fixed.policy.microbatches == 2
    slack = fixed.policy.model_copy(update={"slack": SlackBudget(least_tokens=32, most_tokens=8192)})
    plan = fixed.model_copy(update={"policy": slack})
    assert Trial(plan, found.problem.profile).at(0.75 * rate_of(fixed), 1.0) is not None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tpot_s": None}, "policy"),
        ({"objective": "saturated"}, "policy"),
        ({"model": "t5-11b", "cluster": "a40x4", "workload": "translation"}, "policy"),
    ],
)
def test_slack_is_refused_without_what_it_goes_by(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InputError) as error:
        planned(latency_bound_s=60.0, policy="slack", **changes)
    assert error.value.field == field


@pytest.mark.long
def test_shares_of_lengths_that_a_file_rounds_are_planned(tmp_path: Path) -> None:
    lengths = "{kind: histogram, lengths: [64, 512, 2048], probabilities: [0.3333333, 0.3333333, 0.3333333]}"
    (tmp_path / "thirds.yaml").write_text(f"name: thirds\nsource: made up\ninput: {lengths}\noutput: {lengths}\n")
    plan = planned(policy="chunked", order="in-time", workload=str(tmp_path / "thirds.yaml")).best
    assert plan.estimate.step_times is not None


@pytest.mark.usefixtures("short_simulations")
def test_a_plan_with_slack_needs_its_bound_and_times() -> None:
    plan = planned(policy="chunked", order="fcfs", objective="saturated").best
    slack = plan.policy.model_copy(update={"slack": SlackBudget(least_tokens=1, most_tokens=2)})
    with pytest.raises(ValueError, match="slack: it needs"):
        Plan.model_validate(plan.model_dump() | {"policy": slack.model_dump()})
