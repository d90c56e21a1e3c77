"""Read from config.json and hf_quant_config.json how a checkpoint's weights are quantised."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from typing import Any

from xgpt.core.errors import InputError

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

    Args:
        side: content of hf_quant_config.json, or None.

    Raises:
        InputError: the method is not known.
    """
    given = config.get("quantization_config")
    if given is None and side is not None:
        given = side.get("quantization", side)
    if given is None:
        return None
    if not isinstance(given, dict):
        accepted = 'it must be an object, such as {"quant_method": "fp8"}'
        raise InputError("config.json: quantization_config", given, accepted)
    found = _format(given)
    if found is not None and found["kind"] == "fp8_block" and config.get("expert_dtype") == "fp4":
        found = {"kind": "mxfp4", "eight_bit_parts": ("attention", "dense", "shared")}
    if found is None:
        raise InputError("config.json: quantization_config", given, f"known methods: {KNOWN}")
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
    """Return the format of the experts (without experts, of most weights), and the parts with 8-bit weights."""
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
    """Return a function that returns whether any of the patterns matches a weight's name."""
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
