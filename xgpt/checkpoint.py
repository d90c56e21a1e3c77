"""The shape of a checkpoint, from its config.json alone: planning needs no more, and never loads torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

from xgpt.errors import InputError
from xgpt.io import parse
from xgpt.schema import DType, ModelSpec, RunDType

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
}
"""What Hugging Face calls an activation, and what `ModelSpec` does."""


STORED_DTYPES: dict[str, DType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""What safetensors calls a dtype, and what we do; all that weights may be stored in."""

T5_CONTEXT = 2048
"""Longest context that T5 is given: its positions are relative, and set no limit of their own."""


def read_spec(directory: Path) -> ModelSpec:
    """The model that a directory in Hugging Face layout describes.

    Its stop tokens are those of generation_config.json, where there is one that names any.

    Raises:
        InputError: there is no config.json, or it is of a family or variant that is not supported.
    """
    path = directory / "config.json"
    config = _read_object(path)
    if config is None:
        raise InputError("model", str(directory), "the directory must hold a config.json")
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise InputError(f"{path}: model_type", family, f"known families: {', '.join(sorted(FAMILIES))}")
    generation = _read_object(directory / "generation_config.json") or {}
    try:
        fields = _common(config, generation) | FAMILIES[family](config)
    except KeyError as error:
        raise InputError(str(path), None, f"it must set {error.args[0]}") from None
    headers = list(_headers(directory))
    if "default_dtype" not in fields and (stored := _stored_dtype(headers)) is not None:
        fields["default_dtype"] = stored
    if family == "t5" and headers:
        # Its configs cannot be trusted here: transformers 5 writes that all are tied, and ties where no head is stored.
        fields["tie_embeddings"] = not any('"lm_head.weight"' in header for header in headers)
    fields |= {"name": directory.resolve().name, "family": family}
    return parse(fields, ModelSpec, str(path))


def _read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError("model", str(path), f"it cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError("model", str(path), "it must hold a JSON object")
    return value


def _headers(directory: Path) -> Iterator[str]:
    """The headers of the weights' files, in JSON; an empty one of a broken file, which loading its weights reports.

    A safetensors file starts with the length of its header, 8 bytes little-endian, and the header.
    """
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            is_whole = 8 + length <= path.stat().st_size
            yield file.read(length).decode(errors="replace") if is_whole else ""


def _stored_dtype(headers: list[str]) -> DType | None:
    """The dtype of the first file's weights, for configs that leave it out (GPT-2's); None where none can be read."""
    names = re.findall(rf'"dtype":\s*"({"|".join(STORED_DTYPES)})"', headers[0] if headers else "")
    found = {STORED_DTYPES[name] for name in names}
    return found.pop() if len(found) == 1 else None


def require(config: dict[str, Any], field: str, expected: object) -> None:
    """Refuse a variant of a family; a field that is left out has the expected value.

    Raises:
        InputError: the field says something else.
    """
    value = config.get(field, expected)
    if value != expected:
        raise InputError(f"config.json: {field}", value, f"only {expected!r} is supported")


def count(config: dict[str, Any], field: str) -> int:
    """A whole number of at least one.

    Raises:
        InputError: it is something else.
        KeyError: it is left out.
    """
    value = config[field]
    if type(value) is not int or value < 1:
        raise InputError(f"config.json: {field}", value, "it must be a whole number, at least 1")
    return value


def activation(config: dict[str, Any], field: str, default: str) -> str:
    """The activation that `field` names.

    Raises:
        InputError: it is not one of those known.
    """
    name = config.get(field, default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise InputError(f"config.json: {field}", name, f"known activations: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _common(config: dict[str, Any], generation: dict[str, Any]) -> dict[str, Any]:
    """What every family writes in the same way."""
    require(config, "quantization_config", None)
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    fields: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "tie_embeddings": config.get("tie_word_embeddings", True),
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    }
    dtype = config.get("dtype", config.get("torch_dtype"))
    if dtype is not None:
        if dtype not in get_args(RunDType):
            raise InputError("config.json: dtype", dtype, f"known dtypes: {', '.join(get_args(RunDType))}")
        fields["default_dtype"] = dtype
    return fields


def _opt(config: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    require(config, "do_layer_norm_before", True)
    require(config, "word_embed_proj_dim", hidden)
    require(config, "enable_bias", True)
    require(config, "layer_norm_elementwise_affine", True)
    require(config, "_remove_final_layer_norm", False)
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn_size": config["ffn_dim"],
        "activation": activation(config, "activation_function", "relu"),
        "max_context": config["max_position_embeddings"],
        "attention_bias": True,
    }


def _gpt2(config: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = count(config, "n_embd"), count(config, "n_head")
    require(config, "scale_attn_weights", True)
    require(config, "scale_attn_by_inverse_layer_idx", False)
    require(config, "add_cross_attention", False)
    return {
        "num_layers": config["n_layer"],
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn_size": config.get("n_inner") or 4 * hidden,
        "activation": activation(config, "activation_function", "gelu_new"),
        "max_context": config["n_positions"],
        "attention_bias": True,
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
    }


def _llama(config: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    require(config, "mlp_bias", False)
    head_dim = count(config, "head_dim") if config.get("head_dim") is not None else hidden // heads
    if head_dim % 2:
        raise InputError("config.json: head_dim", head_dim, "rotary embeddings take an even one")
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "ffn_size": config["intermediate_size"],
        "gated_ffn": True,
        "activation": activation(config, "hidden_act", "silu"),
        "max_context": config["max_position_embeddings"],
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "attention_bias": config.get("attention_bias", False),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
    } | _rope(config)


def _qwen2(config: dict[str, Any]) -> dict[str, Any]:
    _require_full_attention(config)
    return _llama(config) | {"attention_bias": True}


def _qwen3(config: dict[str, Any]) -> dict[str, Any]:
    _require_full_attention(config)
    return _llama({"head_dim": 128} | config)


def _require_full_attention(config: dict[str, Any]) -> None:
    require(config, "use_sliding_window", False)
    for kind in config.get("layer_types") or ():
        if kind != "full_attention":
            raise InputError("config.json: layer_types", kind, "only 'full_attention' is supported")


def _t5(config: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = count(config, "d_model"), count(config, "num_heads")
    require(config, "is_encoder_decoder", True)
    gate, _, name = str(config.get("feed_forward_proj", "relu")).rpartition("-")
    if gate not in ("", "gated"):
        raise InputError("config.json: feed_forward_proj", config["feed_forward_proj"], "an activation, or gated-<one>")
    if gate and name == "gelu":
        name = "gelu_new"  # that is what it has always meant here
    start = config.get("decoder_start_token_id")
    is_scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
    return {
        "num_layers": config.get("num_decoder_layers") or config["num_layers"],
        "num_encoder_layers": count(config, "num_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": count(config, "d_kv"),
        "ffn_size": config["d_ff"],
        "gated_ffn": bool(gate),
        "activation": activation({"feed_forward_proj": name}, "feed_forward_proj", name),
        "max_context": T5_CONTEXT,
        "norm_eps": config.get("layer_norm_epsilon", 1e-6),
        "relative_buckets": config.get("relative_attention_num_buckets", 32),
        "relative_max_distance": config.get("relative_attention_max_distance", 128),
        "head_scale": hidden**-0.5 if is_scaled else 1.0,
        "bos_token_id": config.get("pad_token_id", 0) if start is None else start,
    }


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings: `rope_parameters` since transformers 5, `rope_theta` and `rope_scaling` before."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise InputError("config.json: rope_parameters", rope, "it must be an object")
    require(rope | config, "partial_rotary_factor", 1.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    fields: dict[str, Any] = {"rope_theta": rope.get("rope_theta") or config.get("rope_theta") or 10000.0}
    if kind == "llama3":
        fields["rope_scaling"] = {
            "factor": rope["factor"],
            "low_freq_factor": rope["low_freq_factor"],
            "high_freq_factor": rope["high_freq_factor"],
            "original_max_position": rope["original_max_position_embeddings"],
        }
    elif kind != "default":
        raise InputError("config.json: rope_type", kind, "known types: default, llama3")
    return fields


FAMILIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "opt": _opt,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "t5": _t5,
}
"""model_type of config.json to the fields of `ModelSpec` that the family writes in its own way."""
