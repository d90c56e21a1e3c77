"""What is read of a command: a plan's own command is the plan, and a user's command stays as it was given."""

from __future__ import annotations

import numpy as np
import pytest

from tests.rings import few
from xgpt import api
from xgpt.comparing.compare import compare
from xgpt.comparing.launched import read_current
from xgpt.comparing.scoring import score_current
from xgpt.core.load import LogLoad
from xgpt.core.workload import TraceLengths, binned
from xgpt.deciding.commands import engine_command
from xgpt.requests import plan_request
from xgpt.solving import solve
from xsimulator.replay import replay

pytestmark = pytest.mark.usefixtures("short_simulations")


@pytest.mark.parametrize(
    ("asked", "is_small"),
    few(
        [
            ({"model": "llama-3.1-8b", "cluster": "h100x1", "tpot_s": 0.01}, True),
            ({"model": "llama-3.1-8b", "cluster": "h200x1"}, False),
            ({"model": "qwen3-30b-a3b", "cluster": "h100x1", "tpot_s": 0.05}, False),
            ({"model": "llama-3.1-8b", "cluster": "l40sx8", "devices": 2, "tpot_s": 0.1}, False),
        ],
        2,
    ),
)
def test_the_command_of_a_plan_is_the_plan(asked: dict[str, object], is_small: bool) -> None:
    """vLLM reserves memory to sample for --max-num-seqs requests. Plans counted as many as fit, up to 1% of K/V."""
    request = plan_request(workload="azure-conv", ttft_s=2, latency_bound_s=None, policy="chunked", engine="vllm")
    planned = solve(request.but(**asked))
    plan, problem = planned.best, planned.problem
    running = read_current(str(engine_command(plan, replicas=plan.replicas)), problem.cluster)
    scored = score_current(problem, running)
    assert (scored.stages, scored.admission, scored.policy) == (plan.stages, plan.admission, plan.policy)
    assert (scored.engine, scored.cluster, scored.replicas) == (plan.engine, plan.cluster, plan.replicas)
    assert not is_small or plan.policy.max_batch < plan.admission.max_running // 2


def test_a_deployment_is_shown_by_the_command_that_was_given() -> None:
    """It had --max-num-seqs and others, which nobody had set."""
    command = "vllm serve meta-llama/Llama-3.1-8B-Instruct --port 9000"
    asked = plan_request(cluster="h100x1", workload="azure-conv", latency_bound_s=20, policy="chunked")
    told = compare(asked, command).recommendation
    assert told.now is not None
    (process,) = told.now.processes
    assert (process.command, process.port, process.devices) == (command, 9000, (0,))


def test_plans_are_for_the_devices_that_one_has() -> None:
    """Of a gain of 2.26 times with eight devices instead of four, most was that of the devices."""
    found = api.compare(
        model="llama-3.1-8b",
        cluster="h200x8",
        devices=1,
        workload="azure-conv",
        latency_bound_s=8,
        objective="saturated",
        current="vllm serve llama --tensor-parallel-size 2",
    )
    assert found.current is not None and (found.best.num_devices, found.current.num_devices) == (1, 2)


def test_a_replay_does_not_depend_on_the_lengths_of_which_a_plan_was_made() -> None:
    """A plan kept 93.04% of another day's log, and the deployment that its command starts 93.03%."""
    asked = plan_request(
        model="llama-3.1-8b", cluster="h100x1", workload="azure-conv", latency_bound_s=20, policy="chunked"
    )
    planned = solve(asked.but(engine="vllm"))
    plan, profile = planned.best, planned.problem.profile
    own = TraceLengths(np.full(200, 700), np.full(200, 50), np.arange(200) / 4)
    other = plan.but(workload=plan.workload.but(input=binned([3000])))
    times = [replay(each, profile, LogLoad.of("log", own)) for each in (plan, other)]
    assert times[0] is not None and times[1] is not None
    assert (times[0].ttft_s == times[1].ttft_s).all()
