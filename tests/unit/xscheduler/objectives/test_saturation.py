"""Saturated figures are those of a simulation where closed forms do not know what happens."""

from __future__ import annotations

import pytest

from tests.rings import few
from xgpt import api
from xgpt.core.errors import InfeasibleError
from xgpt.core.schema import Histogram, Workload


def fixed(inputs: int, outputs: int) -> Workload:
    lengths = [Histogram(lengths=(length,), probabilities=(1.0,)) for length in (inputs, outputs)]
    return Workload(name="fixed", input=lengths[0], output=lengths[1])


SUBJECT = {
    "model": "llama-3.1-8b",
    "cluster": "h200x1",
    "workload": fixed(1000, 13),
    "policy": "orca",
    "objective": "saturated",
}


@pytest.mark.parametrize("bound_s", few([8.0, None]))
def test_requests_of_one_length_begin_and_end_together(bound_s):
    plan = api.solve(**SUBJECT, latency_bound_s=bound_s).best
    seen = api.simulate(plan, num_requests=2000).figures
    for name in ("throughput_rps", "latency_s", "ttft_s"):
        assert getattr(plan.estimate, name) == pytest.approx(seen[name], rel=0.03), name
    assert "ttft_s" in plan.estimate.simulated and plan.search.gap is not None


def test_a_bound_that_the_closed_form_keeps_and_a_simulation_breaks_is_not_kept():
    plan = api.solve(**SUBJECT, latency_bound_s=8.0, ttft_s=2.0).best
    assert 1.12 * api.simulate(plan, num_requests=2000).figures["ttft_s"] <= 2.0 * 1.01
    loose = api.solve(**SUBJECT, latency_bound_s=8.0).best
    assert plan.estimate.throughput_rps <= loose.estimate.throughput_rps


def test_where_nothing_keeps_a_bound_in_simulation_it_is_said():
    with pytest.raises(InfeasibleError) as caught:
        api.solve(**SUBJECT, latency_bound_s=8.0, ttft_s=0.001)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(("task", "bound_s"), few([("summarization", 2.8), ("translation", None)]))
def test_requests_of_an_encoder_decoder_have_their_first_token_in_the_decode_lane(task, bound_s):
    """The steps that they join are the long ones there: their first tokens', and gaps of those inside."""
    subject = {"model": "t5-11b", "cluster": "a40x8", "policy": "waa", "objective": "saturated"}
    plan = api.solve(**subject, workload=task, latency_bound_s=bound_s).best
    seen = api.simulate(plan, num_requests=1500).figures
    assert plan.estimate.ttft_s == pytest.approx(seen["ttft_s"], rel=0.1)
    assert plan.estimate.itl_p99_s == pytest.approx(seen["itl_p99_s"], rel=0.12)
