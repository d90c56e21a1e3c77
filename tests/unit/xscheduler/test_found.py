"""A plan is made once, and its proof belongs to its own figures."""

from __future__ import annotations

import pytest

from tests.contract.scenarios import problem
from xgpt.core.schema import Ceiling, Plan
from xscheduler.found import Found
from xscheduler.schedule import Scheduler

PLAN = Scheduler(problem("llama-3.1-8b", "h200x1", "azure-conv")).best(("chunked",))


def test_the_copy_of_a_plan_is_not_proven() -> None:
    assert PLAN.search.gap is not None
    draft = PLAN.with_estimate(throughput_rps=2 * PLAN.estimate.throughput_rps)
    assert not isinstance(draft, Plan) and not hasattr(draft.search, "gap")
    assert type(PLAN.but(seed=1)) is type(draft)


def test_a_gap_is_from_a_plans_own_figure_to_the_ceiling() -> None:
    rate = PLAN.estimate.throughput_rps
    assert PLAN.but().proven(Ceiling(1.25 * rate, "")).search.gap == pytest.approx(0.25)
    raised = Found(PLAN, PLAN.ceiling).estimating(throughput_rps=0.5 * rate).plan
    assert raised.search.gap == pytest.approx(2 * (1 + (PLAN.search.gap or 0.0)) - 1)


def test_a_ceiling_that_the_plan_exceeds_proves_nothing() -> None:
    found = PLAN.but().proven(Ceiling(0.9 * PLAN.estimate.throughput_rps, "a bound"))
    assert found.search.gap is None and found.search.bound == "none: the plan exceeds it (a bound)"


def test_what_is_deployed_keeps_its_proof_and_its_figures() -> None:
    assert PLAN.deployed(seed=1).search == PLAN.search
    with pytest.raises(AssertionError, match="estimate"):
        PLAN.deployed(estimate=PLAN.estimate)
