"""What a plan maximises: by arrivals it serves at least what any other plan does, and what it states is so."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.contract.scenarios import problem
from tests.rings import few
from xgpt.core.schema import Constraint, Plan
from xgpt.core.schema.plan import rate_of
from xscheduler.objectives.best_plans import plan_each
from xscheduler.objectives.capacities import rated
from xscheduler.problem import Problem
from xscheduler.tolerances import TOLERANCES
from xsimulator.capacity import PRECISION, Trial

SCENARIOS = (
    ("llama-3.1-8b", "h200x1", "azure-code", 4.0),
    ("opt-13b", "a40x4", "summarization", 8.0),
    ("llama-3.1-70b", "h100x8", "azure-conv", 15.0),
    ("t5-11b", "a40x8", "translation", 30.0),
)


EVERY_SCENARIO = pytest.mark.parametrize(
    "scenario", few(SCENARIOS, whole=True), ids=("-".join(scenario[:3]) for scenario in SCENARIOS)
)


def subject(model: str, cluster: str, workload: str) -> Problem:
    return problem(model, cluster, workload)


@functools.cache
def by_arrivals(scenario: tuple[str, str, str, float]) -> dict[str, Plan]:
    return plan_each(subject(*scenario[:3]).under(Constraint(latency_bound_s=scenario[3], objective="arrivals")))


@pytest.mark.long
@EVERY_SCENARIO
def test_no_plan_of_the_other_objective_keeps_a_higher_arrival_rate(scenario: tuple[str, str, str, float]) -> None:
    asked = subject(*scenario[:3])
    best = next(iter(by_arrivals(scenario).values()))
    saturated = plan_each(asked.under(Constraint(latency_bound_s=scenario[3]))).values()
    assert rate_of(best) >= (1 - TOLERANCES.rate) * max(rate_of(rated(plan, asked.profile)) for plan in saturated)
    assert max(map(rate_of, by_arrivals(scenario).values())) == rate_of(best)


@pytest.mark.long
@EVERY_SCENARIO
def test_each_stated_rate_is_confirmed_request_by_request(scenario: tuple[str, str, str, float]) -> None:
    asked = subject(*scenario[:3])
    for plan in by_arrivals(scenario).values():
        found = plan.estimate.capacity
        assert found is not None
        at = Trial(plan, asked.profile, by_request=True).at(found.rate_per_s)
        assert at is not None
        kept_s = scenario[3] / (1 + plan.constraint.headroom)
        assert np.mean(at.whole_s <= kept_s) >= 0.99
        assert np.mean(at.whole_s <= scenario[3]) == pytest.approx(found.share_kept)
        assert found.rate_per_s <= plan.estimate.throughput_rps


def test_what_is_over_the_stated_rate_breaks_the_bound() -> None:
    scenario = SCENARIOS[0]
    plan, asked = next(iter(by_arrivals(scenario).values())), subject(*scenario[:3])
    above = Trial(plan, asked.profile, by_request=True).at((1 + 1.5 * PRECISION) * rate_of(plan))
    assert above is not None
    assert np.mean(above.whole_s <= scenario[3] / (1 + plan.constraint.headroom)) < 0.99


def test_without_a_bound_the_objectives_are_one() -> None:
    asked = subject("llama-3.1-8b", "h200x1", "orca")
    arrivals, saturated = (
        plan_each(asked.under(Constraint(objective=name)), "orca")["orca"] for name in ("arrivals", "saturated")
    )
    assert arrivals.policy == saturated.policy
    assert arrivals.estimate.capacity is None
    assert rate_of(arrivals) == saturated.estimate.throughput_rps


def test_the_same_input_gives_the_same_plan() -> None:
    scenario = SCENARIOS[0]
    again = plan_each(subject(*scenario[:3]).under(Constraint(latency_bound_s=scenario[3], objective="arrivals")))

    def text(plans: dict[str, Plan]) -> list[str]:
        return [
            plan.model_copy(update={"search": plan.search.model_copy(update={"seconds": 0.0})}).model_dump_json()
            for plan in plans.values()
        ]

    assert text(again) == text(by_arrivals(scenario))


@pytest.mark.long
def test_bounds_with_quantiles_of_their_own_are_each_kept() -> None:
    """MLPerf's server scenario: a share of all requests keeps each bound, whatever becomes of the other one."""
    asked = subject("llama-3.1-8b", "h200x1", "azure-conv")
    bounds = {"ttft_s": 0.5, "tpot_s": 0.012}
    quantiles = {"ttft_quantile": 0.9, "tpot_quantile": 0.99}
    together = Constraint(objective="arrivals", quantile=0.99, **bounds)
    plans = plan_each(asked.under(together.model_copy(update=quantiles)))
    assert len(plans) >= 3
    for plan in plans.values():
        found, slack = plan.estimate.capacity, 1 + plan.constraint.headroom
        assert found is not None
        times = Trial(plan, asked.profile, by_request=True).at(found.rate_per_s)
        assert times is not None
        assert np.mean(times.ttft_s <= 0.5 / slack) >= 0.9
        assert np.mean(times.tpot_s <= 0.012 / slack) >= 0.99
        assert times.goodput(plan.constraint) == pytest.approx(found.share_kept)
    best = next(iter(plans.values()))
    assert rate_of(best) >= rate_of(next(iter(plan_each(asked.under(together), best.policy.kind).values())))
    above = Trial(best, asked.profile).at((1 + 1.5 * PRECISION) * rate_of(best))
    assert above is not None
    tight = best.constraint.model_copy(
        update={name: bound / (1 + best.constraint.headroom) for name, bound in bounds.items()}
    )
    assert not above.keeps(tight)


@pytest.mark.long
def test_no_figure_of_a_question_exceeds_a_ceiling_of_it() -> None:
    question = subject("llama-3.1-8b", "h200x1", "azure-code")
    question = question.under(Constraint(objective="arrivals", ttft_s=0.5, tpot_s=0.05))
    plans = [plan for policy in ("auto", "chunked", "orca") for plan in plan_each(question, policy).values()]
    ceiling, bound = plans[0].ceiling
    assert ceiling is not None and max(map(rate_of, plans)) <= ceiling
    assert "token budgets do not follow slack" in bound and "in order of arrival" not in bound  # auto tries in-time
    by_arrival = next(iter(plan_each(question, "orca", order="fcfs").values()))
    assert "in order of arrival and token budgets do not follow slack" in by_arrival.ceiling.bound
