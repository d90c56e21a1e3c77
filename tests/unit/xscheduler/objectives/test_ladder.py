"""Plans that are settled by simulation: all requests' latency, arrival rates, the cheapest cluster."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tests.contract.scenarios import problem
from tests.rings import ALL, few
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.schema import Constraint, Histogram, Plan
from xgpt.core.schema.constraint import Sla
from xgpt.core.schema.policy import PolicyChoice
from xgpt.core.workload import ArrivalProcess
from xscheduler.objectives.best_plans import found_each, plan_each
from xscheduler.objectives.ladder import request_law
from xscheduler.objectives.sizing import Judged, cheapest, fewest_devices
from xscheduler.problem import Problem
from xscheduler.schedule import Scheduler
from xsimulator.measures import request_times
from xsimulator.run import simulate

pytestmark = pytest.mark.usefixtures("short_simulations")


def subject(model: str, cluster: str, workload: str, price: float | None = None) -> Problem:
    asked = problem(model, cluster, workload)
    devices = asked.cluster.model_copy(update={"price_per_device_hour": price})
    return replace(asked, cluster=devices)


BOUNDS = (2.0, 6.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 40.0) if ALL else (2.0, 15.0)


@pytest.fixture(scope="module")
def by_bound() -> dict[float, Plan | InfeasibleError]:
    """chunked under each of the bounds, for the quantile of all requests."""
    asked = subject("llama-3.1-8b", "h200x1", "azure-conv")
    found: dict[float, Plan | InfeasibleError] = {}
    for bound_s in BOUNDS:
        try:
            constraint = Constraint(latency_bound_s=bound_s, sla="request")
            found[bound_s] = plan_each(asked.under(constraint), "chunked")["chunked"]
        except InfeasibleError as error:
            found[bound_s] = error
    return found


@pytest.mark.long
def test_a_looser_bound_on_all_requests_is_kept_wherever_a_tighter_one_is_and_serves_no_less(
    by_bound: dict[float, Plan | InfeasibleError],
) -> None:
    best_rps = 0.0
    for bound_s, plan in by_bound.items():
        if isinstance(plan, InfeasibleError):
            assert not best_rps and bound_s < 6
            continue
        assert plan.estimate.latency_s <= bound_s
        assert plan.estimate.throughput_rps >= best_rps
        best_rps = plan.estimate.throughput_rps


def test_a_plan_for_all_requests_claims_no_proof_and_says_what_was_simulated(
    by_bound: dict[float, Plan | InfeasibleError],
) -> None:
    plan = by_bound[15.0]
    assert isinstance(plan, Plan)
    assert plan.search.gap is None and "simulated" in plan.search.bound
    assert plan.search.simulations >= 2 and plan.search.seconds > 0.1
    assert plan.search.evaluations <= plan.search.space_size
    assert plan.estimate.latency_error is not None and plan.estimate.latency_error < 0.01


def test_the_nearest_bound_on_all_requests_can_be_asked_for(by_bound: dict[float, Plan | InfeasibleError]) -> None:
    why = by_bound[2.0]
    assert isinstance(why, InfeasibleError)
    nearest_s = float(str(why).rsplit(" is ", 1)[1].removesuffix(" s"))
    asked = subject("llama-3.1-8b", "h200x1", "azure-conv")
    found = plan_each(asked.under(Constraint(latency_bound_s=nearest_s, sla="request")), "chunked")["chunked"]
    assert found.estimate.latency_s <= nearest_s


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "bound_s"), few([("rra", 9.0), ("waa", 5.0), ("chunked", 8.0), ("orca", 8.0), ("static", 9.0)])
)
def test_the_latency_of_all_requests_is_what_single_requests_show(kind: PolicyChoice, bound_s: float) -> None:
    """Lengths mixed over few admissions tell the same as many requests with lengths of their own."""
    asked = subject("opt-13b", "a40x4", "summarization")
    found = next(iter(plan_each(asked.under(Constraint(latency_bound_s=bound_s, sla="request")), kind).values()))
    measured, _ = simulate(found, asked.profile, asked.workload, 8000, np.random.default_rng(3))
    assert found.estimate.latency_s == pytest.approx(measured.request_latency_s, rel=0.03)
    assert measured.share_within(bound_s) >= 0.99


@pytest.mark.parametrize("workload", few(["azure-code", "azure-conv", "chat-short"]))
@pytest.mark.parametrize(("kind", "error"), [("rra", 0.04), ("chunked", 0.07), ("orca", 0.04), ("static", 0.04)])
def test_the_closed_form_of_all_requests_is_near_what_they_show(workload: str, kind: str, error: float) -> None:
    asked = problem("llama-3.1-8b", "h200x1", workload)
    asked = replace(asked, constraint=Constraint(latency_bound_s=8.0, sla="request"))
    found = Scheduler(asked).best((kind,))
    law = request_law(found, asked.profile)
    assert found.estimate.latency_s == pytest.approx(law.quantile(found.constraint.planned_quantile), rel=error)


def test_policies_that_cannot_win_are_told_as_well() -> None:
    asked = subject("llama-3.1-8b", "h200x1", "azure-conv")
    plans = plan_each(asked.under(Constraint(latency_bound_s=15.0, sla="request")))
    assert set(plans) == {"rra", "chunked", "orca", "static"}
    best = next(iter(plans.values()))
    assert best.search.simulations
    assert all(plan.estimate.throughput_rps <= best.estimate.throughput_rps for plan in plans.values())


@pytest.mark.long
def test_all_requests_keep_the_bound_that_a_length_would_break() -> None:
    """Long prompts in few, long phases: the quantile of all requests lies above a request of the quantile's length."""
    asked = subject("llama-3.1-8b", "h200x1", "azure-conv")
    bound_s = 20.0

    def quantile_of_all(sla: Sla) -> tuple[Plan, float]:
        found = plan_each(asked.under(Constraint(latency_bound_s=bound_s, sla=sla, headroom=0.0)), "rra")["rra"]
        measured, _ = simulate(found, asked.profile, asked.workload, 3000, np.random.default_rng(1))
        return found, measured.request_latency_s

    by_length, broken_s = quantile_of_all("length")
    by_request, kept_s = quantile_of_all("request")
    assert broken_s > 1.02 * bound_s
    # On other requests than those it was settled on.
    assert kept_s <= 1.015 * bound_s
    assert by_request.estimate.latency_s <= bound_s
    assert by_request.estimate.throughput_rps < by_length.estimate.throughput_rps
    assert by_request.constraint == by_length.constraint.model_copy(update={"sla": "request"})


def test_an_arrival_rate_is_kept_in_simulation() -> None:
    asked = subject("opt-13b", "a40x4", "summarization")
    constraint = Constraint(latency_bound_s=8.0, arrival_rate_per_s=20.0)
    found = next(iter(plan_each(asked.under(constraint), "orca").values()))
    assert found.constraint.latency_bound_s == 8.0
    rng = np.random.default_rng(1)
    _, log = simulate(found, asked.profile, asked.workload, 2000, rng, ArrivalProcess.at(20.0))
    assert np.quantile(request_times(log, encode_emits=True).whole_s[200:], 0.99) <= 1.05 * 8.0


def test_the_cheapest_cluster_comes_first_and_those_that_fail_last() -> None:
    clusters = [("h200x1", 4.5), ("v100x1", 0.1), ("a40x4", 1.0)]
    subjects = [subject("opt-13b", name, "summarization", price) for name, price in clusters]
    constraint = Constraint(latency_bound_s=8.0, arrival_rate_per_s=12.0)
    subjects = [each.under(constraint) for each in subjects]

    def judge(number: int, problem: Problem) -> Judged:
        found_each(replace(problem, max_devices=number), policy="orca")
        return Judged(1.0)

    choices = cheapest(subjects, [partial(judge, problem=each) for each in subjects], 0.9)
    assert [choice.problem.cluster.name for choice in choices] == ["a40x4", "h200x1", "v100x1"]
    assert [choice.fewest and choice.fewest.number for choice in choices] == [2, 1, None]
    assert [choice.price_per_hour for choice in choices] == [2.0, 4.5, None]
    assert [bool(choice.why_not) for choice in choices] == [False, True, True] and "v100x1" in choices[-1].why_not
    with pytest.raises(InputError, match="price"):
        unpriced = subject("opt-13b", "a40x4", "summarization").under(Constraint(arrival_rate_per_s=1.0))
        cheapest([unpriced], [partial(judge, problem=unpriced)], 0.9)


def test_a_cluster_that_surely_holds_the_rate_comes_before_a_cheaper_one_that_may_not() -> None:
    subjects = [subject("opt-13b", name, "summarization", price) for name, price in (("h200x1", 4.5), ("a40x4", 1.0))]
    judges = [lambda number: Judged(0.95), lambda number: Judged(0.2 * number, "too slow")]
    found = cheapest(subjects, judges, 0.9)
    assert [(each.problem.cluster.name, each.why_not) for each in found] == [
        ("h200x1", ""),
        ("a40x4", "less sure than wanted"),
    ]


@pytest.mark.parametrize(("wanted", "number"), [(0.5, 2), (0.9, 3), (0.99, 3)])
def test_the_fewest_devices_hold_the_rate_at_the_wanted_confidence(wanted: float, number: int) -> None:
    """If no number is as sure as wanted, the smallest of the surest is taken."""
    sure = {1: Judged(0.0, "8/s"), 2: Judged(0.7, "7 of 10"), 3: Judged(0.95), 4: Judged(0.95)}
    found = fewest_devices(4, lambda number: sure[number], wanted)
    assert found.number == number and dict(found.tried)[4].confidence == 0.95
    assert (
        f"{number - 1} device{'s are' if number > 2 else ' is'} {'less sure' if number > 2 else 'not enough'}: "
        in found.why_not_fewer
    )


def test_devices_that_make_no_difference_in_words_are_not_added() -> None:
    """Eight were taken: "7 devices are less sure: they sustain the load in 8 of 10 cases", as eight did."""
    sure = {5: 0.765, 6: 0.8, 7: 0.81, 8: 0.822}
    found = fewest_devices(8, lambda number: Judged(sure.get(number, 0.0), "too few"), 0.9)
    assert found.number == 6


def test_more_devices_hold_a_load_no_less_surely_than_fewer() -> None:
    """An answer said "5 hold it in 3 of 10 cases, 6 or 7 in 2": six devices can run the plan for five."""
    sure = {8: 0.5, 5: 0.3, 6: 0.2, 7: 0.2}
    found = fewest_devices(8, lambda number: Judged(sure.get(number, 0.0), "too few"), 0.9)
    assert found.number == 8 and [judged.confidence for _, judged in found.tried][-3:] == [0.3, 0.3, 0.5]


def test_more_devices_keep_the_bounds_at_no_lower_rate_than_fewer() -> None:
    """An answer said that 5 keep them only up to 6.75 requests/s, of which 4 keep them up to 6.79."""
    rates = {4: 6.79, 5: 6.75}

    def judge(number: int) -> Judged:
        if number == 8:
            return Judged(0.95, needed=4)
        error = InfeasibleError("", binding="arrival_rate_per_s", reason=f"up to {rates.get(number, 8.0)}")
        error.kept_per_s = rates.get(number, 8.0)
        raise error

    found = fewest_devices(8, judge, 0.9)
    assert [judged.why_not for _, judged in found.tried][:3] == ["up to 6.79", "up to 6.79", "up to 8.0"]


def test_a_guess_spares_judging_most_numbers_of_devices() -> None:
    judged = list[int]()

    def judge(number: int) -> Judged:
        judged.append(number)
        return Judged(float(number > 4), "too slow", needed=5)

    assert fewest_devices(32, judge, 0.9).number == 5
    assert judged == [32, 5, 4]
    for needed in (0, 2, 30):
        wrong = fewest_devices(32, lambda number, needed=needed: Judged(float(number > 4), "", needed), 0.9)
        assert wrong.number == 5


def test_outputs_of_one_token_hide_no_latency_under_waa() -> None:
    """Two thirds of the requests never come to the decode lane; the tail is of those that do."""
    asked = subject("opt-13b", "a40x4", "summarization")
    outputs = Histogram(lengths=(1, 30), probabilities=(0.7, 0.3))
    workload = asked.workload.model_copy(update={"output": outputs})
    constraint = Constraint(sla="request", quantile=0.9)
    plan = found_each(replace(asked, workload=workload).under(constraint), "waa").popitem()[1].plan
    measured, _ = simulate(plan, asked.profile, workload, 1500, np.random.default_rng(1))
    low, high = np.quantile(measured.latencies_s, [0.86, 0.94])
    assert 0.97 * low <= plan.estimate.latency_s <= 1.03 * high
