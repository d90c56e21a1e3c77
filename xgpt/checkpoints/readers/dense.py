"""Read config.json of families with one feed-forward block in each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xgpt.checkpoints.fields import wrong
from xgpt.checkpoints.readers.common import activation, count, windows
from xgpt.checkpoints.readers.rope import rope, rope_by_layer

T5_CONTEXT = 2048
"""Context length that is used for T5, whose relative positions set no limit."""


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
    kinds = config.get("layer_types")
    for kind in kinds if isinstance(kinds, list) else [kinds or "full_attention"]:
        if kind != "full_attention":
            raise wrong("layer_types", kind, "each layer must be 'full_attention'")
    return gated(config) | rope(config)


def gated(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a model with Llama's architecture, except rotary embeddings and windows."""
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


def _qwen2(config: dict[str, Any]) -> dict[str, Any]:
    return _llama(config) | {"attention_bias": True}


def _qwen3(config: dict[str, Any]) -> dict[str, Any]:
    return _llama({"head_dim": 128} | config)


def _t5(config: dict[str, Any]) -> dict[str, Any]:
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


def _mistral(config: dict[str, Any]) -> dict[str, Any]:
    return gated(config) | windows(config, 4096, None) | rope(config)


def _phi3(config: dict[str, Any]) -> dict[str, Any]:
    fields = gated({"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096} | config)
    turned = rope(
        {"original_max_position_embeddings": 4096} | config, kinds=("default", "longrope"), head_dim=fields["head_dim"]
    )
    return fields | windows(config, None, None) | turned


def _gemma(config: dict[str, Any]) -> dict[str, Any]:
    config = {"head_dim": 256, "query_pre_attn_scalar": 256} | config
    if (bidirectional := config.get("use_bidirectional_attention")) not in (None, False):
        raise wrong("use_bidirectional_attention", bidirectional, "only False is supported")
    fields = gated({"rms_norm_eps": 1e-6} | config)
    return fields | {
        "activation": activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        "tie_embeddings": config.get("tie_word_embeddings", True),
        "score_scale": count(config, "query_pre_attn_scalar") ** -0.5,
        "score_softcap": config.get("attn_logit_softcapping"),
        "logit_softcap": config.get("final_logit_softcapping"),
    }


def _gemma2(config: dict[str, Any]) -> dict[str, Any]:
    config = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} | config
    return _gemma(config) | windows(config, 4096, 2) | rope(config)


def _gemma3_text(config: dict[str, Any]) -> dict[str, Any]:
    config = {"max_position_embeddings": 131072} | config
    pattern = count({"sliding_window_pattern": 6} | config, "sliding_window_pattern")
    return _gemma(config) | windows(config, 4096, pattern) | rope_by_layer(config, 1e6, 1e4)


DENSE: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "opt": _opt,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "t5": _t5,
    "mt5": _mt5,
    "mistral": _mistral,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3_text,
}
