"""Give sizes and kinds of layers one name, whatever a family calls them. families.yaml has what a row can say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xgpt.checkpoints.fields import wrong
from xgpt.checkpoints.readers.common import count
from xgpt.core.schema.families import TABLES

Config = dict[str, Any]


def renamed(family: str, config: Config) -> Config:
    """Return the config with sizes and kinds of layers under the names that the readers know. It may be changed in
    place.
    """
    for name, sizes in TABLES["objects"].items():
        if isinstance(inner := config.get(name), dict):
            config |= {ours: inner[theirs] for theirs, ours in sizes.items() if theirs in inner}
    if (rename := RENAMED.get(family)) is not None:
        config = rename(config)
    row = TABLES["coded_layers"].get(family)
    if row is not None and isinstance(codes := config.get(row["field"]), str | list) and codes:
        kinds, number = row["kinds"], config["num_hidden_layers"]
        if unknown := [code for code in codes if code not in kinds]:
            raise wrong(row["field"], unknown[0], f"it may contain only {', '.join(map(str, kinds))}")
        config[row.get("as", "layer_types")] = [kinds[codes[layer % len(codes)]] for layer in range(number)]
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


def _falcon(config: Config) -> Config:
    heads = config["num_attention_heads"]
    if config.get("new_decoder_architecture"):
        config["num_key_value_heads"] = config.get("num_kv_heads") or heads
    else:
        config["num_key_value_heads"] = 1 if config.get("multi_query", True) else heads
    config["ffn_hidden_size"] = config.get("ffn_hidden_size") or 4 * config["hidden_size"]
    config.setdefault("max_position_embeddings", 2048)
    return config


def _gpt_oss(config: Config) -> Config:
    if config.get("rope_parameters") is None and not config.get("rope_scaling"):
        yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
        return config | {"rope_parameters": yarn}
    return config


def _minimax_m2(config: Config) -> Config:
    if any(kind != 1 for kind in config.get("attn_type_list") or ()):
        accepted = "xgpt supports only 1, attention to all tokens, in every layer"
        raise wrong("attn_type_list", config["attn_type_list"], accepted)
    if (rotary := config.get("rotary_dim")) is not None:
        config["partial_rotary_factor"] = rotary / count(config, "head_dim")
    return config


def _deepseek(config: Config) -> Config:
    turned, head_dim = config["qk_rope_head_dim"], config.get("head_dim")
    is_v3 = config.get("topk_method", "noaux_tc") == "noaux_tc"
    if is_v3 and head_dim is not None and (type(head_dim) is not int or head_dim != turned):
        # transformers rotates head_dim dimensions
        raise wrong("head_dim", head_dim, f"it must equal qk_rope_head_dim, which is {turned}")
    whole = count(config, "qk_nope_head_dim") + count(config, "qk_rope_head_dim")
    return config | {"head_dim": whole, "num_key_value_heads": count(config, "num_attention_heads")}


def _nemotron_h(config: Config) -> Config:
    config["num_hidden_layers"] = len(config.get("hybrid_override_pattern") or config["layers_block_type"])
    return config


def _mimo_v2(config: Config) -> Config:
    config.setdefault("swa_num_attention_heads", config["num_attention_heads"])
    config.setdefault("swa_num_key_value_heads", 8)
    return config


def _step3p5(config: Config) -> Config:
    if (heads := config.get("num_sliding_attention_heads")) and "swa_num_attention_heads" not in config:
        config |= {"swa_num_attention_heads": heads, "swa_num_key_value_heads": config["num_key_value_heads"]}
    return config


def _minimax_m3(config: Config) -> Config:
    if config.get("sparse_attention_config") is not None:
        config.setdefault("index_n_heads", 4)
        config.setdefault("index_head_dim", 128)
        config["index_topk"] = 2048
        kinds = ["sparse_attention" if on else "full_attention" for on in config.get("sparse_attention_freq") or ()]
    elif config.get("index_topk_blocks"):
        config["index_topk"] = config["index_topk_blocks"] * config["index_block_size"]
        kinds = config.get("layer_types") or []
    else:
        return config
    without = {"full_attention": "full_attention_without_index"}
    config["layer_types"] = [without.get(kind, kind) for kind in kinds] or None
    return config


RENAMED: dict[str, Callable[[Config], Config]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
    "minimax_m2": _minimax_m2,
    "glm_moe_dsa": _glm_moe_dsa,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "longcat_flash": _longcat_flash,
    "nemotron_h": _nemotron_h,
    "mimo_v2_flash": _mimo_v2,
    "falcon": _falcon,
    "step3p5": _step3p5,
    "minimax_m3_vl_text": _minimax_m3,
}
"""For each family, a function that renames the fields of a config."""
