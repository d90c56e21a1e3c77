"""Families that are planned from their blocks: sizes against models that transformers builds from the same config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rings import few
from xgpt.api import solve
from xgpt.checkpoints.files import spec_of
from xgpt.checkpoints.readers.planned import PLANNED
from xgpt.core.errors import InputError
from xgpt.core.schema import ModelSpec

QUICK = {
    "deepseek_v32",
    "falcon_h1",
    "gemma4_text",
    "kimi_linear",
    "lfm2",
    "llama4_text",
    "nemotron_h",
    "qwen3_next",
    "smollm3",
}
NOT_BUILT = {
    "no class for text": {"glm4v_moe_text", "glm4v_text", "mistral4", "qwen2_5_vl_text", "qwen2_vl_text", "step3p5"}
    | {"qwen3_vl_moe_text", "qwen3_vl_text"},
    "no class at all": {"glm5_next_text", "mimo", "muse_glimmer_text", "nemotron-nas"},
    "its defaults do not build": {"dots1", "granitemoehybrid", "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2_moe"}
    | {"nemotron"},
    "it holds weights of experts that pass tokens on": {"longcat_flash"},
}
"""Families whose default config transformers builds no model of, and why."""
BUILT = sorted(PLANNED - set().union(*NOT_BUILT.values()))


def spec_like(family: str, **changes: Any) -> tuple[ModelSpec, Any]:
    """Return what is read of a family's default config, with some fields changed, and that config."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[family](**changes)
    given = json.loads(json.dumps(config.to_dict(), default=str))
    return spec_of(given | {"model_type": family}, family), config


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.long) for f in BUILT])
def test_a_model_has_as_many_weights_as_the_one_that_transformers_builds(family: str) -> None:
    from transformers import AutoModelForCausalLM

    spec, config = spec_like(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = sum(w.numel() for name, w in model.named_parameters() if w.dim() > 1 and "bias" not in name)
    # Gates of one output, and vectors that mix streams, are left out.
    assert spec.decoder_params + spec.embedding_params == pytest.approx(weights, rel=2e-5)


PARTIAL: dict[str, dict[str, Any]] = {
    "falcon": {"hidden_size": 1024, "num_attention_heads": 16, "num_kv_heads": 4, "new_decoder_architecture": True},
    "arcee": {"hidden_size": 1024, "num_attention_heads": 16},
    "olmo2": {"num_attention_heads": 16},
    "cohere": {"hidden_size": 1024, "num_attention_heads": 8},
    "nemotron": {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4},
    "phi": {"hidden_size": 1024, "num_attention_heads": 8},
}
"""Sizes of which others follow in transformers, if a config.json leaves those out."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", few(PARTIAL))
def test_sizes_that_follow_from_others_are_no_constants(family: str) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = PARTIAL[family] | {"num_hidden_layers": 2}
    spec = spec_of(sizes | {"model_type": family}, family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes))
    weights = sum(w.numel() for name, w in model.named_parameters() if w.dim() > 1 and "bias" not in name)
    assert spec.decoder_params + spec.embedding_params == pytest.approx(weights, rel=2e-5)


KEPT = {
    # bytes of a token in bfloat16, from the models' own reports: layers x what one of them keeps
    "deepseek_v32": 61 * (2 * 576 + 132),
    "qwen3_next": 12 * 2 * 2 * 2 * 256,
    "nemotron_h": 1 * 2 * 2 * 8 * 128,
    "kimi_linear": 6 * 2 * 576,
}


@pytest.mark.parametrize("family", KEPT)
def test_what_a_token_keeps(family: str) -> None:
    spec, _ = spec_like(family)
    assert spec.kv_bytes_per_token("bfloat16") == KEPT[family]


def test_states_of_linear_layers_are_one_constant_a_request() -> None:
    """Qwen3-Next: 36 layers of 32 states of 128 x 128 in float32, and the last 3 inputs of 8,192 channels."""
    spec, _ = spec_like("qwen3_next")
    states = [(len(kind.layers), kind.recurrent.state_bytes) for kind in spec.kinds if kind.recurrent is not None]
    assert states == [(36, 4 * 32 * 128 * 128 + 2 * 3 * 8192)]


QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "num_hidden_layers": 48,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}


def plan(spec: ModelSpec) -> Any:
    return solve(
        model=spec, cluster="h100x8", workload="chat-short", latency_bound_s=60, policy="chunked", engine="vllm"
    )


@pytest.mark.long
def test_a_model_of_linear_and_full_attention_is_planned_with_its_states_set_aside() -> None:
    spec = spec_of(QWEN3_NEXT, "Qwen3-Next-80B-A3B")
    assert spec.decoder_params + spec.embedding_params == pytest.approx(79.67e9, rel=2e-3)
    found = plan(spec).best
    assert found.admission.max_running is not None
    assert max(found.estimate.memory_bytes) <= found.cluster.device.memory_bytes * found.cluster.device.usable_memory
    assert found.policy.max_batch <= found.admission.max_running


def test_windows_hold_more_requests_than_full_attention() -> None:
    """Long requests: layers with a window keep as much of them as of short ones, so more requests fit."""
    config = {"model_type": "olmo3", "vocab_size": 100352, "dtype": "bfloat16", "tie_word_embeddings": False}
    windows = spec_of(config | {"sliding_window": 1024, "max_position_embeddings": 65536}, "olmo3")
    full = spec_of(config | {"layer_types": ["full_attention"] * 32, "max_position_embeddings": 65536}, "olmo3")
    asked = {"model": "", "cluster": "h100x1", "workload": "azure-code", "latency_bound_s": 60, "policy": "orca"}
    bounded, growing = (solve(**asked | {"model": spec}, engine="vllm").best for spec in (windows, full))
    assert bounded.estimate.throughput_rps > 1.1 * growing.estimate.throughput_rps


PUBLISHED = json.loads((Path(__file__).parent / "official.json").read_text(encoding="utf-8"))
"""Official config.json files, their sizes only; of each model the config that has its sizes, and the parameters and
active parameters that its page, its report or vLLM's recipe states, in billions; and of each of vLLM's recipes for
models that generate text the model that has its sizes, and how these are known, or why they are not."""


def official(name: str) -> ModelSpec:
    """Return the model that an official config describes."""
    return spec_of(PUBLISHED["configs"][PUBLISHED["models"][name][0]], name)


def test_official_configs_have_the_parameters_that_are_published() -> None:
    """Towers for images and MTP heads are left out on both sides."""
    wrong = {}
    for name, (_, total, active) in PUBLISHED["models"].items():
        spec = official(name)
        found = (spec.decoder_params + spec.embedding_params) / 1e9
        if found != pytest.approx(total, rel=0.015):
            wrong[name] = found
        head = spec.embedding_params * (0.5 if not spec.tie_embeddings else 1) / 1e9
        # Some count the embedding and the head as active, some one of them only.
        busy = active_params(spec) / 1e9
        if active is not None and not any(one == pytest.approx(active, rel=0.06) for one in (busy, busy - head)):
            wrong[f"{name}, active"] = busy
    assert not wrong and len(PUBLISHED["models"]) >= 100


def test_most_of_vllm_s_recipes_are_planned_from_official_configs() -> None:
    known = {recipe: how for recipe, (model, how) in PUBLISHED["recipes"].items() if model in PUBLISHED["models"]}
    defaults = {model for model, how in PUBLISHED["recipes"].values() if how in ("class", "report")}
    official = [recipe for recipe in known if PUBLISHED["recipes"][recipe][0] not in defaults]
    assert len(official) >= 100 and len(known) >= 120
    assert set(known.values()) == {"file", "same", "class", "report"}


KEPT_PER_TOKEN = {
    # DeepSeek, "Insights into DeepSeek-V3" (ISCA 2025), table 1, in bytes
    "deepseek-ai/DeepSeek-V3": 70_272,
    "meta-llama/Meta-Llama-3.1-405B": 516_096,
    "Qwen/Qwen2.5-VL-72B-Instruct": 327_680,  # of Qwen2.5-72B, which has the same decoder
    # layers with full attention x heads x size, from the models' reports
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": 7 * 2 * 576,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 12 * 2 * 2 * 2 * 256,
    "mistralai/Mistral-Large-3-675B-Instruct-2512": 61 * 2 * 576,
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": 4 * 2 * 2 * 8 * 128,
    "openai/gpt-oss-120b": 36 * 2 * 2 * 8 * 64,
    "zai-org/GLM-4.5": 92 * 2 * 2 * 8 * 128,
}


@pytest.mark.parametrize("name", KEPT_PER_TOKEN)
def test_official_configs_keep_the_published_bytes_of_a_token(name: str) -> None:
    assert official(name).kv_bytes_per_token("bfloat16") == KEPT_PER_TOKEN[name]


def test_layers_that_share_keys_and_values_may_have_a_wider_feed_forward_block() -> None:
    sizes = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": 1024, "hidden_size": 512}
    widths = {wide: spec_like("gemma4_text", **sizes, use_double_wide_mlp=wide)[0] for wide in (False, True)}
    assert widths[True].decoder_params - widths[False].decoder_params == 2 * 3 * 512 * 1024


def active_params(spec: ModelSpec) -> int:
    """Return the weights that one token passes."""
    sizes, layers = spec.sizes, 0
    for kind in spec.kinds:
        routed = 0 if kind.experts is None else kind.experts.active * sizes.expert(kind)
        layers += len(kind.layers) * (sizes.mixer(kind) + sizes.dense(kind) + sizes.beside_experts(kind) + routed)
    return layers + spec.embedding_params


IN_VLLM: dict[str, tuple[str, dict[str, int]]] = {
    "Qwen/Qwen3-Next-80B-A3B-Instruct": ("qwen3_next", {"num_experts": 512}),
    "tiny-random/qwen3-next-moe": ("qwen3_next", {"num_experts": 32}),
    "zai-org/GLM-4.5": ("glm4_moe", {"n_routed_experts": 160}),
    "baidu/ERNIE-4.5-21B-A3B-PT": ("ernie4_5_moe", {"moe_num_experts": 64}),
    "lmsys/gpt-oss-20b-bf16": ("gpt_oss", {"num_local_experts": 32}),
    "luccafong/deepseek_mtp_main_random": ("deepseek_v3", {"n_routed_experts": 72}),
    "luccafong/deepseek_mtp_draft_random": ("deepseek_v3", {"n_routed_experts": 72}),
    "meituan-longcat/LongCat-Flash-Chat": ("longcat_flash", {"num_layers": 28, "n_routed_experts": 512}),
    "deepseek-ai/DeepSeek-V3.2-Exp": ("deepseek_v32", {"n_routed_experts": 256}),
    "tiiuae/falcon-7b": ("falcon", {"num_kv_heads": 1}),
    "tiiuae/falcon-40b": ("falcon", {"num_kv_heads": 8, "new_decoder_architecture": True}),
    "XiaomiMiMo/MiMo-7B-RL": ("XiaomiMiMo/MiMo-7B-Base", {}),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": ("meta-llama/Llama-4-Scout-17B-16E-Instruct", {}),
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": ("nvidia/Llama-3_3-Nemotron-Super-49B-v1", {}),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {}),
}
"""Checkpoints of vLLM's test fixtures, each with its official config, or its family in transformers and its experts."""
SIZES_IN_VLLM = {
    # layers, hidden size, heads, head size (MLA: latent and rotary part), vocabulary, K/V heads, experts, as
    # vLLM's tests/config/base_model_arch_groundtruth.json states them
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (48, 2048, 16, 256, 151936, 2, 512),
    "tiny-random/qwen3-next-moe": (4, 8, 16, 32, 151936, 8, 32),
    "zai-org/GLM-4.5": (92, 5120, 96, 128, 151552, 8, 160),
    "baidu/ERNIE-4.5-21B-A3B-PT": (28, 2560, 20, 128, 103424, 4, 64),
    "lmsys/gpt-oss-20b-bf16": (24, 2880, 64, 64, 201088, 8, 32),
    "luccafong/deepseek_mtp_main_random": (5, 2560, 32, 576, 129280, 32, 72),
    "luccafong/deepseek_mtp_draft_random": (10, 2560, 32, 576, 129280, 32, 72),
    "meituan-longcat/LongCat-Flash-Chat": (28, 6144, 64, 576, 131072, 64, 512),
    "deepseek-ai/DeepSeek-V3.2-Exp": (61, 7168, 128, 576, 129280, 128, 256),
    "tiiuae/falcon-7b": (32, 4544, 71, 64, 65024, 1, 0),
    "tiiuae/falcon-40b": (60, 8192, 128, 64, 65024, 8, 0),
    "XiaomiMiMo/MiMo-7B-RL": (36, 4096, 32, 128, 151680, 8, 0),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (48, 5120, 40, 128, 202048, 8, 16),
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": (80, 8192, 64, 128, 128256, 8, 0),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (52, 2688, 32, 128, 131072, 2, 128),
}


@pytest.mark.parametrize("name", IN_VLLM)
def test_sizes_are_those_that_vllm_states_of_its_fixtures(name: str) -> None:
    family, changes = IN_VLLM[name]
    layers, hidden, heads, head_size, vocab, kv_heads, experts = SIZES_IN_VLLM[name]
    if "/" in family:
        spec = official(family)
    else:
        shape = {"hidden_size": hidden, "num_attention_heads": heads, "vocab_size": vocab} | changes
        shape |= {} if "num_layers" in changes else {"num_hidden_layers": layers}
        shape |= (
            {} if head_size == 576 or family == "falcon" else {"num_key_value_heads": kv_heads, "head_dim": head_size}
        )
        spec, _ = spec_like(family, **shape)
    attention = next(kind.attention for kind in spec.kinds if kind.attention is not None)
    num_layers = spec.num_layers // (2 if family == "longcat_flash" else 1)  # of two attention blocks each
    size = attention.head_dim if attention.latent is None else attention.latent.kept_per_token
    found = (num_layers, spec.hidden_size, spec.num_heads, size, spec.vocab_size, spec.num_kv_heads)
    assert found == (layers, hidden, heads, head_size, vocab, kv_heads)
    assert (spec.experts.number if spec.experts is not None else 0) == experts


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("mamba", "only state-space layers"),
        ("mamba2", "only state-space layers"),
        ("falcon_mamba", "only state-space layers"),
        ("zamba2", "share one block"),
        ("mpt", "biases on attention scores"),
        ("dbrx", "nests sizes"),
        ("timm_wrapper", "generates no tokens"),
        ("diffusion_gemma", "by diffusion"),
        ("ernie4_5_vl_moe", "differ in size"),
        ("gemma3n", "several streams"),
    ],
)
def test_families_of_vllm_s_fixtures_that_are_not_read_say_why(family: str, why: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[family]().to_dict() if family in CONFIG_MAPPING else {}
    with pytest.raises(InputError, match=f"model_type: '{family}(_text)?' .*xgpt does not plan this family: .*{why}"):
        spec_of(config | {"model_type": family}, family)


@pytest.mark.parametrize(("family", "like"), [("paddleocr_vl", "ernie4_5"), ("hunyuan_vl", "hunyuan_v1_dense")])
def test_language_models_of_readers_of_images_are_those_that_they_are_built_on(family: str, like: str) -> None:
    assert spec_like(family)[0].decoder_params == spec_like(like)[0].decoder_params


KV_PUBLISHED = {
    # DeepSeek-V3's hardware paper (arXiv 2505.09343) table 1
    "deepseek-ai/DeepSeek-V3": 70272,
    "meta-llama/Meta-Llama-3.1-405B": 516096,
    # of the index: 128 elements in eight bits and a scale (arXiv 2512.02556, vLLM's indexer cache)
    "deepseek-ai/DeepSeek-V3.2": 70272 + 61 * 132,
    # vLLM's start-up logs: K/V bytes over tokens
    "openai/gpt-oss-120b": 73728,
    "meta-llama/Meta-Llama-3.1-70B": 327680,
    "Qwen/Qwen3-235B-A22B": 192512,
}


@pytest.mark.parametrize("name", KV_PUBLISHED)
def test_official_configs_keep_what_is_published_of_a_token(name: str) -> None:
    assert official(name).kv_bytes_per_token("bfloat16") == KV_PUBLISHED[name]


def test_every_size_of_a_config_is_read_or_refused() -> None:
    config = PUBLISHED["configs"]["XiaomiMiMo/MiMo-V2-Flash"]
    with pytest.raises(InputError, match=r"num_memory_heads: 4 .*does not know this size field of mimo_v2_flash"):
        spec_of(config | {"num_memory_heads": 4}, "changed")
    assert spec_of(config | {"num_memory_heads": 0}, "changed") == spec_of(config, "changed")


@pytest.mark.parametrize(
    ("name", "field", "windows"),
    [
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "attention_chunk_size", 36),
        ("LGAI-EXAONE/EXAONE-4.0-32B", "layer_types", 48),
    ],
)
def test_layers_with_windows_are_found_without_a_list_of_them(name: str, field: str, windows: int) -> None:
    """Llama 4 names the chunk, and which layers have none; EXAONE 4 a pattern of letters."""
    config = PUBLISHED["configs"][name]
    shown = config.get("text_config", config)
    assert field in shown
    spec = spec_of({key: value for key, value in config.items() if key != "layer_types"}, name)
    found = [kind for kind in spec.kinds if kind.attention is not None and kind.attention.window is not None]
    assert sum(len(kind.layers) for kind in found) == windows


def test_layers_that_take_the_index_of_another_are_found_without_a_list_of_them() -> None:
    config = PUBLISHED["configs"]["zai-org/GLM-5.2"]
    without = {key: value for key, value in config.items() if key != "indexer_types"}
    assert spec_of(without, "GLM-5.2") == spec_of(config, "GLM-5.2")


def test_longcat_flash_has_the_parameters_of_its_report() -> None:
    """560 billion, of which 18.6 to 31.3 are active, 27 on average (arXiv 2509.01322)."""
    spec, _ = spec_like("longcat_flash")
    assert (spec.decoder_params + spec.embedding_params) / 1e9 == pytest.approx(560, rel=0.01)
    assert active_params(spec) / 1e9 == pytest.approx(27, rel=0.05)
