"""Complete config.json files: what cannot change a size is passed over or named, and only unknown sizes are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import xgpt
from tests.planned import num_params
from xgpt.checkpoints.files import read_config, spec_of
from xgpt.core.errors import InputError
from xrunner.models import family_of

COMPLETE = Path(__file__).parent / "complete"
# Billions of parameters of the language model, as its maker states them, and K/V bytes of a token in 16 bits.
SIZES = {"granite-4.0-micro": (3.4, 81_920), "granite-4.0-h-small": (32.2, 16_384), "internvl3-38b": (32.8, 262_144)}
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 2048, "max_sequence_length": 2048,
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_complete_files_are_read(name: str) -> None:
    spec, (billions, kept) = read_config(COMPLETE / f"{name}.json"), SIZES[name]
    assert num_params(spec) / 1e9 == pytest.approx(billions, rel=0.02)
    assert spec.kv_bytes_per_token("bfloat16") == kept


def test_old_names_of_the_context_have_no_effect() -> None:
    assert spec_of(LLAMA, "m").unsupported == ()


def test_unknown_settings_are_named_and_unknown_sizes_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"scale_embeddings": True, "rope_scaling": {"type": "dynamic", "factor": 2.0}}))
    spec = read_config(path)
    scaling = "rope_scaling: {'type': 'dynamic', 'factor': 2.0}"
    assert (spec.unsupported, spec.max_context) == (("scale_embeddings: True", scaling), 4096)
    with pytest.raises(InputError, match=r"scale_embeddings: True; rope_scaling: .*own engine"):
        family_of(spec)
    plan = xgpt.plan(
        model=str(path),
        cluster="h100x1",
        workload="orca",
        latency_bound_s=None,
        objective="saturated",
        policy="chunked",
    )
    (said,) = [line for line in plan.estimate.warnings if "scale_embeddings" in line]
    assert said.endswith(f"taken to change no size: scale_embeddings: True; {scaling}")
    with pytest.raises(InputError, match=r"config\.json: num_register_heads: 4"):
        spec_of(LLAMA | {"num_register_heads": 4}, "m")


def test_checkpoints_that_only_draft_are_refused_whatever_their_text_model() -> None:
    text = LLAMA | {"model_type": "gemma4_text", "num_kv_shared_layers": 32}
    with pytest.raises(InputError, match=r"gemma4_assistant' .*it drafts for another model"):
        spec_of({"model_type": "gemma4_assistant", "text_config": text}, "m")
