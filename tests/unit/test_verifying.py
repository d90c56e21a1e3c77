"""Plans that are settled by simulation: all requests' latency, arrival rates, the cheapest cluster."""

from __future__ import annotations

import numpy as np
import pytest

from tests.contract.scenarios import problem
from xgpt.app.planning import Subject, plan_each
from xgpt.app.simulating import simulate
from xgpt.app.sizing import cheapest
from xgpt.app.verifying import settle
from xgpt.errors import InfeasibleError, InputError
from xgpt.schema import Constraint, Plan
from xgpt.schema.plan import Sla
from xscheduler.schedule import Scheduler
from xsimulator.queueing import whole_times


def subject(model: str, cluster: str, workload: str, price: float | None = None) -> Subject:
    of = problem(model, cluster, workload)
    devices = of.cluster.model_copy(update={"price_per_device_hour": price})
    return Subject(of.model, None, devices, of.workload, of.profile)


def plan(bound_s: float) -> Plan:
    """Throughput follows the bound."""
    found = Scheduler(problem("llama-3.1-8b", "h200x1", "orca", 4.0)).best(("orca",))
    policy = found.policy.model_copy(update={"max_batch": round(1000 * bound_s)})
    estimate = found.estimate.model_copy(update={"throughput_rps": bound_s, "latency_s": bound_s})
    return found.model_copy(update={"policy": policy, "estimate": estimate})


def test_a_bound_that_simulation_breaks_is_tightened_until_it_is_kept() -> None:
    settled = settle(plan, lambda found: 1.2 * found.estimate.latency_s, 6.0, loosen=True)
    assert 0.98 * 6.0 <= settled.seen_s <= 6.0
    assert settled.seen_s == pytest.approx(1.2 * settled.plan.estimate.latency_s)


@pytest.mark.parametrize("loosen", [False, True])
def test_what_simulation_leaves_unused_is_taken_where_asked(loosen: bool) -> None:
    settled = settle(plan, lambda found: 0.8 * found.estimate.latency_s, 6.0, loosen=loosen)
    assert settled.seen_s == pytest.approx(6.0 if loosen else 4.8)


def test_a_bound_that_is_always_broken_is_infeasible() -> None:
    with pytest.raises(InfeasibleError, match="in simulation") as failure:
        settle(plan, lambda found: 7.0 + found.estimate.latency_s, 6.0, loosen=True)
    assert failure.value.nearest_bound_s is not None
    assert failure.value.nearest_bound_s > 6.0


def test_all_requests_keep_the_bound_that_a_length_would_break() -> None:
    """Long prompts in few, long phases: the quantile of all requests lies above a request of the quantile's length."""
    of = subject("llama-3.1-8b", "h200x1", "azure-conv")
    bound_s = 20.0

    def quantile_of_all(sla: Sla) -> tuple[Plan, float]:
        found = plan_each(of, Constraint(latency_bound_s=bound_s, sla=sla), "rra")["rra"]
        measured, _ = simulate(found, of.profile, of.workload, 3000, np.random.default_rng(1))
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
    of = subject("opt-13b", "a40x4", "summarization")
    constraint = Constraint(latency_bound_s=8.0, arrival_rate_per_s=20.0)
    found = next(iter(plan_each(of, constraint, "orca").values()))
    assert found.constraint.latency_bound_s == 8.0
    rng = np.random.default_rng(1)
    _, log = simulate(found, of.profile, of.workload, 2000, rng, arrival_rate=20.0)
    assert np.quantile(whole_times(log, skip_requests=200), 0.99) <= 1.05 * 8.0


def test_the_cheapest_cluster_comes_first_and_those_that_fail_last() -> None:
    clusters = [("h200x1", 4.5), ("v100x1", 0.1), ("a40x4", 1.0)]
    subjects = [subject("opt-13b", name, "summarization", price) for name, price in clusters]
    choices = cheapest(subjects, Constraint(latency_bound_s=8.0, arrival_rate_per_s=12.0), "orca")
    assert [choice.subject.cluster.name for choice in choices] == ["a40x4", "h200x1", "v100x1"]
    assert [choice.num_devices for choice in choices] == [2, 1, None]
    assert [choice.price_per_hour for choice in choices] == [2.0, 4.5, None]
    assert choices[-1].why_not is not None and "v100x1" in choices[-1].why_not
    with pytest.raises(InputError, match="price"):
        cheapest([subject("opt-13b", "a40x4", "summarization")], Constraint(arrival_rate_per_s=1.0))
