"""The known fields of config.json: fields that are read, and fields without effect.

`transformers` 5 keeps unknown fields in the config, and a model's code may read them. So xgpt's own engine runs no
model with a field that is not in these tables. Plans for other engines name such a field, and assume that it changes no
size. A field that is named like a size is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from xgpt.core.errors import InputError


def words(text: str) -> frozenset[str]:
    """Return a text's words as a set."""
    return frozenset(text.split())


BOOKKEEPING = words("""
    _attn_implementation _attn_implementation_autoset _name_or_path architectures auto_map attn_implementation
    chunk_size_feed_forward classifier_dropout finetuning_task gradient_checkpointing id2label is_decoder label2id
    max_sequence_length max_window_layers num_labels output_attentions output_hidden_states output_past pad_token_id
    prefix pretraining_tp
    problem_type return_dict sep_token_id task_specific_params tf_legacy_loss tokenizer_class torchscript
    transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache
    """)
"""Fields that do not change results: names, versions, labels of other heads, and settings of outputs and of the
computation."""

TRAINING = words("""
    activation_dropout attention_dropout attn_pdrop classifier_activation dropout dropout_rate embd_pdrop
    hidden_dropout init_std initializer_factor initializer_range layerdrop resid_pdrop summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    """)
"""Fields that only training uses: initial weights and dropout."""

SEARCH = words("""
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
    repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
    """)
"""Sampling settings in configs of old versions. xgpt takes them from requests and generation_config.json instead."""

COMMON = words("""
    bos_token_id dtype eos_token_id model_type quantization_config tie_word_embeddings torch_dtype vocab_size
    """)
"""Fields that are read for every family."""

NOTHING: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None),
    "attention_chunk_size": (None,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": (None, {}),
    "tie_encoder_decoder": (False, None),
    "use_mrope": (False, None),
}
"""Fields of any family that are accepted only with these values, which have no effect."""


@dataclass(frozen=True)
class Fields:
    """The fields that a family's config.json may have in addition to `COMMON`.

    Attributes:
        read: fields that determine the `ModelSpec`.
        only: fields that may switch on an unsupported variant, each with its accepted values.
        without_effect: fields that `transformers` does not read.
        aliases: alternative names of fields. If both names are given, the values must be the same.
        untimed: fields that affect the generated tokens but neither times nor memory. Only families that xgpt's own
            engine does not run have such fields.
    """

    read: frozenset[str]
    only: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    untimed: frozenset[str] = frozenset()


_DECODER: dict[str, tuple[Any, ...]] = {"is_encoder_decoder": (False, None)}
_ROTARY = words("""
    attention_bias head_dim hidden_act hidden_size intermediate_size layer_types max_position_embeddings
    num_attention_heads num_hidden_layers num_key_value_heads partial_rotary_factor rms_norm_eps rope_parameters
    rope_scaling rope_theta
""")
_ROUTED = words("aux_loss_alpha output_router_logits router_aux_loss_coef router_jitter_noise seq_aux")
"""Settings for the training of a router and for the output of its scores."""
_FULL: dict[str, tuple[Any, ...]] = {"mlp_bias": (False,), "use_sliding_window": (False, None)}

_T5 = Fields(
    words("""
            d_ff d_kv d_model decoder_start_token_id dense_act_fn feed_forward_proj is_gated_act layer_norm_epsilon
            num_decoder_layers num_heads num_layers relative_attention_max_distance relative_attention_num_buckets
            scale_decoder_outputs
            """),
    {"is_decoder": (False,), "is_encoder_decoder": (True,)},
    frozenset({"n_positions"}),
    {
        "head_dim": "d_kv",
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
    },
)

_GEMMA = (_ROTARY - {"hidden_act", "partial_rotary_factor"}) | words("""
    attn_logit_softcapping final_logit_softcapping hidden_activation query_pre_attn_scalar sliding_window
    use_bidirectional_attention
    """)
_GEMMA_UNREAD = words("cache_implementation hidden_act sliding_window_size")
_DEEPSEEK = Fields(
    (_ROTARY - {"head_dim", "layer_types", "num_key_value_heads", "partial_rotary_factor"})
    | words("""
        first_k_dense_replace kv_lora_rank moe_intermediate_size moe_layer_freq n_group n_routed_experts
        n_shared_experts norm_topk_prob num_experts_per_tok q_lora_rank qk_nope_head_dim qk_rope_head_dim
        routed_scaling_factor topk_group v_head_dim
        """),
    _DECODER | {"mlp_bias": (False,)},
    _ROUTED | words("ep_size head_dim num_key_value_heads num_mtp_layers num_nextn_predict_layers qk_head_dim"),
    {"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"},
)

FIELDS: Mapping[str, Fields] = {
    "gpt2": Fields(
        words("activation_function layer_norm_epsilon n_embd n_head n_inner n_layer n_positions"),
        _DECODER
        | {
            "reorder_and_upcast_attn": (False,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "scale_attn_weights": (True,),
        },
        frozenset({"n_ctx"}),
        {
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
    ),
    "llama": Fields(_ROTARY, _DECODER | _FULL | {"sliding_window": (None,)}),
    "opt": Fields(
        words("""
            activation_function ffn_dim hidden_size max_position_embeddings num_attention_heads num_hidden_layers
        """),
        _DECODER
        | {
            "_remove_final_layer_norm": (False,),
            "do_layer_norm_before": (True,),
            "enable_bias": (True,),
            "layer_norm_elementwise_affine": (True,),
        },
        aliases={"word_embed_proj_dim": "hidden_size"},
    ),
    "qwen2": Fields(_ROTARY, _DECODER | _FULL, frozenset({"sliding_window"})),
    "qwen3": Fields(_ROTARY, _DECODER | _FULL, frozenset({"sliding_window"})),
    "mistral": Fields(
        _ROTARY - {"attention_bias", "layer_types"} | {"sliding_window"}, _DECODER | {"attention_bias": (False,)}
    ),
    "phi3": Fields(
        _ROTARY - {"attention_bias", "layer_types"} | words("original_max_position_embeddings sliding_window"),
        _DECODER | {"attention_bias": (False,)},
    ),
    "gemma2": Fields(_GEMMA, _DECODER, _GEMMA_UNREAD),
    "gemma3_text": Fields(
        _GEMMA - {"attn_logit_softcapping"} | words("rope_local_base_freq sliding_window_pattern"),
        _DECODER | {"attn_logit_softcapping": (None,)},
        _GEMMA_UNREAD | {"_sliding_window_pattern"},
    ),
    "mixtral": Fields(
        _ROTARY - {"attention_bias", "layer_types"} | words("num_experts_per_tok num_local_experts sliding_window"),
        _DECODER | {"attention_bias": (False,)},
        _ROUTED,
        {"num_experts": "num_local_experts"},
    ),
    "qwen3_moe": Fields(
        _ROTARY - {"layer_types"}
        | words("""
            decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok
            num_local_experts
            """),
        _DECODER | _FULL | {"qkv_bias": (False,), "shared_expert_intermediate_size": (0,), "use_qk_norm": (True,)},
        _ROUTED | {"sliding_window"},
    ),
    "gpt_oss": Fields(
        _ROTARY | words("num_experts_per_tok num_local_experts sliding_window"),
        _DECODER | {"hidden_act": ("silu",), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        _ROUTED | {"initial_context_length"},
        {"experts_per_token": "num_experts_per_tok", "num_experts": "num_local_experts"},
    ),
    "minimax_m2": Fields(
        _ROTARY - {"attention_bias", "layer_types"}
        | words("attn_type_list num_experts_per_tok num_local_experts rotary_dim"),
        _DECODER | {"attention_bias": (False,), "shared_intermediate_size": (0,), "sliding_window": (None,)},
        _ROUTED | words("mtp_transformer_layers num_mtp_modules use_mtp"),
        {"num_experts": "num_local_experts"},
        words("qk_norm_type scoring_func use_qk_norm use_routing_bias"),
    ),
    "deepseek_v2": replace(
        _DEEPSEEK,
        read=_DEEPSEEK.read | {"topk_method"},
        # transformers never normalises the experts' weights in this family.
        only=_DEEPSEEK.only | {"norm_topk_prob": (False, None), "scoring_func": ("softmax",)},
    ),
    "deepseek_v3": replace(
        _DEEPSEEK,
        read=_DEEPSEEK.read | {"rope_interleave"},
        only=_DEEPSEEK.only | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    ),
    "t5": _T5,
    "mt5": replace(_T5, read=_T5.read - {"scale_decoder_outputs"}),
}
"""The fields of each model_type."""


SIZE = re.compile(
    r"chunk|conv|depth|dim|expand|expert|freq|group|head|hidden|interval|kernel|layer|mult|num_|_num|pattern|rank|ratio"
    r"|size|state|top_?k|width|window|decoder"
)
"""Matches the names of sizes, and of settings that decide which layers there are."""


def unsupported_fields(family: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields of a config.json that are not known, or whose values are not.

    Raises:
        InputError: such a field is named like a size, or contradicts another one. The message names the field.
    """
    known = FIELDS[family]
    passed = (
        known.read
        | known.without_effect
        | known.untimed
        | COMMON
        | ((BOOKKEEPING | TRAINING | SEARCH) - known.only.keys())
    )
    only, found = NOTHING | known.only, list[str]()
    for name, value in config.items():
        if name in only:
            if any(value == accepted and type(value) is type(accepted) for accepted in only[name]):
                continue
            accepted = f"xgpt supports only {' or '.join(repr(one) for one in only[name])}"
        elif name in known.aliases:
            if value not in (None, config.get(known.aliases[name])):
                equal = f"it must equal {known.aliases[name]}, which is {config.get(known.aliases[name])!r}"
                raise InputError(f"config.json: {name}", value, equal)
            continue
        elif name in passed or _is_off(name, value):
            continue
        else:
            accepted = f"xgpt does not know this field of {family}; remove it if it has no effect on the model"
        if SIZE.search(name):
            raise InputError(f"config.json: {name}", value, accepted)
        found.append(name)
    return tuple(sorted(found))


def _is_off(name: str, value: Any) -> bool:
    """Return whether the value of an unknown field switches the field's feature off."""
    if value is None or (isinstance(value, (list, dict, str)) and not value):
        return True
    if name.startswith(("use_", "do_", "scale_", "norm_")):
        return False
    return value is False or (value == 0 and type(value) is int and name.endswith("_size"))
