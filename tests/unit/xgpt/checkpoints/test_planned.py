"""Families that are planned from their blocks: sizes against models that transformers builds from the same config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from xgpt.api import solve
from xgpt.checkpoints.files import spec_of
from xgpt.checkpoints.readers.planned import PLAIN
from xgpt.core.schema import ModelSpec

QUICK = {"deepseek_v32", "gemma4_text", "kimi_linear", "lfm2", "llama4_text", "nemotron_h", "qwen3_next", "smollm3"}
NOT_BUILT = {
    "no class for text": {"glm4v_moe_text", "glm4v_text", "mistral4", "qwen2_5_vl_text", "qwen2_vl_text", "step3p5"}
    | {"qwen3_vl_moe_text", "qwen3_vl_text"},
    "no class at all": {"mimo", "nemotron-nas"},
    "its defaults do not build": {"dots1", "granitemoehybrid", "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2_moe"}
    | {"longcat_flash", "nemotron"},
}
"""Families whose default config transformers builds no model of, and why."""
BUILT = sorted(PLAIN - set().union(*NOT_BUILT.values()))


def spec_like(family: str, **changes: Any) -> tuple[ModelSpec, Any]:
    """Return what is read of a family's default config, with some fields changed, and that config."""
    config = CONFIG_MAPPING[family](**changes)
    given = json.loads(json.dumps(config.to_dict(), default=str))
    return spec_of(given | {"model_type": family}, family), config


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.long) for f in BUILT])
def test_a_model_has_as_many_weights_as_the_one_that_transformers_builds(family: str) -> None:
    spec, config = spec_like(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = sum(w.numel() for name, w in model.named_parameters() if w.dim() > 1 and "bias" not in name)
    # Gates of one output, and vectors that mix streams, are left out.
    assert spec.decoder_params() + spec.embedding_params == pytest.approx(weights, rel=2e-5)


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


def test_a_model_of_linear_and_full_attention_is_planned_with_its_states_set_aside() -> None:
    spec = spec_of(QWEN3_NEXT, "Qwen3-Next-80B-A3B")
    assert spec.decoder_params() + spec.embedding_params == pytest.approx(79.67e9, rel=2e-3)
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


OFFICIAL = json.loads((Path(__file__).parent / "official.json").read_text(encoding="utf-8"))
"""Official configs, their sizes only, and the parameters that each model's page states, in billions."""


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_configs_have_the_parameters_that_are_published(name: str) -> None:
    spec = spec_of(OFFICIAL[name]["config"], name)
    total = spec.decoder_params() + spec.embedding_params
    assert total / 1e9 == pytest.approx(OFFICIAL[name]["billions"], rel=0.015)
