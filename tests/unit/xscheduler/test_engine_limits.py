"""What an engine cannot start is not planned, and what binds is named."""

from __future__ import annotations

import pytest

from xgpt import api
from xgpt.core.errors import InfeasibleError
from xgpt.core.schema import ClusterSpec, ModelSpec, Quantization
from xgpt.resolve import load_cluster, load_engine, load_model
from xscheduler.engine_limits import why_not_divided

VLLM = load_engine("vllm")
BLOCKS = Quantization(kind="fp8_block")


def stored(name: str, quantization: Quantization) -> ModelSpec:
    return load_model(name)[0].model_copy(update={"quantization": quantization})


@pytest.mark.parametrize(
    ("name", "tp", "ep", "starts"),
    [
        ("qwen3-235b-a22b", 8, 1, False),
        ("qwen3-235b-a22b", 4, 1, True),
        ("qwen3-235b-a22b", 8, 8, True),
        ("qwen3-30b-a3b", 4, 1, False),
        ("qwen3-30b-a3b", 2, 1, True),
    ],
)
def test_blocks_of_fp8_weights_are_not_cut(name: str, tp: int, ep: int, *, starts: bool) -> None:
    """vLLM raises ValueError when it loads these checkpoints with such degrees, or starts."""
    reason = why_not_divided(stored(name, BLOCKS), VLLM, tp, ep)
    assert (reason is None) == starts
    assert why_not_divided(stored(name, BLOCKS), None, tp, ep) is None


def test_groups_of_four_bits_are_not_cut() -> None:
    four = Quantization(kind="int4", group_size=128)
    assert why_not_divided(stored("qwen2.5-0.5b", four), VLLM, 2) is not None
    assert why_not_divided(stored("llama-3.1-8b", four), VLLM, 8) is None
    assert why_not_divided(stored("qwen2.5-0.5b", Quantization(kind="int4", group_size=32)), VLLM, 2) is None


def test_heads_and_experts_that_do_not_divide_are_named() -> None:
    assert why_not_divided(load_model("qwen3-14b")[0], None, 3) == "40 attention heads cannot be divided by 3"
    assert why_not_divided(load_model("qwen3-30b-a3b")[0], None, 1, 3) == "128 experts cannot be divided by 3"


def planned(model: ModelSpec, cluster: ClusterSpec | str, **asked: object) -> object:
    return api.solve(
        model=model,
        cluster=cluster,
        workload="chat-short",
        latency_bound_s=60,
        policy="orca",
        engine="vllm",
        objective="saturated",
        **asked,  # type: ignore[arg-type]
    ).best


def test_a_degree_that_cannot_start_is_refused_with_its_reason() -> None:
    model = stored("qwen3-235b-a22b", BLOCKS)
    with pytest.raises(
        InfeasibleError, match=r"tp=8, ep=1: each of 8 devices would have 192 of the 1536 columns of an expert"
    ):
        planned(model, "h200x8", fix={"tp": 8, "ep": 1})
    with pytest.raises(InfeasibleError, match="40 attention heads cannot be divided by 3"):
        planned(load_model("qwen3-14b")[0], "h100x8", fix={"tp": 3})


def test_a_refusal_for_memory_says_how_many_devices_would_do() -> None:
    model, eight = load_model("llama-3.1-70b")[0], load_cluster("h100x8")
    one, two = (eight.model_copy(update={"devices_per_node": n}) for n in (1, 2))
    with pytest.raises(InfeasibleError, match=r"memory: .*; 2 devices of h100-80gb-hbm3 would be enough"):
        planned(model, one)
    planned(model, two)
    with pytest.raises(InfeasibleError, match=r"not hold llama-3\.1-70b and a request, and h100x8 states no `intra_"):
        planned(model, two.model_copy(update={"intra_node": None}))
