"""Read the experts, and the latent attention, of families that xgpt's own engine runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xgpt.checkpoints.fields import wrong
from xgpt.checkpoints.readers.common import count
from xgpt.checkpoints.readers.rope import magnitude

Config = dict[str, Any]


def _in_all_layers(config: Config, fields: Config) -> Config:
    number, active = count(config, "num_local_experts"), count(config, "num_experts_per_tok")
    given = fields.get("experts", {})
    return fields | {"experts": {"number": number, "active": active, "ffn_size": fields["ffn_size"], **given}}


def _qwen3_moe(config: Config, fields: Config) -> Config:
    name = "num_local_experts" if "num_local_experts" in config else "num_experts"
    if config.get("num_experts", config.get(name)) != config.get(name):
        raise wrong("num_experts", config["num_experts"], f"it must equal {name}, which is {config.get(name)!r}")
    every, num_layers = count(config, "decoder_sparse_step"), count(config, "num_hidden_layers")
    without = config.get("mlp_only_layers") or []
    if not isinstance(without, list) or not all(type(layer) is int for layer in without):
        raise wrong("mlp_only_layers", without, "it must be a list of layer numbers")
    dense = tuple(i for i in range(num_layers) if i in without or (i + 1) % every)
    experts = {
        "number": count({"num_experts": 128} | config, name),
        "active": count(config, "num_experts_per_tok"),
        "ffn_size": count(config, "moe_intermediate_size"),
        "dense_layers": dense,
        "normalised": config.get("norm_topk_prob", False),
    }
    return fields | {"experts": experts} | ({} if dense else {"ffn_size": experts["ffn_size"]})


def _deepseek(config: Config, fields: Config) -> Config:
    if config.get("moe_layer_freq", 1) != 1:
        accepted = "xgpt supports only 1: experts in every layer after the dense ones"
        raise wrong("moe_layer_freq", config["moe_layer_freq"], accepted)
    size, dense = count(config, "moe_intermediate_size"), config.get("first_k_dense_replace")
    if type(dense) is not int or dense < 0:
        raise wrong("first_k_dense_replace", dense, "it must be a whole number of layers, 0 or more")
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise wrong("topk_method", method, "xgpt supports only greedy and group_limited_greedy")
    experts = {
        "number": count(config, "n_routed_experts"),
        "active": count(config, "num_experts_per_tok"),
        "ffn_size": size,
        "shared_ffn_size": size * (config.get("n_shared_experts") or 0),
        "dense_layers": tuple(range(min(dense, count(config, "num_hidden_layers")))),
        "normalised": bool(config.get("norm_topk_prob")),
        "weight_scale": config.get("routed_scaling_factor", 1.0),
        **fields.get("experts", {}),
    }
    if method != "greedy":
        experts |= {"num_groups": count(config, "n_group"), "active_groups": count(config, "topk_group")}
        if experts["number"] < 2 * experts["num_groups"]:
            accepted = f"a group must have at least two of the {experts['number']} experts"
            raise wrong("n_group", experts["num_groups"], accepted)
    latent = {
        "kv_rank": count(config, "kv_lora_rank"),
        "q_rank": None if config["q_lora_rank"] is None else count(config, "q_lora_rank"),
        "rope_head_dim": config["qk_rope_head_dim"],
        "value_head_dim": count(config, "v_head_dim"),
        "rope_interleaved": bool(config.get("rope_interleave", True)),
    }
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if scaling.get("mscale_all_dim") and "rope_scaling" in fields:
        mscale = magnitude(scaling["factor"], scaling["mscale_all_dim"])
        fields["score_scale"] = fields["head_dim"] ** -0.5 * mscale**2
    return fields | {"experts": experts, "latent": latent}


EXPERTS: dict[str, Callable[[Config, Config], Config]] = {
    "mixtral": _in_all_layers,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _in_all_layers,
    "minimax_m2": _in_all_layers,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
"""For each family with experts, a function that adds them to the fields of `ModelSpec`."""
