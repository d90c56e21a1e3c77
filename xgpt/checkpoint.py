"""The shape of a checkpoint, from its config.json alone: planning needs no more, and never loads torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from xgpt.errors import InputError
from xgpt.io import parse
from xgpt.schema import DType, ModelSpec

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
}
"""What Hugging Face calls an activation, and what `ModelSpec` does."""


def read_spec(directory: Path) -> ModelSpec:
    """The model that a directory in Hugging Face layout describes.

    Raises:
        InputError: there is no config.json, or it is of a family or variant that is not supported.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("model", str(directory), "the directory must hold a config.json") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError("model", str(path), f"it cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError("model", str(path), "it must hold a JSON object")
    family = config.get("model_type")
    if family not in FAMILIES:
        raise InputError(f"{path}: model_type", family, f"known families: {', '.join(sorted(FAMILIES))}")
    try:
        fields = _common(config) | FAMILIES[family](config)
    except KeyError as error:
        raise InputError(str(path), None, f"it must set {error.args[0]}") from None
    fields |= {"name": directory.resolve().name, "family": family}
    return parse(fields, ModelSpec, str(path))


def require(config: dict[str, Any], field: str, expected: object) -> None:
    """Refuse a variant of a family; a field that is left out has the expected value.

    Raises:
        InputError: the field says something else.
    """
    value = config.get(field, expected)
    if value != expected:
        raise InputError(f"config.json: {field}", value, f"only {expected!r} is supported")


def activation(config: dict[str, Any], field: str, default: str) -> str:
    """The activation that `field` names.

    Raises:
        InputError: it is not one of those known.
    """
    name = config.get(field, default)
    if name not in ACTIVATIONS:
        raise InputError(f"config.json: {field}", name, f"known activations: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _common(config: dict[str, Any]) -> dict[str, Any]:
    """What every family writes in the same way."""
    eos = config.get("eos_token_id")
    fields: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "tie_embeddings": config.get("tie_word_embeddings", True),
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    }
    dtype = config.get("dtype", config.get("torch_dtype"))
    if dtype in get_args(DType):
        fields["default_dtype"] = dtype
    return fields


def _opt(config: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
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


FAMILIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"opt": _opt}
"""model_type of config.json to the fields of `ModelSpec` that the family writes in its own way."""
