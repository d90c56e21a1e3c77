"""What `transformers`' own config classes write is read as the model that they build, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.planned import num_params
from xgpt.checkpoints.files import read_spec
from xgpt.core.errors import InputError
from xgpt.core.schema import ModelSpec, Quantization
from xgpt.resolve import load_model

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
    name, settings = CASES[case]
    of = {"Gemma3": "Gemma3Text"}.get(name, name)
    return getattr(transformers, f"{of}Config")(**(SIZES | settings | more))


def read(directory: Path, config: Any) -> ModelSpec:
    config.save_pretrained(directory)
    return read_spec(directory)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_matrices_are_those_of_the_model(case: str, tmp_path: Path) -> None:
    """By their number of weights: transformers builds the model from the same file."""
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
    text = config_of("gemma3", tie_word_embeddings=True)
    config = transformers.Gemma3Config(text_config=text.to_dict())
    assert read(tmp_path / "both", config).model_copy(update={"name": "text"}) == read(tmp_path / "text", text)


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
        ("gpt_oss", "swiglu_limit", 5.0),
        ("gpt_oss", "layer_types", ["chunked_attention"] * 4),
        ("gpt_oss", "num_experts", 6),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("minimax_m2", "attn_type_list", [1, 0, 1, 1]),
        ("gemma3", "use_bidirectional_attention", True),
        ("qwen3_moe", "use_sliding_window", True),
        ("qwen3_moe", "mlp_only_layers", 3),
        ("mistral", "partial_rotary_factor", 0.5),
        ("mistral", "model_type", "llama4"),
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
