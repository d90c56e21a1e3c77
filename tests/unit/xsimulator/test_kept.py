"""What requests keep in an engine's K/V memory, against figures that engines logged."""

from __future__ import annotations

from typing import Any

import pytest

from xgpt.checkpoints.files import spec_of
from xgpt.comparing.launched import read_current
from xgpt.core.schema import DType, ModelSpec, Precision
from xgpt.resolve import load_cluster, load_engine, load_model
from xsimulator.kept import Kept
from xsimulator.memory import LaneMemory
from xsimulator.stages import whole

GIB = 2**30
DEEPSEEK_V4: dict[str, Any] = {
    "model_type": "deepseek_v4", "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64,
    "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024,
    "qk_rope_head_dim": 64, "sliding_window": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
    "compress_ratios": [0, 0, *(4, 128) * 20, 4, 0], "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 6, "moe_intermediate_size": 2048, "num_hash_layers": 3, "hc_mult": 4, "vocab_size": 129280,
    "max_position_embeddings": 1048576, "tie_word_embeddings": False,
}  # fmt: skip
QWEN35: dict[str, Any] = {
    "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "max_position_embeddings": 262144, "tie_word_embeddings": False,
}  # fmt: skip
QWEN36_MOE: dict[str, Any] = QWEN35 | {
    "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256, "global_head_dim": 512,
    "num_global_key_value_heads": 4, "attention_k_eq_v": True, "sliding_window": 1024, "vocab_size": 262144,
    "max_position_embeddings": 262144,
}  # fmt: skip


def kept(config: dict[str, Any] | str, engine: str | None, kv: DType = "bfloat16", tp: int = 1) -> Kept:
    spec: ModelSpec = load_model(config)[0] if isinstance(config, str) else spec_of(config, "m")
    stage = whole(spec, tp)[0]
    return Kept.of(spec, kv, stage, spec.num_layers, None if engine is None else load_engine(engine), 16)


def test_deepseek_v4_takes_blocks_for_all_that_it_keeps() -> None:
    """vLLM 0.22.1rc1 with 37.93 GiB: 40,471 blocks in 42,566,892,135 bytes, and 2,497,693 tokens of 256,000."""
    found = kept(DEEPSEEK_V4, "vllm-0.22", "float8")
    assert 42_566_892_135 // found.groups[0].page_bytes == 40471
    assert [group.tokens for group in found.groups] == [256, 4, 64, 64, 8]
    assert found.logged(37.93 * GIB, 256_000, 8192, by_requests=True) == pytest.approx(2_497_693, rel=1e-3)


def test_states_are_kept_twice_where_prefixes_are_cached() -> None:
    """vLLM 0.24 with --enable-prefix-caching: Qwen3.6-35B-A3B on an RTX 5090 logs 569,878 tokens for 6.01 GiB, and 4.35
    requests of 131,072. Without copies it would be 595,781.
    """
    running = read_current("vllm serve m --enable-prefix-caching", load_cluster("rtx-5090x8"))
    engine = running.as_started(load_engine("vllm-0.24"))
    spec = spec_of(QWEN36_MOE, "m")
    found = Kept.of(spec, "float8", whole(spec, 1)[0], spec.num_layers, engine, 16)
    assert found.logged(6.01 * GIB, 131_072, 8192, by_requests=True) == 569_878
    plain = read_current("vllm serve m --no-enable-prefix-caching", load_cluster("rtx-5090x8"))
    assert (load_engine("vllm-0.32").state_copies, plain.as_started(load_engine("vllm-0.32")).state_copies) == (2, 1)


def test_a_draft_joins_the_attention_beside_states() -> None:
    """vllm 44740, version 0.26: Qwen3.6-35B-A3B with MTP of 3 tokens logs 4,061,215 tokens for 90.6 GiB."""
    engine = load_engine("vllm-0.26")
    engine = engine.but(state_copies=2, sources=engine.sources | {"state_copies": "--enable-prefix-caching"})
    spec = spec_of(QWEN36_MOE, "m")
    found = Kept.of(spec, "bfloat16", whole(spec, 1)[0], spec.num_layers, engine, 16).with_draft(2 * 2 * 256 * 2, 3)
    assert found.logged(90.6 * GIB, 262_144, 8192, by_requests=True) == pytest.approx(4_061_215, rel=1e-3)


def test_engines_that_schedule_ahead_count_two_steps() -> None:
    """vllm 51041, version 0.26: with 7.01 GiB, requests may have 121,344 tokens. At this length, 7.71 GiB are logged as
    150,992 tokens, so 1.24 requests fit, and longer ones would. With one step, 7.01 GiB are logged as 1,009,661.
    """
    found = kept(DEEPSEEK_V4, "vllm-0.26", "float8")
    assert found.longest(7.01 * GIB, 2 * 8192) == 121_344
    assert found.logged(7.71 * GIB, 121_344, 2 * 8192, by_requests=True) == pytest.approx(150_992, rel=0.011)
    assert found.logged(7.01 * GIB, 912_128, 8192, by_requests=True) == pytest.approx(1_009_661, rel=0.011)


@pytest.mark.parametrize("by_requests", [False, True])
def test_states_take_pages_as_large_as_the_attentions(by_requests: bool) -> None:
    """vLLM 0.19, Qwen3.5-9B with TP 2: 15.06 GiB are 246,576 tokens and 169.82 requests of 4,096."""
    found = kept(QWEN35, "vllm-0.19", tp=2)
    assert [group.tokens for group in found.groups] == [528, 1, 1, 1]
    logged = found.logged(15.06 * GIB, 4096, 2048, by_requests=by_requests)
    assert logged == pytest.approx(169.82 * 4096 if by_requests else 246_576, rel=1e-3)


def test_the_log_of_gemma_4_changes_and_not_its_memory() -> None:
    """vllm 43308: about 55,000 tokens in about 50 GB with 0.20, and 525,000 with 0.21 (a context of 262,144)."""
    found = kept(GEMMA4, "vllm-0.20")
    assert found.logged(52e9, 262_144, 2048, by_requests=False) == pytest.approx(55_000, rel=0.1)
    assert found.logged(52e9, 262_144, 2048, by_requests=True) == pytest.approx(525_000, rel=0.1)


def test_sparse_attention_with_eight_bits_keeps_what_its_kernels_do() -> None:
    """SGLang pull request 11309: 48,072 bytes a token, 656 + 132 in each of 61 layers."""
    config = {
        "model_type": "deepseek_v32", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "first_k_dense_replace": 3, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
        "max_position_embeddings": 163840,
    }  # fmt: skip
    for engine in ("sglang-0.5", "vllm-0.24"):
        found = kept(config, engine, "float8")
        assert found.grows(None) == 61 * (656 + 132) == spec_of(config, "m").kv_bytes_per_token("float8")
        assert kept(config, engine).grows(None) == 61 * (576 * 2 + 132)


@pytest.mark.parametrize("engine", [None, "vllm-0.19", "sglang-0.5"])
def test_dense_models_keep_every_token_in_one_group(engine: str | None) -> None:
    found = kept("llama-3.1-8b", engine)
    assert [group.tokens for group in found.groups] == [16]
    assert (found.grows(8192), found.constant(8192), found.in_flight(8192)) == (131_072, 0, 0)
    assert found.longest(10 * 131_072 + 1, 8192) == 0 and found.longest(160 * 131_072, 8192) == 160


def test_the_largest_image_takes_memory_when_vllm_starts() -> None:
    """vLLM 0.26, Qwen3.5-27B in FP8 on an L40S with 86% of 44.4 GiB: 7.04 GiB, which hold at most 112,896 tokens."""
    language = QWEN35 | {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
        "linear_num_value_heads": 48,
    }  # fmt: skip
    vision = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "spatial_merge_size": 2}
    spec = spec_of(
        {
            "model_type": "qwen3_5", "text_config": language, "vision_config": vision | {"out_hidden_size": 5120},
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        },
        "m",
    )  # fmt: skip
    cluster = load_cluster("l40sx8")
    device = cluster.device.but(memory_bytes=round(44.4 * GIB), usable_memory=0.86)
    precision = Precision.of("float8", "gpu", "vllm", "bfloat16")

    def memory(model: ModelSpec) -> LaneMemory:
        lane, engine = whole(model), load_engine("vllm-0.26")
        return LaneMemory(model, cluster.but(device=device), precision, lane, 16, engine, slots=256, context=8192)

    free = memory(spec).free_bytes(2048)[0, 0] / GIB
    assert free == pytest.approx(7.04, rel=0.03)
    assert memory(spec).longest_request(2048, 2 * 2048) == pytest.approx(112_896, rel=0.03)
    assert memory(spec.but(tower=None)).free_bytes(2048)[0, 0] / GIB > free + 0.4


def test_windows_are_kept_by_engines_that_drop_the_rest() -> None:
    whole_, dropped = kept("gemma-3-27b", None), kept("gemma-3-27b", "sglang-0.5")
    assert whole_.grows(8192) > dropped.grows(8192) and dropped.constant(8192) > 1024 * dropped.in_flight(8192)
    assert whole_.grows(512) == dropped.grows(512), "a shorter context keeps all"
    assert dropped.longest(60e9, 8192) < dropped.longest(60e9, 2048)
