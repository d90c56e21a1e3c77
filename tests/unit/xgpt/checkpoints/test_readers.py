"""What `transformers`' own config classes write is read as the model that they build, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.planned import num_params
from xgpt.checkpoints.files import read_spec
from xgpt.core.errors import InputError
from xgpt.core.schema import ModelSpec, Quantization
from xgpt.resolve import load_cluster, load_model
from xprofiler.store import obtain_profile

SIZES = {
    "vocab_size": 211,
    "hidden_size": 60,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_hidden_layers": 4,
    "intermediate_size": 44,
    "max_position_embeddings": 128,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 22, "num_experts": 9, "moe_intermediate_size": 27, "mlp_only_layers": [2]}),
    "qwen3_moe-sparse": ("Qwen3Moe", {"num_experts": 12, "decoder_sparse_step": 2, "norm_topk_prob": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "sliding_window": 16}),
    "gpt_oss": ("GptOss", {"num_local_experts": 5, "head_dim": 22}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 9, "head_dim": 22}),
    "deepseek_v2": ("DeepseekV2", {"q_lora_rank": None, "num_experts_per_tok": 3, "n_routed_experts": 6}),
    "deepseek_v3": (
        "DeepseekV3",
        {"q_lora_rank": 33, "kv_lora_rank": 20, "n_routed_experts": 16, "moe_intermediate_size": 18},
    ),
    "mistral": ("Mistral", {"head_dim": 22}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "gemma2": ("Gemma2", {"head_dim": 22, "query_pre_attn_scalar": 20}),
    "gemma3": ("Gemma3", {"head_dim": 22, "tie_word_embeddings": False}),
}


def config_of(case: str, **more: Any) -> Any:
    import transformers

    name, settings = CASES[case]
    family = {"Gemma3": "Gemma3Text"}.get(name, name)
    return getattr(transformers, f"{family}Config")(**(SIZES | settings | more))


def read(directory: Path, config: Any) -> ModelSpec:
    config.save_pretrained(directory)
    return read_spec(directory)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_matrices_are_those_of_the_model(case: str, tmp_path: Path) -> None:
    """By their number of weights: transformers builds the model from the same file."""
    import transformers

    config = config_of(case)
    spec = read(tmp_path, config)
    with torch.device("meta"):
        model = getattr(transformers, f"{CASES[case][0]}ForCausalLM")(config)
    weights = [weight for name, weight in model.named_parameters() if weight.dim() > 1 and "bias" not in name]
    assert num_params(spec) == sum(weight.numel() for weight in weights)
    assert spec.family == case.partition("-")[0]


@pytest.mark.parametrize("case", ["gpt_oss", "gemma2", "gemma3", "mixtral", "mistral"])
def test_windows_are_those_of_the_config(case: str, tmp_path: Path) -> None:
    config = config_of(case, num_hidden_layers=13)
    spec = read(tmp_path, config)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * 13
    assert spec.sliding_window == config.sliding_window
    assert [layer for layer, kind in enumerate(kinds) if kind == "full_attention"] == list(spec.full_attention_layers)


def test_gemma_3_with_images_is_read_as_its_language_model(tmp_path: Path) -> None:
    import transformers

    text = config_of("gemma3", tie_word_embeddings=True)
    config = transformers.Gemma3Config(text_config=text.to_dict())
    both = read(tmp_path / "both", config)
    with torch.device("meta"):
        model = transformers.Gemma3ForConditionalGeneration(config)
    seen = sum(weight.numel() for name, weight in model.named_parameters() if "vision" in name)
    assert both.tower_params == pytest.approx(seen, rel=0.1)
    assert both.model_copy(update={"name": "text", "tower_params": 0}) == read(tmp_path / "text", text)


def test_scaled_rotary_embeddings_are_read(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e4}
    config = config_of("deepseek_v3", rope_parameters=yarn | {"original_max_position_embeddings": 32})
    spec, shipped = read(tmp_path / "v3", config), load_model("deepseek-v3")[0]
    assert (spec.score_scale, spec.rope_scaling.attention_factor) == (pytest.approx(shipped.score_scale), 1.0)  # type: ignore[union-attr]
    long = {"rope_type": "longrope", "short_factor": [1.0] * 10, "long_factor": [2.0] * 10, "rope_theta": 1e4}
    config = config_of("phi3", rope_parameters=long, original_max_position_embeddings=32)
    assert read(tmp_path / "phi3", config).rope_scaling.attention_factor == pytest.approx(1.4**0.5)  # type: ignore[union-attr]


def compressed(*, dynamic: bool) -> dict[str, Any]:
    group = {
        "weights": {"num_bits": 8, "type": "float"},
        "input_activations": {"num_bits": 8, "type": "float", "dynamic": dynamic},
    }
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


QUANTISED = {
    "fp8": {"quant_method": "fp8"},
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "int4": {"quant_method": "awq", "bits": 4},
    "int8": {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {"weights": {"num_bits": 8, "type": "int"}, "input_activations": {"num_bits": 8, "type": "int"}}
        },
    },
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights_are_read(kind: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    read(directory, config_of("mixtral"))
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": QUANTISED[kind]}))
    spec = read_spec(directory)
    assert spec.quantization is not None and spec.quantization.kind == kind
    assert spec.weight_bytes("bfloat16") < 0.7 * spec.model_copy(update={"quantization": None}).weight_bytes("bfloat16")


@pytest.mark.parametrize(
    ("given", "finds_scales"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static"}, False),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, False),
        (compressed(dynamic=True), True),
        (compressed(dynamic=False), False),
    ],
)
def test_whether_a_checkpoint_holds_the_scales_of_activations(
    given: dict[str, Any], finds_scales: bool, tmp_path: Path
) -> None:
    spec = read(tmp_path / "model", config_of("mixtral", quantization_config=given))
    assert spec.quantization == Quantization(kind="fp8", finds_scales=finds_scales)


@pytest.mark.parametrize(
    ("case", "field", "value"),
    [
        ("mixtral", "quantization_config", {"quant_method": "quip"}),
        ("mixtral", "quantization_config", True),
        ("mixtral", "layer_types", ["full_attention"] * 4),
        ("gpt_oss", "layer_types", ["chunked_attention"] * 4),
        ("gpt_oss", "num_experts", 6),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("minimax_m2", "attn_type_list", [1, 0, 1, 1]),
        ("gemma3", "use_bidirectional_attention", True),
        ("qwen3_moe", "use_sliding_window", True),
        ("qwen3_moe", "mlp_only_layers", 3),
        ("mistral", "model_type", "mamba2"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(case: str, field: str, value: Any, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    read(directory, config_of(case))
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(InputError, match=field) as refused:
        read_spec(directory)
    assert "\n" not in str(refused.value)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MODELOPT = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}


def written(directory: Path, **files: Any) -> ModelSpec:
    """Read a directory with these JSON files."""
    directory.mkdir()
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return read_spec(directory)


def test_a_side_file_says_how_weights_and_keys_and_values_are_stored(tmp_path: Path) -> None:
    eight = written(tmp_path / "fp8", config=LLAMA, hf_quant_config=MODELOPT)
    assert eight.quantization == Quantization(kind="fp8", kv_float8=True)
    assert 8.5e9 < eight.weight_bytes("bfloat16") < 9.2e9
    attention = ["lm_head", *(f"model.layers.{layer}.self_attn*" for layer in range(32))]
    side = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": attention}}
    four = written(tmp_path / "nvfp4", config=LLAMA, hf_quant_config=side)
    assert four.quantization == Quantization(kind="nvfp4", kept=("attention",), kv_float8=True)
    feed_forward, others = 32 * 3 * 4096 * 14336, 2 * 128256 * 4096 + 32 * 2 * 4096 * (4096 + 1024)
    assert four.weight_bytes("bfloat16") == pytest.approx(feed_forward * 4.5 / 8 + 2 * others)
    assert obtain_profile(four, None, load_cluster("h100x1")).kv_dtype == "float8"


def test_a_config_of_modelopt_needs_no_method(tmp_path: Path) -> None:
    given = {"quant_algo": "FP8", "kv_cache_scheme": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
    spec = written(tmp_path / "model", config=LLAMA | {"quantization_config": given})
    assert spec.quantization == Quantization(kind="fp8", kv_float8=True)


def test_smaller_groups_take_more_memory(tmp_path: Path) -> None:
    sizes = []
    for group in (32, 128):
        given = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
        sizes.append(written(tmp_path / str(group), config=LLAMA | {"quantization_config": given}))
    weights = 32 * (3 * 4096 * 14336 + 2 * 4096 * (4096 + 1024))
    more = sizes[0].weight_bytes("bfloat16") - sizes[1].weight_bytes("bfloat16")
    assert more == pytest.approx(weights * 20 / 8 * (1 / 32 - 1 / 128), rel=1e-6)


@pytest.mark.parametrize("family, stated", [("qwen2", 32768), ("qwen3", 40960)])
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_the_context_that_qwen_documents_with_yarn(family: str, stated: int, field: str, tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    more = {"model_type": family, "max_position_embeddings": stated, "rope_theta": 1e6, field: scaling}
    spec = written(tmp_path / "model", config=LLAMA | more)
    assert (spec.max_context, spec.rope_theta) == (131072, 1e6)


def test_what_vllm_takes_where_no_dtype_is_named(tmp_path: Path) -> None:
    without = {name: value for name, value in LLAMA.items() if name != "torch_dtype"}
    assert written(tmp_path / "model", config=without).default_dtype == "bfloat16"


OFFICIAL = {
    "gemma 3, sizes left out": (
        {
            "model_type": "gemma3",
            "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 3840,
                "intermediate_size": 15360,
                "num_attention_heads": 16,
                "num_hidden_layers": 48,
                "num_key_value_heads": 8,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        },
        11.77e9,
    ),
    "qwen3 coder, neutral values": (
        {
            "model_type": "qwen3_moe",
            "hidden_size": 6144,
            "intermediate_size": 8192,
            "moe_intermediate_size": 2560,
            "num_attention_heads": 96,
            "num_hidden_layers": 62,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_experts": 160,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 262144,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
            "qkv_bias": False,
            "use_qk_norm": True,
            "shared_expert_intermediate_size": 0,
        },
        480.15e9,
    ),
}


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_configs_are_read(name: str, tmp_path: Path) -> None:
    config, published = OFFICIAL[name]
    assert num_params(written(tmp_path / "model", config=config)) == pytest.approx(published, rel=1e-3)


def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path) -> None:
    config = json.loads(json.dumps(config_of("deepseek_v3").to_dict()))
    named = [written(tmp_path / name, config=config | {"model_type": name}) for name in ("deepseek_v3", "kimi_k2")]
    assert named[0] == named[1].model_copy(update={"name": "deepseek_v3"})
