"""Read the fields of config.json that all families have in common, and check single fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from xgpt.checkpoints.readers.stored import quantization
from xgpt.core.errors import InputError
from xgpt.core.schema import StoredDType

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
        raise InputError(f"config.json: {field}", value, "it must be a whole number, at least 1")
    return value


def activation(config: dict[str, Any], field: str, default: str) -> str:
    """Return the activation function that `field` names.

    Raises:
        InputError: the activation is not known.
    """
    name = config.get(field, default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise InputError(f"config.json: {field}", name, f"known activations: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def common(
    config: dict[str, Any], generation: Mapping[str, Any], side: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the fields of `ModelSpec` that are read in the same way for every family.

    Args:
        side: content of hf_quant_config.json, or None.
    """
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
            raise InputError("config.json: dtype", dtype, f"known dtypes: {', '.join(get_args(StoredDType))}")
        fields["default_dtype"] = dtype
    said = (config[name] for name in MTP if type(config.get(name)) is int and config[name] > 0)
    if ahead := next(said, int(config.get("model_type") in UNSAID)):
        fields["mtp_layers"] = ahead
    if (stored := quantization(config, side)) is not None:
        fields["quantization"] = stored
    return fields


def windows(config: dict[str, Any], default: int | None, full_every: int | None) -> dict[str, Any]:
    """Return the sliding window, and the layers without a window.

    Args:
        default: the window if config.json states none.
        full_every: if config.json has no `layer_types`, one layer in `full_every` attends to all tokens. None means
            that no layer does.

    Raises:
        InputError: a layer's attention is of an unknown kind.
    """
    window, num_layers = config.get("sliding_window", default), count(config, "num_hidden_layers")
    if window is not None and (type(window) is not int or window < 2):
        # With a window of 1, transformers' cache keeps all tokens.
        raise InputError("config.json: sliding_window", window, "it must be a whole number, at least 2")
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
            raise InputError("config.json: layer_types", kinds, accepted)
        full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    if window is None or len(full) == num_layers:
        return {}
    return {"sliding_window": window, "full_attention_layers": tuple(full)}
