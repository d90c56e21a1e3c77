"""Which policies are planned for, and what stands in the table."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.rings import ALL, few
from xgpt import api
from xgpt.core.errors import InfeasibleError
from xgpt.core.schema import Capacity, Ceiling, Constraint, Workload
from xgpt.core.schema.plan import rate_of
from xgpt.problems import resolve
from xgpt.reporting.plan_text import missing_in_words
from xgpt.requests import plan_request
from xgpt.resolve import load_engine
from xscheduler.objectives import sessions
from xscheduler.objectives.arrivals import Arrivals
from xscheduler.objectives.best_plans import kinds_of
from xscheduler.objectives.capacities import predicted_rate
from xscheduler.schedule import scheduler
from xsimulator.capacity import CapacitySearch
from xsimulator.run import check_fits

# T5-11B's encoder takes most of the time of a summary: divided by computation, most devices encode.
CLUSTER = "a40x8" if ALL else "a40x4"
SUBJECT = {"model": "t5-11b", "workload": "summarization", "latency_bound_s": 12, "objective": "saturated"}


def plans_of(**asked):
    return api.solve(**SUBJECT, **asked).plans


@pytest.fixture(scope="module")
def both():
    return plans_of(cluster=CLUSTER, policy="waa")


@pytest.mark.long
def test_waa_is_the_better_of_its_two_allocations(both):
    assert list(both) == sorted(both, key=lambda kind: -both[kind].estimate.throughput_rps)
    assert {plan.policy.allocation for plan in both.values()} == {"compute", "memory"}
    throughputs = [plan.estimate.throughput_rps for plan in both.values()]
    assert throughputs[0] > 1.05 * throughputs[1]
    encoding = {
        kind: sum(stage.tp for stage in plan.stages if stage.lane == "encode") / plan.devices_per_replica
        for kind, plan in both.items()
    }
    assert encoding["waa-c"] >= encoding["waa-m"]


@pytest.mark.parametrize(("kind", "allocation"), few([("waa-c", "compute"), ("waa-m", "memory")]))
def test_each_allocation_can_be_asked_for(both, kind, allocation):
    (alone,) = plans_of(cluster=CLUSTER, policy=kind).values()
    assert alone.policy.kind == "waa" and alone.policy.allocation == allocation
    assert alone.stages == both[kind].stages
    assert alone.estimate.throughput_rps == both[kind].estimate.throughput_rps


@pytest.mark.long
def test_auto_and_exegpt_show_both(both):
    assert {"rra", "waa-c", "waa-m"} == set(plans_of(cluster=CLUSTER, policy="exegpt"))
    found = plans_of(cluster=CLUSTER)
    assert {"waa-c", "waa-m"} < set(found) and found["waa-m"].stages == both["waa-m"].stages


@pytest.mark.long
@pytest.mark.usefixtures("short_simulations")
@pytest.mark.parametrize("devices", few([{"cluster": "a40x4", "devices": "auto"}, {"among": {"a40x4": 1.0}}]))
def test_the_number_of_devices_is_chosen_under_the_order_of_the_plan(devices):
    """Rows belong to das: a number of devices chosen for another order was refused."""
    asked = {"model": "opt-13b", "workload": "summarization", "latency_bound_s": 8, "arrival_rate_per_s": 2}
    planned = api.solve(**asked, **devices, policy="orca", order="das", fix={"row_tokens": 2048})
    assert planned.problem.max_devices == 1 and planned.best.admission.order == "das"


def test_two_devices_can_be_divided_in_one_way():
    (by_compute,) = plans_of(cluster=CLUSTER, policy="waa-c", devices=2).values()
    (by_memory,) = plans_of(cluster=CLUSTER, policy="waa-m", devices=2).values()
    assert (by_compute.policy.allocation, by_memory.policy.allocation) == ("compute", "memory")
    assert by_compute.estimate.throughput_rps == by_memory.estimate.throughput_rps
    planned = api.solve(**SUBJECT, cluster="a40x8", policy="waa", devices=2)
    assert list(planned.plans) == ["waa"]
    assert missing_in_words("waa", planned.problem, planned.plans) == [
        "waa: waa-c and waa-m divide these devices in the same way"
    ]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"engine": "sglang"}, "sglang does not run rra, orca, static, waa-c, waa-m"),
        ({"fix": {"token_budget": 512}}, "not searched, since a fixed setting is not theirs: rra, orca, static"),
        (
            {"engine": "vllm", "speculative": "ngram", "acceptance": 0.7},
            "not searched, since drafts need another policy: rra, orca, static",
        ),
    ],
)
def test_a_policy_that_was_not_searched_is_not_said_to_have_no_plan(asked, said):
    """`plan --policy orca` had one that keeps the bounds."""
    many = {"model": "llama-3.1-8b", "cluster": "h100x8", "workload": "azure-conv", "latency_bound_s": 20}
    problem = resolve(plan_request(**many, **asked))
    given = SimpleNamespace(constraint=problem.constraint)
    lines = missing_in_words("auto", problem, dict.fromkeys(kinds_of(problem, "auto"), given))
    assert said in lines[0] and "no plan that keeps" not in " ".join(lines)


def test_sessions_are_planned_under_what_the_engine_runs():
    """Orca was searched for SGLang, too, and `xgpt serve` offered, which starts another engine."""
    problem = SimpleNamespace(
        engine=load_engine("sglang"), speculation=None, constraint=Constraint(ttft_s=1.0, objective="arrivals")
    )
    problem.model = SimpleNamespace(is_encoder_decoder=False, kinds=())
    assert sessions._kinds(problem, "auto", None) == ("chunked",)


@pytest.mark.long
def test_the_order_of_admission_is_chosen_with_the_plan() -> None:
    """A few long prompts make many short ones late: 13.3 requests/s keep the bounds by arrival, 16.7 in-time."""
    asked = {"model": "llama-3.1-8b", "cluster": "h100x1", "workload": "azure-code", "ttft_s": 0.5, "tpot_s": 0.03}
    rates = {}
    for order in (None, "fcfs"):
        plan = api.plan(**asked, order=order, latency_bound_s=None)
        rates[order] = plan.estimate.capacity.rate_per_s
        assert plan.admission.order == ("fcfs" if order else "in-time")
        assert plan.search.gap is not None
    assert rates[None] > 1.2 * rates["fcfs"]
    # vLLM's own scheduler admits in order of arrival.
    assert api.plan(**asked, engine="vllm", latency_bound_s=None).admission.order == "fcfs"


def test_a_plan_holds_the_longest_request_by_itself():
    """Otherwise a search on few devices ended with an error about a plan that it had chosen itself."""
    asked = {"model": "llama-3.1-70b", "cluster": "h100x8", "engine": "vllm", "devices": 3, "workload": "azure-conv"}
    problem = resolve(plan_request(**asked, latency_bound_s=None, ttft_s=2.0, tpot_s=0.06))
    lengths = {"kind": "histogram", "lengths": [2000, 16000], "probabilities": [0.999, 0.001]}
    workload = Workload.model_validate(
        {"name": "reasoning", "input": {**lengths, "lengths": [2000, 6000]}, "output": lengths}
    )
    by = Arrivals(scheduler(replace(problem, workload=workload)))
    drafts = [draft for kind in ("chunked", "orca") for draft, _ in by.of_kind(kind, 3)]
    assert drafts
    for draft in drafts:
        check_fits(draft, workload)


def test_the_rate_in_closed_form_is_not_the_simulated_one():
    """Where a smaller batch sustained the simulated rate, this rate stood for both."""
    asked = {"model": "llama-3.1-8b", "cluster": "h200x1", "workload": "azure-conv", "policy": "chunked"}
    request = plan_request(**asked, latency_bound_s=None, ttft_s=0.5, tpot_s=0.05)
    plan = next(iter(api.solve(**asked, latency_bound_s=None, ttft_s=0.5, tpot_s=0.05).plans.values()))
    predicted = predicted_rate(plan, resolve(request).profile)
    assert plan.estimate.capacity.closed_form_per_s == pytest.approx(predicted, rel=1e-6)


def test_a_rate_that_lasts_only_for_the_requests_of_a_search_is_refused(monkeypatch):
    """The search keeps 16.6 requests/s of 2,000, and 15.8 of 16,000: at 16.3, no plan was left, without a word."""
    monkeypatch.setattr("xsimulator.capacity.LASTING_REQUESTS", 16_000)
    asked = {"model": "llama-3.1-70b", "cluster": "h100x8", "workload": "azure-conv", "engine": "vllm"}
    bounds = {"latency_bound_s": None, "ttft_s": 2, "tpot_s": 0.06, "quantile": 0.9}
    best = {"tp": 2, "replicas": 2, "token_budget": 608, "max_batch": 112}
    with pytest.raises(InfeasibleError, match=r"16\.3 requests/s"):
        api.solve(**asked, **bounds, policy="chunked", arrival_rate_per_s=16.3, fix=best)


def test_a_plan_whose_rate_does_not_last_is_left_out(monkeypatch):
    """The gap of a plan with a rate of 0 divided by it."""
    nothing = Capacity(rate_per_s=0.0, whole_s=0.0, share_kept=0.0, num_requests=0, warm_up_requests=0)
    never = SimpleNamespace(rate=0.0, _found=lambda predicted, edges: nothing)
    lasts = property(lambda search: search if search.plan.policy.kind == "orca" else never)
    monkeypatch.setattr(CapacitySearch, "lasting", lasts)
    asked = {"model": "llama-3.1-8b", "cluster": "h200x1", "workload": "orca", "latency_bound_s": 10}
    plans = api.solve(**asked, engine="vllm").plans
    assert list(plans) == ["orca"] and plans["orca"].search.gap is not None
    unproven = plans["orca"].with_estimate(capacity=nothing).proven(Ceiling(5.0, "a bound"))
    assert unproven.search.gap is None and "no rate" in unproven.search.bound


def test_a_fixed_limit_on_running_requests_may_exceed_what_memory_holds():
    """What ran was refused ("fits in memory with max_batch=199") for a log whose requests never reach this limit."""
    asked = {"model": "llama-3.1-70b", "cluster": "h100x8", "workload": "azure-code", "engine": "vllm", "ttft_s": 4}
    fixed = {"tp": 4, "replicas": 2, "token_budget": 608}
    free, held = (
        api.solve(**asked, latency_bound_s=None, quantile=0.9, fix=fix, policy="chunked").best
        for fix in (fixed, {**fixed, "max_batch": 400})
    )
    assert free.policy.max_batch <= (free.admission.max_running or 0) < 400 == held.policy.max_batch
    assert held.admission.max_running is None, "the engine knows no other limit"
    assert rate_of(held) == pytest.approx(rate_of(free), rel=0.05)
