"""Attention by data parallelism: replicas that hold the experts together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.exports import export
from xgpt import api
from xgpt.comparing.compare import _as_run
from xgpt.comparing.launched import read_current
from xgpt.comparing.scoring import score_current
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.schema import Plan, Precision
from xgpt.deciding.commands import engine_command
from xgpt.problems import resolve
from xgpt.requests import plan_request
from xgpt.resolve import load_cluster, load_engine, load_model
from xgpt.serving.checking import check_runs
from xprofiler.analytic import Kernels, as_searched, shared_groups
from xprofiler.store import profile_of
from xsimulator.memory import LaneMemory
from xsimulator.stages import whole

DEEPSEEK, _ = load_model("deepseek-v3")
H200 = load_cluster("h200x8")

DEEPEP = {16: (118e-6, 195e-6), 32: (155e-6, 273e-6), 64: (173e-6, 314e-6)}
"""Seconds in which DeepEP's low-latency kernels send 128 tokens of 7,168 values to eight experts, in eight bits, and
bring them back in bfloat16, by devices: H800 with an adapter of 400 Gb/s each (github deepseek-ai/DeepEP, README)."""


@pytest.mark.parametrize("devices", DEEPEP)
def test_tokens_are_exchanged_as_fast_as_deepep_measured(devices: int) -> None:
    kernels = Kernels(load_cluster("h100x32"), "bfloat16")
    for seconds, size in zip(DEEPEP[devices], (1, 2), strict=True):
        assert kernels.exchange(128 * 8 * 7168 * size, devices) == pytest.approx(seconds, rel=0.25)


def test_a_node_and_all_nodes_may_share_the_experts() -> None:
    assert shared_groups(DEEPSEEK, H200) == ((1, 8), (2, 8), (4, 8))
    assert (1, 32) in shared_groups(DEEPSEEK, load_cluster("h200x32"))
    assert shared_groups(load_model("llama-3.1-8b")[0], H200) == ()


def test_a_device_holds_its_experts_and_the_rest_whole() -> None:
    precision = Precision.of("float8", "gpu", "vllm", "float8", {})

    def weights(tp: int, ep: int) -> float:
        return float(LaneMemory(DEEPSEEK, H200, precision, whole(DEEPSEEK, tp, ep), 16, must_fit=False).weight_bytes[0])

    experts = DEEPSEEK.expert_bytes("float8")
    assert weights(1, 8) == pytest.approx(weights(1, 1) - experts * 7 / 8)
    assert weights(8, 8) < weights(1, 8) < 1.5 * weights(8, 8)


ASKED: dict[str, Any] = {
    "model": "deepseek-v3",
    "cluster": "h200x8",
    "workload": "chat-short",
    "latency_bound_s": None,
    "policy": "chunked",
    "engine": "vllm",
}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return api.solve(**ASKED, fix={"tp": 1, "ep": 8}).best


def test_eight_replicas_hold_the_experts_together(plan: Plan) -> None:
    assert (plan.replicas, plan.sharing_replicas, plan.stages[0].tp) == (8, 8, 1)
    with pytest.raises(ValueError, match="form groups of 8; there are 4"):
        Plan.model_validate(plan.model_dump() | {"replicas": 4})


def test_keys_and_values_are_kept_once_where_tensor_parallelism_keeps_copies(plan: Plan) -> None:
    """Latent attention has one vector for all heads: a group of eight devices keeps it eight times."""
    together = api.solve(**ASKED, fix={"tp": 8, "ep": 8}).best
    tokens = [each.replicas * each.stages[0].kv_blocks for each in (plan, together)]
    assert tokens[0] > 5 * tokens[1]
    assert plan.estimate.throughput_rps > together.estimate.throughput_rps


def test_engines_are_told_to_share_the_experts(plan: Plan) -> None:
    command = engine_command(plan)
    assert command is not None
    assert "--data-parallel-size 8 --enable-expert-parallel" in command and "tensor-parallel" not in command
    assert f"--max-num-seqs {plan.policy.max_batch} " in command  # type: ignore[union-attr]
    sglang = engine_command(plan.model_copy(update={"engine": load_engine("sglang")}))
    assert sglang is not None and "--tp-size 8 --dp-size 8 --enable-dp-attention --ep-size 8" in sglang
    assert f"--max-running-requests {8 * plan.policy.max_batch} " in sglang  # type: ignore[union-attr]
    assert "vllm serve" in export(plan, "shell")["serve.sh"]


def test_our_engine_refuses_to_share_them(plan: Plan) -> None:
    with pytest.raises(InputError, match=r"plan.stages.ep: 8 .*at most 1, the value of tp"):
        check_runs(plan)
    with pytest.raises(InfeasibleError, match="only for vllm and sglang"):
        api.solve(**ASKED | {"engine": "tensorrt-llm"}, fix={"tp": 1, "ep": 8})


def test_a_deployment_on_some_devices_is_re_planned_on_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its plan stated a cluster of the four devices that it has."""
    asked = plan_request(model="Qwen/Qwen3-30B-A3B", cluster="h100x8", workload="chat-short", ttft_s=1, engine="vllm")
    command = f"vllm serve {asked.model} --data-parallel-size 4 --enable-expert-parallel"
    problem = resolve(asked)
    running = read_current(command, problem.cluster, {})
    as_run = _as_run(asked, problem, running)
    plan = score_current(as_run, running)
    assert plan.cluster.num_devices == 8 and plan.num_devices == plan.sharing_replicas == 4
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profile_of(plan) == as_run.profile, "on another machine, the profile is computed again"
    assert as_searched(as_run.profile, plan.cluster) == problem.profile != as_run.profile
