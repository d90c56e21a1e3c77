"""Record which fields of a config.json are read, and refuse a config that has sizes which no reader used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from xgpt.checkpoints.fields import BOOKKEEPING, COMMON, SEARCH, TRAINING, words
from xgpt.core.errors import InputError

SIZE = re.compile(
    r"chunk|conv|depth|dim|expand|expert|freq|group|head|hidden|interval|kernel|layer|mult|num_|_num|pattern|rank|ratio"
    r"|size|state|top_?k|width|window"
)
"""A pattern that the names of sizes match."""

WITHOUT_EFFECT = words("""
    attention_chunk_size attention_head_dim attention_multiplier attn_res_block_size chunk_size conv_L_cache
    conv_kernel_size embedding_multiplier ep_size expand expert_dtype expert_hidden_dim full_attention_interval
    global_attn_every_n_layers hidden_act hidden_activation index_head_dim index_n_heads
    index_share_for_mtp_iteration index_skip_topk_offset index_topk_freq interleave_moe_layer_step
    intermediate_size layer_group_size layer_norm_eps layer_norm_epsilon layer_rope_theta layernorm_epsilon
    logits_mup_width_multiplier mamba_hidden_act max_window_layers mlp_hidden_act mlp_only_layers moe_intermediate_size
    moe_layer_freq moe_router_dtype moe_shared_expert_overlap mtp_hidden_states_first
    mtp_hybrid_override_pattern mtp_layers_block_type mtp_num_hidden_layers n_group n_shared_experts
    no_rope_layer_interval no_rope_layers norm_topk_prob num_expert_group num_experts num_hash_layers
    num_kv_heads num_logits_to_keep num_mtp_modules num_nextn_predict_layers number_of_conv_states
    output_multiplier per_layer_config qk_head_dim qk_rope_head_dim residual_multiplier rotary_dim
    shared_expert_sink short_conv_kernel_size sliding_window sliding_window_pattern sliding_window_size
    time_step_rank topk_group topk_method use_conv_bias use_expert_bias use_grouped_topk use_mamba_kernels
    """)
"""Sizes that repeat others, or that control routing or scaling. They change neither weights nor memory."""


class ReadFields(dict[str, Any]):
    """The fields of a config.json, with a record of those that were read."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._read.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, or `default`."""
        self._read.add(name)
        return super().get(name, default)

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Return a field, which is set to `default` if it is missing."""
        self._read.add(name)
        return super().setdefault(name, default)

    def refuse_unread_sizes(self, family: str, given: Mapping[str, Any]) -> None:
        """Check that all sizes in `given`, except empty or zero ones, were read.

        Raises:
            InputError: a size was not read. The message states the field.
        """
        passed = self._read | BOOKKEEPING | TRAINING | SEARCH | COMMON | WITHOUT_EFFECT
        for name, value in given.items():
            if name in passed or not SIZE.search(name) or isinstance(value, (bool, str, dict)) or not value:
                continue
            accepted = (
                f"xgpt does not know this size field of {family}; remove it if it affects neither weights nor K/V"
            )
            raise InputError(f"config.json: {name}", value, accepted)
