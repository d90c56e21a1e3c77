"""Loads of benchmark tools, and simulated runs of them."""

from __future__ import annotations

import numpy as np
import pytest

import xgpt
from xgpt.bench_command import read_benchmark
from xgpt.core import policies
from xgpt.core.errors import InputError
from xgpt.core.schema.step_log import StepRecord
from xprofiler.store import profile_of
from xsimulator.benchmarked import closed_loop
from xsimulator.costs.step_cost import lanes_of
from xsimulator.counts.arrivals import Kv

VLLM = (
    "vllm bench serve --model m --random-input-len 1000 --random-output-len=100 --num-prompts 200 --max-concurrency 16"
)


@pytest.fixture(scope="module")
def plan():
    return xgpt.plan(
        model="llama-3.1-8b",
        cluster="h100x1",
        workload="azure-conv",
        engine="vllm",
        latency_bound_s=20,
        policy="chunked",
    )


def test_lengths_have_exactly_the_mean_of_the_command():
    found = read_benchmark(VLLM + " --random-range-ratio 0.5")
    assert len(found.requests.input) == 200 and found.clients == 16 and found.requests.timestamp_s is None
    assert found.requests.input.mean() == pytest.approx(1000, abs=1)
    assert 500 <= found.requests.input.min() < 520 and 1480 < found.requests.input.max() <= 1500
    assert found.requests.output.mean() == pytest.approx(100, abs=1)


@pytest.mark.parametrize(
    ("command", "lowest", "highest"),
    [
        ("python -m sglang.bench_serving --dataset-name random --random-input 1000 --num-prompts 100", 1, 1000),
        (
            "python3 benchmarks/benchmark_serving.py --dataset-name random --random-input-len 1000 "
            "--random-range-ratio 0.8 --num-prompts 100",
            800,
            1000,
        ),
        ("aiperf profile --isl 1000 --osl 50 --request-count 100 --concurrency 4", 1000, 1000),
        (
            'vllm bench serve --input-len 1000 --random-range-ratio \'{"input": 0.1, "output": 0}\' --num-prompts 99',
            900,
            1100,
        ),
    ],
)
def test_each_tool_draws_from_its_own_range(command, lowest, highest):
    inputs = read_benchmark(command).requests.input
    assert lowest <= inputs.min() <= lowest + 10 and highest - 10 <= inputs.max() <= highest


def test_shared_prefixes_are_shared_within_their_group_only():
    command = "vllm bench serve --dataset-name prefix_repetition --num-prompts 40 --prefix-repetition-num-prefixes 4"
    found = read_benchmark(command).requests
    assert found.prefixes is not None and set(found.input) == {512}
    firsts = [ids[:16] for ids in found.prefixes.prompts]
    assert sorted(firsts.count(each) for each in set(firsts)) == [10, 10, 10, 10]
    assert len({ids[16] for ids in found.prefixes.prompts}) == 40


def test_an_infinite_burstiness_means_equal_gaps():
    times = read_benchmark("vllm bench serve --num-prompts 4 --request-rate 2 --burstiness inf").requests.timestamp_s
    np.testing.assert_allclose(times, [0.5, 1, 1.5, 2], rtol=0.01)


def outstanding(steps: list[StepRecord]) -> int:
    arrivals = [(each.arrival_ns, 1) for record in steps for each in record.arrivals]
    ends = [(record.end_ns, -1) for record in steps for _ in record.finished]
    return int(np.cumsum([change for _, change in sorted(arrivals + ends)]).max())


@pytest.mark.parametrize("rate", ["", " --request-rate 50", " --request-rate 2 --burstiness 0.5"])
def test_a_benchmark_is_simulated_from_its_first_to_its_last_request(plan, rate):
    run = xgpt.simulate(plan, bench=VLLM + rate)
    assert run.measured.num_requests == len(run.times.ttft_s) == 200
    assert outstanding(run.steps) <= 16 / plan.replicas
    sent = sorted(each.arrival_ns for record in run.steps for each in record.arrivals)
    if rate.endswith("2 --burstiness 0.5"):
        assert sent[-1] / 1e9 == pytest.approx(100)
    elif not rate:
        assert sent[:16] == [0] * 16 and sent[16] > 0


def test_clients_that_start_together_are_those_of_the_compiled_counts(plan):
    benchmark = read_benchmark(VLLM + " --random-range-ratio 0.9")
    inputs, outputs = (each.tolist() for each in benchmark.requests[:2])
    schedule = policies.build(plan)
    assert isinstance(schedule, policies.OneLane)
    times, end_s = closed_loop(
        schedule.settings,
        lanes_of(plan, profile_of(plan, None))["both"],
        Kv(schedule.pool.kv_blocks, plan.block_size, plan.admission.kv == "quantile"),
        (inputs, outputs),
        16,
        plan.request_path_s,
    )
    run = xgpt.simulate(plan, bench=VLLM + " --random-range-ratio 0.9")
    assert run.times is not None and max(each.end_ns for each in run.steps if each.finished) == round(1e9 * end_s)
    for name in ("ttft_s", "tpot_s", "whole_s"):
        np.testing.assert_array_equal(getattr(run.times, name), getattr(times, name))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"bench": "wrk -t4 http://localhost"}, "it is no command of `vllm bench serve`"),
        ({"bench": "python -m sglang.bench_serving --num-prompts 5"}, "give them as `workload`"),
        ({"bench": "vllm bench serve --ramp-up-strategy linear"}, "--ramp-up-strategy"),
        ({"bench": "vllm bench serve --num-prompts many"}, "it must be a number"),
        ({"bench": "vllm bench serve --num-prompts 0"}, "number of requests"),
        ({"bench": "vllm bench serve --random-input-len 'x"}, "quotation"),
        ({"bench": "aiperf profile --isl 100 --request-count 5"}, "--output-tokens-mean"),
        ({"bench": VLLM + " --random-range-ratio '{'"}, "it must be a number"),
        ({"bench": VLLM.replace("1000", "inf")}, "at most 100,000,000 tokens"),
        ({"bench": VLLM + " --request-rate 2 --burstiness 0"}, "it must be above 0"),
        ({"bench": VLLM, "clients": 4}, "`bench` says this"),
        ({"bench": VLLM.replace("1000", "1000000")}, "tokens, but the"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(plan, asked, says):
    with pytest.raises(InputError) as error:
        xgpt.simulate(plan, **asked)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_lengths_of_a_data_set_come_from_the_workload(plan, tmp_path):
    trace = tmp_path / "lengths.csv"
    trace.write_text("input,output\n" + "300,40\n500,90\n" * 50)
    run = xgpt.simulate(plan, bench="python -m sglang.bench_serving --num-prompts 80", workload=str(trace))
    assert run.measured.num_requests == 80
