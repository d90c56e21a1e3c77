"""The shape of a checkpoint, from its config.json alone: planning needs no more, and never loads torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast, get_args

from xgpt.config_fields import check_fields
from xgpt.errors import InputError
from xgpt.io import parse
from xgpt.schema import DType, ModelSpec, StoredDType

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

SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (1e-9, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-3, 10),
}
"""Settings of generation_config.json that are defaults of requests, and the values that are taken."""

ENCODER_DECODERS = ("t5", "mt5")
"""Of the family t5."""
T5_CONTEXT = 2048
"""Longest context that T5 is given: its positions are relative, and set no limit of their own."""


def read_spec(directory: Path) -> ModelSpec:
    """The model that a directory in Hugging Face layout describes, as `transformers` 5 reads it.

    Its stop tokens are those of generation_config.json, where there is one that names any. Embedding and head are tied
    where config.json says so and no head is stored.

    Raises:
        InputError: there is no config.json, it is of a family or variant that is not supported, or it holds a field
            that is not known; or the directory also holds an adapter.
    """
    path = directory / "config.json"
    config = _read_object(path)
    if config is None:
        raise InputError("model", str(directory), "the directory must hold a config.json")
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise InputError(f"{path}: model_type", family, f"known families: {', '.join(sorted(FAMILIES))}")
    if (adapter := directory / "adapter_config.json").is_file():
        raise InputError("model", str(adapter), "adapters are not supported: merge it into the weights, or remove it")
    check_fields(family, config)
    generation = _read_object(directory / "generation_config.json") or {}
    try:
        fields = _common(config, generation) | FAMILIES[family](config)
        if family in ENCODER_DECODERS:
            fields["bos_token_id"] = _decoder_start(config, generation)
    except KeyError as error:
        raise InputError(str(path), None, f"it must set {error.args[0]}") from None
    headers = list(_headers(directory))
    if "default_dtype" not in fields and (stored := _stored_dtype(headers)) is not None:
        fields["default_dtype"] = stored
    if headers:
        is_stored = any('"lm_head.weight"' in header for header in headers)
        # A T5's config cannot be trusted here: transformers 5 ties wherever no head is stored.
        fields["tie_embeddings"] = not is_stored and (family in ENCODER_DECODERS or fields["tie_embeddings"])
    fields |= {"name": directory.resolve().name, "family": "t5" if family in ENCODER_DECODERS else family}
    return parse(fields, ModelSpec, str(path))


def sampling_defaults(directory: Path) -> dict[str, float]:
    """What generation_config.json says of how tokens are chosen: defaults of requests, as vLLM takes them.

    Raises:
        InputError: a value is out of its range.
    """
    path = directory / "generation_config.json"
    generation = _read_object(path) or {}
    found = {name: generation[name] for name in SAMPLING_RANGES if generation.get(name) is not None}
    for name, value in found.items():
        low, high = SAMPLING_RANGES[name]
        if type(value) not in (int, float) or not low <= value <= high or (name == "top_k" and type(value) is not int):
            raise InputError(f"{path}: {name}", value, f"it must be {low:g} to {high:g}")
    return found


def _read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError("model", str(path), f"it cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError("model", str(path), "it must hold a JSON object")
    return value


def _headers(directory: Path) -> Iterator[str]:
    """The headers of the weights' files, in JSON; an empty one of a broken file, which loading its weights reports.

    A safetensors file starts with the length of its header, 8 bytes little-endian, and the header.
    """
    for path in weight_files(directory):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            is_whole = 8 + length <= path.stat().st_size
            yield file.read(length).decode(errors="replace") if is_whole else ""


def weight_files(directory: Path) -> list[Path]:
    """The files that hold a checkpoint's weights, as `transformers` chooses them; none where none are there.

    model.safetensors, or the shards that model.safetensors.index.json names, each in the same directory.

    Raises:
        InputError: the index is broken, or names a file that is not there.
    """
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = {str(shard): tensor for tensor, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError("model", str(index), f"it is not a safetensors index: {error!r}") from None
    if not shards:
        raise InputError("model", str(index), "its weight_map must name the tensors")
    for shard, tensor in shards.items():
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            accepted = f"{tensor} must be in a *.safetensors of the same directory"
            raise InputError("model", f"{index}: {shard}", accepted)
        if not (directory / shard).is_file():
            raise InputError("model", str(directory), f"it must hold {shard}, with {tensor} in it")
    return [directory / shard for shard in sorted(shards)]


def _stored_dtype(headers: list[str]) -> DType | None:
    """The dtype of the first file's weights, for configs that leave it out (GPT-2's); None where none can be read."""
    names = re.findall(rf'"dtype":\s*"({"|".join(STORED_DTYPES)})"', headers[0] if headers else "")
    found = {STORED_DTYPES[name] for name in names}
    return found.pop() if len(found) == 1 else None


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
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
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
    return fields


def _opt(config: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
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
    return {
        "num_layers": config["n_layer"],
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn_size": 4 * hidden if config.get("n_inner") is None else config["n_inner"],
        "activation": activation(config, "activation_function", "gelu_new"),
        "max_context": config["n_positions"],
        "attention_bias": True,
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
    }


def _llama(config: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise InputError("config.json: layer_types", kinds, "only 'full_attention' of each layer is supported")
    head_dim = count(config, "head_dim") if config.get("head_dim") is not None else hidden // heads
    if head_dim % 2:
        raise InputError("config.json: head_dim", head_dim, "rotary embeddings take an even one")
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": heads if config.get("num_key_value_heads") is None else config["num_key_value_heads"],
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
    return _llama(config) | {"attention_bias": True}


def _qwen3(config: dict[str, Any]) -> dict[str, Any]:
    return _llama({"head_dim": 128} | config)


def _t5(config: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = count(config, "d_model"), count(config, "num_heads")
    gate, _, name = str(config.get("feed_forward_proj", "relu")).rpartition("-")
    if gate not in ("", "gated"):
        raise InputError("config.json: feed_forward_proj", config["feed_forward_proj"], "an activation, or gated-<one>")
    if gate and name == "gelu":
        name = "gelu_new"  # that is what it has always meant here
    kind = activation({"feed_forward_proj": name}, "feed_forward_proj", name)
    for field, value in (("dense_act_fn", name), ("is_gated_act", bool(gate))):
        if config.get(field, value) != value:
            raise InputError(f"config.json: {field}", config[field], f"feed_forward_proj says {value!r}")
    is_scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
    return {
        "num_layers": config["num_layers"]
        if config.get("num_decoder_layers") is None
        else config["num_decoder_layers"],
        "num_encoder_layers": count(config, "num_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": count(config, "d_kv"),
        "ffn_size": config["d_ff"],
        "gated_ffn": bool(gate),
        "activation": kind,
        "max_context": T5_CONTEXT,
        "norm_eps": config.get("layer_norm_epsilon", 1e-6),
        "relative_buckets": config.get("relative_attention_num_buckets", 32),
        "relative_max_distance": config.get("relative_attention_max_distance", 128),
        "head_scale": hidden**-0.5 if is_scaled else 1.0,
    }


def _mt5(config: dict[str, Any]) -> dict[str, Any]:
    return _t5({"feed_forward_proj": "gated-gelu"} | config | {"scale_decoder_outputs": False})


def _decoder_start(config: dict[str, Any], generation: dict[str, Any]) -> int:
    """The token that a decoder starts with: generation_config.json's, or else config.json's."""
    for where in (generation, config):
        for field in ("decoder_start_token_id", "bos_token_id"):
            if where.get(field) is not None:
                return cast(int, where[field])
    raise KeyError("decoder_start_token_id")


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings: `rope_theta` and `rope_scaling` before transformers 5, `rope_parameters` since.

    Where both stand, transformers 5 takes the older.
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(name) or {}
    if not isinstance(rope, dict):
        raise InputError(f"config.json: {name}", rope, "it must be an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise InputError("config.json: rope_type", kind, f"known types: {', '.join(ROPE_TYPES)}")
    for field in rope.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_TYPES[kind]}:
        raise InputError(f"config.json: {name}.{field}", rope[field], f"rope_type {kind} has no such setting")
    for partial in (rope.get("partial_rotary_factor"), config.get("partial_rotary_factor")):
        if partial not in (None, 1.0):
            raise InputError("config.json: partial_rotary_factor", partial, "only 1.0 is supported")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    fields: dict[str, Any] = {"rope_theta": 10000.0 if theta is None else theta}
    if kind == "llama3":
        fields["rope_scaling"] = {
            "factor": rope["factor"],
            "low_freq_factor": rope["low_freq_factor"],
            "high_freq_factor": rope["high_freq_factor"],
            "original_max_position": rope.get("original_max_position_embeddings", config["max_position_embeddings"]),
        }
    return fields


ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Kinds of rotary embeddings, and the settings that each has."""


FAMILIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "opt": _opt,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "t5": _t5,
    "mt5": _mt5,
}
"""model_type of config.json to the fields of `ModelSpec` that the family writes in its own way."""
