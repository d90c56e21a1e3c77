"""Read config.json of families with a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xgpt.checkpoints.fields import wrong
from xgpt.checkpoints.readers.common import count, windows
from xgpt.checkpoints.readers.dense import gated
from xgpt.checkpoints.readers.rope import magnitude, rope


def _mixtral(config: dict[str, Any]) -> dict[str, Any]:
    fields = gated({"rms_norm_eps": 1e-5} | config)
    experts = {
        "number": count({"num_local_experts": 8} | config, "num_local_experts"),
        "active": count({"num_experts_per_tok": 2} | config, "num_experts_per_tok"),
        "ffn_size": fields["ffn_size"],
    }
    return fields | {"experts": experts} | windows(config, None, None) | rope(config, 1e6)


def _qwen3_moe(config: dict[str, Any]) -> dict[str, Any]:
    config = {"decoder_sparse_step": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 768} | config
    name = "num_local_experts" if "num_local_experts" in config else "num_experts"
    if config.get("num_experts", config.get(name)) != config.get(name):
        raise wrong("num_experts", config["num_experts"], f"it must equal {name}, which is {config.get(name)!r}")
    fields = gated(config)
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
    if not dense:
        fields["ffn_size"] = experts["ffn_size"]
    return fields | {"experts": experts} | rope(config)


def _gpt_oss(config: dict[str, Any]) -> dict[str, Any]:
    config = {"head_dim": 64, "rms_norm_eps": 1e-5, "attention_bias": True} | config
    if config.get("rope_parameters") is None and not config.get("rope_scaling"):
        yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
        config = config | {"rope_parameters": yarn}
    fields = gated(config)
    experts = {
        "number": count({"num_local_experts": 128} | config, "num_local_experts"),
        "active": count({"num_experts_per_tok": 4} | config, "num_experts_per_tok"),
        "ffn_size": fields["ffn_size"],
        "bias": True,
    }
    expert_fields = {"experts": experts, "attention_sinks": True}
    return fields | expert_fields | windows(config, 128, 2) | rope(config, 150000.0)


def _minimax_m2(config: dict[str, Any]) -> dict[str, Any]:
    config = {"head_dim": 128} | config
    if any(kind != 1 for kind in config.get("attn_type_list") or ()):
        raise wrong(
            "attn_type_list", config["attn_type_list"], "xgpt supports only 1, attention to all tokens, in every layer"
        )
    if (rotary := config.get("rotary_dim")) is not None:
        config["partial_rotary_factor"] = rotary / count(config, "head_dim")
    fields = gated(config)
    experts = {
        "number": count({"num_local_experts": 256} | config, "num_local_experts"),
        "active": count({"num_experts_per_tok": 8} | config, "num_experts_per_tok"),
        "ffn_size": fields["ffn_size"],
    }
    return fields | {"experts": experts} | rope(config, 5e6, head_dim=fields["head_dim"])


def _deepseek(config: dict[str, Any]) -> dict[str, Any]:
    defaults = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    config = defaults | {"v_head_dim": 128} | config
    if config.get("moe_layer_freq", 1) != 1:
        raise wrong(
            "moe_layer_freq",
            config["moe_layer_freq"],
            "xgpt supports only 1: experts in every layer after the dense ones",
        )
    head_dim = count(config, "qk_nope_head_dim") + count(config, "qk_rope_head_dim")
    heads = count(config, "num_attention_heads")
    fields = gated(config | {"head_dim": head_dim, "num_key_value_heads": heads})
    size, dense = count(config, "moe_intermediate_size"), config.get("first_k_dense_replace")
    if type(dense) is not int or dense < 0:
        raise wrong("first_k_dense_replace", dense, "it must be a whole number of layers, 0 or more")
    experts = {
        "number": count(config, "n_routed_experts"),
        "active": count(config, "num_experts_per_tok"),
        "ffn_size": size,
        "shared_ffn_size": size * (config.get("n_shared_experts") or 0),
        "dense_layers": tuple(range(min(dense, count(config, "num_hidden_layers")))),
        "normalised": bool(config.get("norm_topk_prob")),
        "weight_scale": config.get("routed_scaling_factor", 1.0),
    }
    latent = {
        "kv_rank": count(config, "kv_lora_rank"),
        "q_rank": None if config["q_lora_rank"] is None else count(config, "q_lora_rank"),
        "rope_head_dim": config["qk_rope_head_dim"],
        "value_head_dim": count(config, "v_head_dim"),
        "rope_interleaved": bool(config.get("rope_interleave", True)),
    }
    turned = rope(config)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if scaling.get("mscale_all_dim") and "rope_scaling" in turned:
        turned["score_scale"] = head_dim**-0.5 * magnitude(scaling["factor"], scaling["mscale_all_dim"]) ** 2
    return fields | {"experts": experts, "latent": latent} | turned


def _deepseek_v2(config: dict[str, Any]) -> dict[str, Any]:
    defaults = {"first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2}
    fields = _deepseek(defaults | {"moe_intermediate_size": 1407} | config)
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise wrong("topk_method", method, "xgpt supports only greedy and group_limited_greedy")
    return _grouped(fields, config) if method == "group_limited_greedy" else fields


def _deepseek_v3(config: dict[str, Any]) -> dict[str, Any]:
    defaults = {"first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True}
    of_routing = {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5}
    config = defaults | of_routing | {"moe_intermediate_size": 2048} | config
    turned, head_dim = config.get("qk_rope_head_dim", 64), config.get("head_dim")
    if head_dim is not None and (
        type(head_dim) is not int or head_dim != turned
    ):  # transformers rotates head_dim dimensions
        raise wrong("head_dim", head_dim, f"it must equal qk_rope_head_dim, which is {turned}")
    fields = _grouped(_deepseek(config), config)
    return fields | {"experts": fields["experts"] | {"scoring": "sigmoid"}}


def _grouped(fields: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with two numbers added: of expert groups, and of groups chosen for a token."""
    groups = {"num_groups": count(config, "n_group"), "active_groups": count(config, "topk_group")}
    experts = fields["experts"] | groups
    if experts["number"] < 2 * experts["num_groups"]:
        raise wrong(
            "n_group", experts["num_groups"], f"a group must have at least two of the {experts['number']} experts"
        )
    return fields | {"experts": experts}


WITH_EXPERTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "minimax_m2": _minimax_m2,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}
