"""Read config.json of the families whose shapes xgpt reads completely, by their rows of families.yaml."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xgpt.checkpoints.fields import wrong
from xgpt.checkpoints.readers.common import activation, count, windows
from xgpt.checkpoints.readers.experts import EXPERTS
from xgpt.checkpoints.readers.renamed import renamed
from xgpt.checkpoints.readers.rope import ANY, rope, rope_by_layer
from xgpt.core.schema.families import FAMILIES

Config = dict[str, Any]
T5_CONTEXT = 2048
"""Context length that is used for T5, whose relative positions set no limit."""


def read(family: str, config: Config) -> Config:
    """Return the fields of `ModelSpec` for a family in `FAMILIES`.

    Raises:
        InputError: a field has a value that xgpt does not support.
        KeyError: a size is missing.
    """
    row = FAMILIES[family]
    config = row.get("defaults", {}) | config
    if family in OTHER_SIZES:
        return OTHER_SIZES[family](config)
    if "names" in row:
        return _learned_positions(config, row["names"]) | row.get("set", {})
    config = renamed(family, config)
    fields = _gated(config) | row.get("set", {})
    if row.get("scaled_scores"):
        fields |= _scaled_scores(config)
    if (window := row.get("window")) is None:
        _check_all_attend(config)
    else:
        pattern = "sliding_window_pattern"
        every = count(config, pattern) if pattern in config else window.get("full_every")
        fields |= windows(config, window.get("default"), every)
    if (bases := row.get("rope_by_layer")) is not None:
        fields |= rope_by_layer(config, *bases)
    else:
        part = fields["head_dim"] if row.get("rotates_part") else None
        fields |= rope(config, row.get("theta", 10000.0), kinds=tuple(row.get("rope", ANY)), head_dim=part)
    return EXPERTS[family](config, fields) if family in EXPERTS else fields


def _gated(config: Config) -> Config:
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    head_dim = count(config, "head_dim") if config.get("head_dim") is not None else hidden // heads
    # Latent attention rotates only a part of a head.
    name = "qk_rope_head_dim" if "qk_rope_head_dim" in config else "head_dim"
    turning = config.get("qk_rope_head_dim", head_dim)
    if type(turning) is not int or turning % 2:
        raise wrong(name, turning, "it must be even, since rotary embeddings rotate pairs of dimensions")
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
    }


def _check_all_attend(config: Config) -> None:
    kinds = config.get("layer_types")
    for kind in kinds if isinstance(kinds, list) else [kinds or "full_attention"]:
        if kind != "full_attention":
            raise wrong("layer_types", kind, "each layer must be 'full_attention'")


def _scaled_scores(config: Config) -> Config:
    if (bidirectional := config.get("use_bidirectional_attention")) not in (None, False):
        raise wrong("use_bidirectional_attention", bidirectional, "only False is supported")
    return {
        "activation": activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        "tie_embeddings": config.get("tie_word_embeddings", True),
        "score_scale": count(config, "query_pre_attn_scalar") ** -0.5,
        "score_softcap": config.get("attn_logit_softcapping"),
        "logit_softcap": config.get("final_logit_softcapping"),
    }


def _learned_positions(config: Config, names: Config) -> Config:
    hidden, heads = count(config, names["hidden_size"]), count(config, names["num_attention_heads"])
    ffn = config[names["intermediate_size"]]
    return {
        "num_layers": config[names["num_hidden_layers"]],
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn_size": 4 * hidden if ffn is None else ffn,
        "activation": activation(config, "activation_function", "gelu_new"),
        "max_context": config[names["max_position_embeddings"]],
        "attention_bias": True,
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
    }


def _t5(config: Config) -> Config:
    hidden, heads = count(config, "d_model"), count(config, "num_heads")
    gate, _, name = str(config.get("feed_forward_proj", "relu")).rpartition("-")
    if gate not in ("", "gated"):
        raise wrong("feed_forward_proj", config["feed_forward_proj"], "give an activation, or gated-ACTIVATION")
    if gate and name == "gelu":
        name = "gelu_new"  # T5 means this by "gelu"
    kind = activation({"feed_forward_proj": name}, "feed_forward_proj", name)
    for field, value in (("dense_act_fn", name), ("is_gated_act", bool(gate))):
        if config.get(field, value) != value:
            raise wrong(field, config[field], f"it must be {value!r}, as in feed_forward_proj")
    is_scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
    decoders = config.get("num_decoder_layers")
    return {
        "num_layers": config["num_layers"] if decoders is None else decoders,
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


OTHER_SIZES: dict[str, Callable[[Config], Config]] = {
    "t5": _t5,
    "mt5": lambda config: _t5(config | {"scale_decoder_outputs": False}),
}
"""Families whose sizes have other names than Llama's, and no row of `names`."""
