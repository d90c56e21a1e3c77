"""Small random checkpoints as `transformers` saves them."""

import copy
from pathlib import Path

import torch

from xgpt.checkpoints.files import read_spec
from xgpt.core.schema import DType
from xgpt.core.schema.families import FAMILIES as ROWS
from xrunner.models import Model
from xrunner.weights import Checkpoint, load_model

VOCABULARY = 211
CONTEXT = 128

OPT_SHAPES = {
    "tied": {"hidden_size": 64, "num_attention_heads": 4, "ffn_dim": 256, "num_hidden_layers": 2},
    "untied-odd": {
        "hidden_size": 60,
        "num_attention_heads": 3,
        "ffn_dim": 101,
        "num_hidden_layers": 3,
        "tie_word_embeddings": False,
    },
    "gelu": {
        "hidden_size": 40,
        "num_attention_heads": 5,
        "ffn_dim": 77,
        "num_hidden_layers": 1,
        "activation_function": "gelu",
    },
}
GPT2_SHAPES = {
    "tied": {"n_embd": 64, "n_head": 4, "n_layer": 2},
    "untied-odd": {"n_embd": 60, "n_head": 3, "n_inner": 101, "n_layer": 3, "tie_word_embeddings": False},
    "relu": {"n_embd": 40, "n_head": 5, "n_inner": 77, "n_layer": 1, "activation_function": "relu"},
}
# Of the families below: grouped-query heads; heads that are wider together than the hidden size, one of keys; tied.
SCALED = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GROUPED = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
ONE_KV_HEAD = {
    "hidden_size": 60,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 22,
    "intermediate_size": 101,
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
}
TIED = {
    "hidden_size": 42,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 14,
    "intermediate_size": 77,
    "num_hidden_layers": 1,
    "tie_word_embeddings": True,
}
LLAMA_SHAPES = {
    "grouped": GROUPED | {"rope_parameters": SCALED | {"original_max_position_embeddings": 32}},
    "one-kv-head": ONE_KV_HEAD | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    "tied-biased": TIED | {"attention_bias": True},
}
QWEN2_SHAPES = {"grouped": GROUPED, "one-kv-head": ONE_KV_HEAD, "tied": TIED}
SEED_OSS_SHAPES = QWEN2_SHAPES | {"grouped": GROUPED | {"head_dim": 32}, "tied": TIED | {"attention_bias": False}}
QWEN3_SHAPES = {
    "grouped": GROUPED | {"head_dim": 32},
    "one-kv-head": ONE_KV_HEAD,
    "tied-biased": LLAMA_SHAPES["tied-biased"],
}
# Of the families with experts: chosen weights that add up to one or not, layers without experts, numbers that share
# nothing evenly.
QWEN3_MOE_SHAPES = {
    "grouped": GROUPED
    | {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    | {"norm_topk_prob": True},
    "one-kv-head": ONE_KV_HEAD
    | {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 27, "mlp_only_layers": [1]},
    "tied-biased": LLAMA_SHAPES["tied-biased"]
    | {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 21},
}
MIXTRAL_SHAPES = {
    "grouped": GROUPED | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "one-kv-head": ONE_KV_HEAD | {"num_local_experts": 3, "num_experts_per_tok": 3},
    "tied": TIED | {"num_local_experts": 5, "num_experts_per_tok": 1, "sliding_window": 7},
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32}
GPT_OSS_SHAPES = {
    "grouped": GROUPED
    | {"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 5}
    | {"rope_parameters": YARN | {"truncate": False}},
    "one-kv-head": ONE_KV_HEAD
    | {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 2, "attention_bias": False}
    | {"rope_parameters": YARN},
    "tied": TIED
    | {"num_local_experts": 5, "num_experts_per_tok": 1, "sliding_window": 40, "num_hidden_layers": 2}
    | {"layer_types": ["full_attention", "sliding_attention"]},
}
# Windows in all layers, or in none.
MISTRAL_SHAPES = {
    "grouped": GROUPED | {"head_dim": 32, "sliding_window": 5},
    "one-kv-head": ONE_KV_HEAD | {"sliding_window": None},
    "tied": TIED | {"sliding_window": 40},
}
# Not all dimensions of a head turn; fused projections of odd widths.
PHI3_SHAPES = {
    "grouped": GROUPED | {"pad_token_id": 0, "sliding_window": 5, "partial_rotary_factor": 0.75},
    "one-kv-head": {name: value for name, value in ONE_KV_HEAD.items() if name != "head_dim"}
    | {"pad_token_id": 0, "sliding_window": None},
    "tied": TIED | {"pad_token_id": 0},
}
# Windows in some layers, and scores and logits that reach their limits.
GEMMA2_SHAPES = {
    "grouped": GROUPED
    | {"head_dim": 32, "sliding_window": 5, "query_pre_attn_scalar": 20, "num_hidden_layers": 3}
    | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    "one-kv-head": ONE_KV_HEAD | {"sliding_window": 2, "attn_logit_softcapping": None, "query_pre_attn_scalar": 9},
    "tied-biased": LLAMA_SHAPES["tied-biased"] | {"sliding_window": 40, "final_logit_softcapping": None},
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
GEMMA3_SHAPES = {
    "grouped": GROUPED
    | {"head_dim": 32, "sliding_window": 5, "query_pre_attn_scalar": 20, "rope_parameters": GEMMA3_ROPE}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "one-kv-head": ONE_KV_HEAD
    | {"sliding_window": 2, "query_pre_attn_scalar": 9, "final_logit_softcapping": 4.0}
    | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    "tied": TIED | {"sliding_window": 40, "num_hidden_layers": 7},
}
# Latent attention: queries made of a vector or of the hidden state, experts in groups or not, layers without experts.
DEEPSEEK_HEADS = {"kv_lora_rank": 22, "qk_nope_head_dim": 14, "qk_rope_head_dim": 10, "v_head_dim": 11}
DEEPSEEK_V2_SHAPES = {
    "grouped": {name: value for name, value in GROUPED.items() if name != "num_key_value_heads"}
    | DEEPSEEK_HEADS
    | {"q_lora_rank": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7},
    "one-head": DEEPSEEK_HEADS
    | {"hidden_size": 30, "num_attention_heads": 1, "intermediate_size": 101, "num_hidden_layers": 3}
    | {"q_lora_rank": None, "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 27}
    | {"first_k_dense_replace": 1, "n_shared_experts": 1},
}
DEEPSEEK_V3_SHAPES = {
    "grouped": {name: value for name, value in GROUPED.items() if name != "num_key_value_heads"}
    | DEEPSEEK_HEADS
    | {"q_lora_rank": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_hidden_layers": 3},
    "three-heads": DEEPSEEK_HEADS
    | {"qk_nope_head_dim": 13, "kv_lora_rank": 19}
    | {"hidden_size": 42, "num_attention_heads": 3, "intermediate_size": 77, "num_hidden_layers": 2}
    | {"q_lora_rank": None, "n_routed_experts": 6, "num_experts_per_tok": 1, "moe_intermediate_size": 21}
    | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "rope_interleave": False, "tie_word_embeddings": True}
    | {"norm_topk_prob": False}
    | {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "mscale": 1.0}
        | {"mscale_all_dim": 0.7, "original_max_position_embeddings": 32}
    },
}
# Heads narrower and wider together than the hidden size, odd numbers of them, as many decoder layers or not.
T5_SHAPES = {
    "tied": {"d_model": 64, "num_heads": 4, "d_kv": 12, "d_ff": 256, "num_layers": 2},
    "gated-untied": {
        "d_model": 60,
        "num_heads": 5,
        "d_kv": 22,
        "d_ff": 101,
        "num_layers": 3,
        "num_decoder_layers": 2,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
    "few-buckets": {
        "d_model": 42,
        "num_heads": 3,
        "d_kv": 14,
        "d_ff": 77,
        "num_layers": 1,
        "num_decoder_layers": 3,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20,
    },
}
T5_START = 5

FAMILIES = {
    "gpt_oss": GPT_OSS_SHAPES,
    "deepseek_v2": DEEPSEEK_V2_SHAPES,
    "deepseek_v3": DEEPSEEK_V3_SHAPES,
    "gemma2": GEMMA2_SHAPES,
    "gemma3_text": GEMMA3_SHAPES,
    "gpt2": GPT2_SHAPES,
    "llama": LLAMA_SHAPES,
    "mistral": MISTRAL_SHAPES,
    "mixtral": MIXTRAL_SHAPES,
    "opt": OPT_SHAPES,
    "phi3": PHI3_SHAPES,
    "qwen2": QWEN2_SHAPES,
    "qwen3": QWEN3_SHAPES,
    "qwen3_moe": QWEN3_MOE_SHAPES,
    "seed_oss": SEED_OSS_SHAPES,
    "t5": T5_SHAPES,
}
CHECKPOINTS = [f"{family}-{shape}" for family, shapes in FAMILIES.items() for shape in shapes]


WITH_EXPERTS = ("deepseek_v2", "deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe")


def random_shape(rng, family):
    """A small shape drawn at random: sizes, heads and whatever else the family lets a checkpoint choose."""

    def one_of(*values):
        return values[rng.integers(len(values))]

    heads = int(rng.integers(1, 6))
    kv_heads = one_of(*(n for n in range(1, heads + 1) if heads % n == 0))
    head_dim, layers, ffn = 2 * int(rng.integers(4, 13)), int(rng.integers(1, 5)), int(rng.integers(30, 200))
    tied = {"tie_word_embeddings": one_of(True, False)}
    if family == "opt":
        sizes = {"hidden_size": heads * head_dim, "num_attention_heads": heads, "num_hidden_layers": layers}
        return tied | sizes | {"ffn_dim": ffn, "activation_function": one_of("relu", "gelu", "silu")}
    if ROWS[family].get("names", {}).get("hidden_size") == "n_embd":
        sizes = {"n_embd": heads * head_dim, "n_head": heads, "n_layer": layers, "n_inner": one_of(None, ffn)}
        return tied | sizes | {"activation_function": one_of("gelu_new", "relu"), "layer_norm_epsilon": 1e-3}
    if family == "t5":
        sizes = {"d_model": int(rng.integers(20, 80)), "num_heads": heads, "d_kv": head_dim, "d_ff": ffn}
        stacks = {"num_layers": layers, "num_decoder_layers": int(rng.integers(1, 5))}
        buckets = {"relative_attention_num_buckets": one_of(8, 32), "relative_attention_max_distance": one_of(20, 128)}
        return tied | sizes | stacks | buckets | {"feed_forward_proj": one_of("relu", "gated-gelu", "gated-silu")}
    if family.startswith("deepseek"):
        groups = one_of(1, 2, 3)
        experts = 2 * groups * int(rng.integers(1, 4))
        sizes = {"hidden_size": 14 * heads, "num_attention_heads": heads, "intermediate_size": ffn}
        sizes |= {"num_hidden_layers": layers, "first_k_dense_replace": int(rng.integers(0, layers + 1))}
        sizes |= {"kv_lora_rank": head_dim, "q_lora_rank": one_of(None, 30), "qk_nope_head_dim": head_dim}
        sizes |= {"qk_rope_head_dim": 2 * int(rng.integers(1, 8)), "v_head_dim": int(rng.integers(5, 30))}
        sizes |= {"n_routed_experts": experts, "n_group": groups, "topk_group": int(rng.integers(1, groups + 1))}
        sizes |= {"num_experts_per_tok": int(rng.integers(1, 1 + sizes["topk_group"] * experts // groups))}
        sizes |= {"n_shared_experts": int(rng.integers(1, 3)), "moe_intermediate_size": int(rng.integers(20, 80))}
        routing = {"topk_method": "group_limited_greedy"} if family == "deepseek_v2" else {}
        return tied | sizes | routing | {"routed_scaling_factor": 1.5}
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    sizes |= {"hidden_size": heads * one_of(head_dim, 14), "intermediate_size": ffn, "num_hidden_layers": layers}
    plain, scaled = {"rope_type": "default", "rope_theta": 1000.0}, SCALED | {"original_max_position_embeddings": 32}
    rope = {"rope_parameters": plain if family == "phi3" else one_of(plain, scaled)}
    if family == "gemma3_text":
        rope = {"rope_parameters": {"full_attention": plain, "sliding_attention": plain | {"rope_theta": 50.0}}}
    if family == "phi3":
        sizes |= {"hidden_size": heads * head_dim, "pad_token_id": 0}
        del sizes["head_dim"]
    if family in ("gemma2", "gemma3_text", "mistral", "phi3"):
        sizes |= {"sliding_window": int(rng.integers(2, 40))}
    if family.startswith("gemma"):
        sizes |= {"query_pre_attn_scalar": int(rng.integers(5, 40)), "final_logit_softcapping": one_of(None, 9.0)}
    if family in ("mixtral", "qwen3_moe"):
        sizes |= {"num_local_experts": int(rng.integers(1, 9))}
        sizes |= {"num_experts_per_tok": int(rng.integers(1, sizes["num_local_experts"] + 1))}
    if family == "qwen3_moe":
        sizes |= {"num_experts": sizes.pop("num_local_experts"), "moe_intermediate_size": int(rng.integers(20, 80))}
        sizes |= {"norm_topk_prob": one_of(True, False), "decoder_sparse_step": int(rng.integers(1, 3))}
    no_bias = family in ("qwen2", "mixtral", "mistral", "phi3")
    return tied | sizes | rope | ({} if no_bias else {"attention_bias": one_of(True, False)})


def classes_of(family):
    """Return the classes of `transformers` for a family's config and model."""
    import transformers

    config_class = transformers.CONFIG_MAPPING[family]
    models = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if family == "t5":
        models = transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    return config_class, models[config_class]


def save(directory, family, shape, dtype=torch.float32):
    """Save seeded weights, large enough to tell tokens apart; in half precision layers keep to trained magnitude, since
    larger ones multiply the errors of rounding. `shape` is a name, or settings of its own.

    Returns the directory and the transformers model, which computes in float32 with the weights that were saved.
    """
    config_class, model_class = classes_of(family)
    settings = dict(FAMILIES[family][shape] if isinstance(shape, str) else shape)
    settings |= {"word_embed_proj_dim": settings["hidden_size"], "dropout": 0.0} if family == "opt" else {}
    settings |= {"decoder_start_token_id": T5_START} if family == "t5" else {"max_position_embeddings": CONTEXT}
    settings |= {"bos_token_id": 2, "eos_token_id": 2}
    config = config_class(vocab_size=VOCABULARY, **settings)
    torch.manual_seed(7)
    model = model_class(config).eval()
    if family == "gemma2":
        model.set_attn_implementation("eager")  # older versions choose one that leaves out soft caps without a word
    if family in WITH_EXPERTS:
        model.set_experts_implementation("eager")  # grouped products take no odd widths
    if family == "t5" and settings.get("tie_word_embeddings") is False:
        # transformers ties whatever the config says, unless a checkpoint holds another head.
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2)
                buffer.copy_(buffer.to(dtype))
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                in_layer = any(part in name for part in (".layers.", ".h.", ".block."))
                gain = 1.0 if dtype != torch.float32 and in_layer else 1.6
                if name.endswith("Attention.q.weight"):
                    gain *= config.d_kv**-0.5  # T5 divides no score by this
                fan_in = weight.shape[0 if "c_" in name else -1]
                weight.normal_(0.0, gain * fan_in**-0.5)
            elif name.endswith("bias"):
                weight.normal_(0.0, 0.1)
            else:
                weight.uniform_(0.8, 1.2)
                if family.startswith("gemma"):
                    weight.sub_(1.0)  # which is added where it is applied
                if name == "decoder.final_layer_norm.weight" and config.scale_decoder_outputs:
                    weight.mul_(config.d_model**0.5)
            weight.copy_(weight.to(dtype))
    copy.deepcopy(model).to(dtype).save_pretrained(directory)
    return directory, model


def load_checkpoint(directory: Path, dtype: DType | None = None, device: str = "cpu") -> Model:
    """Return the model of a directory in Hugging Face layout; `dtype` None: as its config.json says."""
    spec = read_spec(directory)
    return load_model(spec, dtype or spec.default_dtype, Checkpoint(directory), device)
