"""Rename the size fields of families that use their own names, before the sizes of layers are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xgpt.checkpoints.fields import wrong

Config = dict[str, Any]


def _nemotron_h(config: Config) -> Config:
    if pattern := config.get("hybrid_override_pattern"):
        config["layers_block_type"] = [
            {"M": "mamba", "E": "moe", "*": "full_attention", "-": "mlp"}[letter] for letter in pattern
        ]
    config["num_hidden_layers"] = len(config["layers_block_type"])
    return config


def _mimo_v2(config: Config) -> Config:
    if pattern := config.get("hybrid_layer_pattern"):
        config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    config.setdefault("swa_num_attention_heads", config["num_attention_heads"])
    config.setdefault("swa_num_key_value_heads", 8)
    return config


def _kimi_linear(config: Config) -> Config:
    if (linear := config.get("linear_attn_config")) is not None:
        full, number = {layer - 1 for layer in linear["full_attn_layers"]}, config["num_hidden_layers"]
        config["layer_types"] = ["full_attention" if i in full else "linear_attention" for i in range(number)]
        config |= {"linear_num_heads": linear["num_heads"], "linear_head_dim": linear["head_dim"]}
        config["linear_conv_kernel_dim"] = linear.get("short_conv_kernel_size", 4)
        config["linear_gate_is_whole"] = linear.get("use_full_rank_gate", False)
    return config


def _glm5_next(config: Config) -> Config:
    linear = config["linear_attn_config"]
    config |= {"linear_num_heads": linear["num_heads"], "linear_head_dim": linear["head_dim"]}
    config["linear_conv_kernel_dim"] = linear.get("short_conv_kernel_size", 4)
    return config


def _bailing_hybrid(config: Config) -> Config:
    """Set the layer types. Full attention is in the last layer of every group, and in all layers after the last
    complete group.
    """
    number, size = config["num_hidden_layers"], config.get("layer_group_size")
    if size and "layer_types" not in config:
        config["layer_types"] = [
            "full_attention" if (i + 1) % size == 0 or i >= number // size * size else "linear_attention"
            for i in range(number)
        ]
    config["linear_conv_kernel_dim"] = config.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim", 4))
    return config


def _lfm2(config: Config) -> Config:
    """Rename sizes that early configs state under other names. If both names are given, the early one counts."""
    for name, early in {"intermediate_size": "block_ff_dim", "hidden_size": "block_dim"}.items():
        config[name] = config.get(early) or config[name]
    if (heads := config.get("num_heads")) not in (None, config["num_attention_heads"]):
        raise wrong("num_heads", heads, f"it must equal num_attention_heads, which is {config['num_attention_heads']}")
    for name in ("conv_dim", "conv_dim_out"):
        if (width := config.get(name)) not in (None, config["hidden_size"]):
            raise wrong(name, width, f"it must equal hidden_size, which is {config['hidden_size']}")
    return config


def _llama4(config: Config) -> Config:
    """Set the layer types. Layers with rotary embeddings attend within chunks, and the others to all tokens. By
    default, every fourth layer has no rotary embeddings.
    """
    number, every = config["num_hidden_layers"], config.get("no_rope_layer_interval") or 4
    if "layer_types" not in config and config.get("attention_chunk_size"):
        rotates = config.get("no_rope_layers") or [(i + 1) % every for i in range(number)]
        config["layer_types"] = ["chunked_attention" if rotating else "full_attention" for rotating in rotates]
    return config


def _longcat_flash(config: Config) -> Config:
    """Split each layer into two. Both have attention and a dense block, and the first one also has the experts. Some
    experts return their input unchanged, and are not counted.
    """
    number, real = 2 * config["num_layers"], config["n_routed_experts"]
    config |= {"num_hidden_layers": number, "moe_layers": list(range(0, number, 2))}
    config["moe_intermediate_size"] = config["expert_ffn_hidden_size"]
    config["num_experts_per_tok"] = round(config["moe_topk"] * real / (real + config.get("zero_expert_num", 0)))
    return config


def _glm_moe_dsa(config: Config) -> Config:
    """Set which layers have an indexer of sparse attention: the first layers, then one in every `index_topk_freq`
    layers. Any other layer attends to the tokens that the previous indexer has selected.
    """
    every, first = config.get("index_topk_freq") or 1, config.get("index_skip_topk_offset") or 0
    if "indexer_types" not in config and every > 1:
        places = range(config["num_hidden_layers"])
        config["indexer_types"] = ["shared" if max(i - first + 1, 0) % every else "full" for i in places]
    return config


def _exaone4(config: Config) -> Config:
    """Set the layer types by repeating a pattern of letters: L for a sliding window, G for full attention."""
    if isinstance(pattern := config.get("sliding_window_pattern"), str):
        if not pattern or set(pattern) - set("LG"):
            raise wrong("sliding_window_pattern", pattern, "it may contain only the letters L and G")
        letters = [pattern[i % len(pattern)] for i in range(config["num_hidden_layers"])]
        kinds = ["sliding_attention" if letter == "L" else "full_attention" for letter in letters]
        config["layer_types"] = config.get("layer_types") or kinds
    return config


def _deepseek_v4(config: Config) -> Config:
    number = config["num_hidden_layers"]
    if (ratios := config.get("compress_ratios")) is not None:
        names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
        config["layer_types"] = [names[ratio] for ratio in ratios[:number]]
    return config


def _falcon(config: Config) -> Config:
    heads = config["num_attention_heads"]
    if config.get("new_decoder_architecture"):
        config["num_key_value_heads"] = config.get("num_kv_heads") or heads
    else:
        config["num_key_value_heads"] = 1 if config.get("multi_query", True) else heads
    config["ffn_hidden_size"] = config.get("ffn_hidden_size") or 4 * config["hidden_size"]
    config.setdefault("max_position_embeddings", 2048)
    return config


def _step3p5(config: Config) -> Config:
    number, every = config["num_hidden_layers"], 4
    if "layer_types" not in config and config.get("sliding_window"):
        config["layer_types"] = ["sliding_attention" if i % every else "full_attention" for i in range(number)]
    if "swa_num_attention_heads" not in config and config.get("num_sliding_attention_heads"):
        config["swa_num_attention_heads"] = config["num_sliding_attention_heads"]
        config["swa_num_key_value_heads"] = config["num_key_value_heads"]
    return config


def _minimax_m3(config: Config) -> Config:
    if (sparse := config.get("sparse_attention_config")) is not None:
        config |= {
            "index_n_heads": sparse.get("sparse_num_index_heads", sparse.get("index_n_heads", 4)),
            "index_head_dim": sparse.get("sparse_index_dim", sparse.get("index_head_dim", 128)),
            "index_topk": 2048,
        }
        frequency = sparse.get("sparse_attention_freq") or []
        config["layer_types"] = [
            "sparse_attention" if on else "full_attention_without_index" for on in frequency
        ] or None
    elif config.get("index_topk_blocks"):
        config["index_topk"] = config["index_topk_blocks"] * config["index_block_size"]
        kinds = config.get("layer_types") or []
        config["layer_types"] = [
            "full_attention_without_index" if kind == "full_attention" else kind for kind in kinds
        ] or None
    return config


RENAMED: dict[str, Callable[[Config], Config]] = {
    "bailing_hybrid": _bailing_hybrid,
    "exaone4": _exaone4,
    "glm5_next_text": _glm5_next,
    "glm_moe_dsa": _glm_moe_dsa,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "llama4_text": _llama4,
    "longcat_flash": _longcat_flash,
    "nemotron_h": _nemotron_h,
    "mimo_v2_flash": _mimo_v2,
    "kimi_linear": _kimi_linear,
    "deepseek_v4": _deepseek_v4,
    "falcon": _falcon,
    "step3p5": _step3p5,
    "minimax_m3_vl_text": _minimax_m3,
}
"""For each family, a function that renames the fields of a config."""
