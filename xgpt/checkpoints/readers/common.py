"""Read the fields of config.json that all families share, check single fields, and read the format in which weights are
stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from typing import Any, get_args

from xgpt.checkpoints.fields import wrong
from xgpt.core.schema import StoredDType

KNOWN = "fp8, mxfp4, 4-bit gptq, 4-bit awq, ModelOpt's FP8, MXFP8 and NVFP4, and 4-bit or 8-bit compressed-tensors"
FORMATS = {"FP8": "fp8", "FP8_PB_WO": "fp8_block", "NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4", "MXFP8": "mxfp8"}
FORMATS |= {"MXFP4": "mxfp4", "W4A8_MXFP4_FP8": "mxfp4"}
"""Weight formats by their names in ModelOpt."""
PARTS = {
    "attention": ("layers.7.self_attn.o_proj", "layers.7.attn.wo", "layers.7.linear_attn.out_proj"),
    "shared": ("layers.7.mlp.shared_experts.up_proj", "layers.7.ffn.shared_experts.w1"),
    "experts": ("layers.7.mlp.experts.3.up_proj", "layers.7.block_sparse_moe.experts.3.w1", "layers.7.ffn.experts"),
    "dense": ("layers.7.mlp.up_proj", "layers.7.ffn.w1"),
}
PARTS["attention"] += ("layers.7.mixer.o_proj",)
PARTS["shared"] += ("layers.7.mlp.shared_expert.up_proj", "layers.7.mixer.shared_experts.up_proj")
PARTS["dense"] += ("layers.7.mixer.up_proj",)
PREFIXES = ("", "model.", "model.language_model.", "language_model.model.", "backbone.")
"""Prefixes of weight names in checkpoints, with which lists of unquantised layers are searched."""


def quantization(config: Mapping[str, Any], side: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Return the format in which weights are stored, or None if they are stored in the model's dtype.

    Raises:
        InputError: the quantisation method is not known.
    """
    given = config.get("quantization_config")
    if given is None and side is not None:
        given = side.get("quantization", side)
    if given is None:
        return None
    if not isinstance(given, dict):
        accepted = 'it must be an object, such as {"quant_method": "fp8"}'
        raise wrong("quantization_config", given, accepted)
    found = _format(given)
    if found is not None and found["kind"] == "fp8_block" and config.get("expert_dtype") == "fp4":
        found = {"kind": "mxfp4", "eight_bit_parts": ("attention", "dense", "shared")}
    if found is None:
        raise wrong("quantization_config", given, f"xgpt supports only {KNOWN}")
    left_out = [*_names(given, "ignore"), *_names(given, "exclude_modules"), *_names(given, "modules_to_not_convert")]
    matches = _matcher(left_out)
    kept = tuple(
        part for part, names in PARTS.items() if any(matches(prefix + name) for name in names for prefix in PREFIXES)
    )
    if found["kind"] == "mxfp4" and given.get("quant_method") == "mxfp4":
        return found  # in gpt-oss, only experts are quantised
    if kept and "experts" not in kept:
        eight = found.get("eight_bit_parts", ())
        found["kept"] = tuple(part for part in (*found.get("kept", ()), *kept) if part not in eight)
    kv = given.get("kv_cache_quant_algo", given.get("kv_cache_scheme"))
    if kv == "FP8" or (isinstance(kv, dict) and kv.get("num_bits") == 8 and kv.get("type", "float") == "float"):
        found["kv_float8"] = True
    return found


def _format(given: Mapping[str, Any]) -> dict[str, Any] | None:
    match given:
        case {"quant_algo": "MIXED_PRECISION", "quantized_layers": dict(layers)}:
            found = _mixed(layers)
            if found is not None and given.get("quant_method") == "fp8":  # layers that are not listed have 8 bits
                found |= {"eight_bit_parts": tuple(part for part in PARTS if part != "experts"), "kept": ()}
            return found
        case {"quant_algo": str(name)} if name in FORMATS:
            return {"kind": FORMATS[name]}
        case {"quant_method": "fp8", "weight_block_size": [int(size), _]}:
            return {"kind": "fp8_block", "group_size": size}
        case {"quant_method": "fp8"}:
            return {"kind": "fp8", "finds_scales": given.get("activation_scheme", "dynamic") == "dynamic"}
        case {"quant_method": "mxfp4"}:
            return {"kind": "mxfp4", "experts_only": True}
        case {"quant_method": "gptq" | "awq" as method, "bits": 4}:
            zeros = given.get("zero_point", method == "awq") and not given.get("sym", False)
            return _int4(given.get("group_size"), has_zero_points=bool(zeros))
        case {"config_groups": {"group_0": {"weights": weights, **group}}}:
            return _compressed(weights, group.get("input_activations"), str(group.get("format", given.get("format"))))
    return None


def _compressed(weights: Mapping[str, Any], inputs: Any, name: str) -> dict[str, Any] | None:
    if "mxfp4" in name:
        return {"kind": "mxfp4"}
    match weights, inputs:
        case {"num_bits": 8, "type": "float", "strategy": "block"}, {"num_bits": 8}:
            return {"kind": "fp8_block"}
        case {"num_bits": 8, "type": "float"}, {"num_bits": 8, **scales}:
            return {"kind": "fp8", "finds_scales": bool(scales.get("dynamic"))}
        case {"num_bits": 8, "type": "int"}, {"num_bits": 8}:
            return {"kind": "int8"}
        case {"num_bits": 4, "type": "float"}, _:
            return {"kind": "nvfp4"}
        case {"num_bits": 4, "type": "int"}, None:
            return _int4(weights.get("group_size"), has_zero_points=weights.get("symmetric") is False)
    return None


def _int4(group_size: Any, *, has_zero_points: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": "int4", "has_zero_points": has_zero_points}
    return found | ({"group_size": group_size} if isinstance(group_size, int) and group_size > 0 else {})


def _mixed(layers: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the quantisation of a checkpoint whose parts have different formats: the main format (that of the experts
    or else of the dense blocks), the parts with 8-bit weights, and the parts in the model's dtype.
    """
    kinds: dict[str, str] = {}
    for name, layer_format in layers.items():
        kind = FORMATS.get(layer_format.get("quant_algo", "") if isinstance(layer_format, dict) else "")
        part = _part_of(name)
        if kind is None:
            return None
        if part is not None:
            kinds[part] = kind
    if not kinds:
        return None
    main = kinds.get("experts", kinds.get("dense", next(iter(kinds.values()))))
    eight = tuple(part for part in PARTS if kinds.get(part) in ("fp8", "mxfp8") and main == "nvfp4")
    kept = tuple(part for part in PARTS if part not in kinds and part != "dense")
    return {"kind": main, "eight_bit_parts": eight, "kept": kept}


def _part_of(name: str) -> str | None:
    if "shared_expert" in name:
        return "shared"
    if "experts" in name:
        return "experts"
    if "attn" in name or re.search(r"mixer\.(q|k|v|o|in|out)_proj", name):
        return "attention"
    return "dense" if "mlp" in name or "mixer" in name or "ffn" in name else None


def _names(given: Mapping[str, Any], field: str) -> Iterable[str]:
    names = given.get(field) or ()
    return [name for name in names if isinstance(name, str)] if isinstance(names, (list, tuple)) else ()


def _matcher(patterns: Iterable[str]) -> Any:
    exact = [pattern for pattern in patterns if not pattern.startswith("re:")]
    expressions = [re.compile(pattern.removeprefix("re:")) for pattern in patterns if pattern.startswith("re:")]

    def matches(weight: str) -> bool:
        if any(expression.match(weight) for expression in expressions):
            return True
        return any(
            fnmatch(weight, pattern) or fnmatch(weight, f"{pattern}.*") or weight.startswith(f"{pattern}.")
            for pattern in exact
        )

    return matches


ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
}
"""Names of activations in `ModelSpec` by their names in Hugging Face's configs."""


MTP = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "mtp_num_layers")
"""Fields that state the number of layers for multi-token prediction."""
UNSAID = ("mimo_v2_flash", "qwen3_next")
"""Families whose checkpoints have one layer for multi-token prediction although no field states it, as in vLLM."""


def count(config: dict[str, Any], field: str) -> int:
    """Return the value of a field that must be a whole number of at least 1.

    Raises:
        InputError: the value is not such a number.
        KeyError: the field is missing.
    """
    value = config[field]
    if type(value) is not int or value < 1:
        raise wrong(field, value, "it must be a whole number, at least 1")
    return value


def activation(config: dict[str, Any], field: str, default: str) -> str:
    """Return the activation function that `field` names.

    Raises:
        InputError: the activation is not known.
    """
    name = config.get(field, default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise wrong(field, name, f"xgpt supports only {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def common(
    config: dict[str, Any], generation: Mapping[str, Any], side: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    eos = (generation or config).get("eos_token_id")
    fields: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "tie_embeddings": config.get("tie_word_embeddings", True),
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    }
    dtype = config.get("torch_dtype") if config.get("dtype") is None else config["dtype"]
    if dtype is not None:
        if dtype not in get_args(StoredDType):
            raise wrong("dtype", dtype, f"known dtypes: {', '.join(get_args(StoredDType))}")
        fields["default_dtype"] = dtype
    said = (config[name] for name in MTP if type(config.get(name)) is int and config[name] > 0)
    if ahead := next(said, int(config.get("model_type") in UNSAID)):
        fields["mtp_layers"] = ahead
    if (stored := quantization(config, side)) is not None:
        fields["quantization"] = stored
    return fields


def windows(config: dict[str, Any], default: int | None, full_every: int | None) -> dict[str, Any]:
    """Return two fields: the sliding window, and the layers without a window.

    Args:
        default: the window if config.json states none.
        full_every: used if config.json has no `layer_types`: one layer in `full_every` attends to all tokens. None
            means that no layer does.

    Raises:
        InputError: a layer's attention is of an unknown kind.
    """
    window, num_layers = config.get("sliding_window", default), count(config, "num_hidden_layers")
    if window is not None and (type(window) is not int or window < 2):
        # With a window of 1, transformers' cache keeps all tokens.
        raise wrong("sliding_window", window, "it must be a whole number, at least 2")
    kinds = config.get("layer_types")
    if kinds is None:
        full = [i for i in range(num_layers) if full_every is not None and (i + 1) % full_every == 0]
    else:
        if (
            not isinstance(kinds, list)
            or len(kinds) != num_layers
            or not set(kinds) <= {"full_attention", "sliding_attention"}
        ):
            accepted = "it must be 'full_attention' or 'sliding_attention' for each layer"
            raise wrong("layer_types", kinds, accepted)
        full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    if window is None or len(full) == num_layers:
        return {}
    return {"sliding_window": window, "full_attention_layers": tuple(full)}
