"""README's table of models says what is planned, what xgpt's own engine runs, and what runs in vLLM."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.xgpt.checkpoints.test_planned import NOT_BUILT, PUBLISHED, official, spec_like
from xgpt.checkpoints.files import ENCODER_DECODERS
from xgpt.checkpoints.readers.planned import PLANNED
from xgpt.core.schema.families import FAMILIES

ROW = re.compile(r"^\| (.+) \| ((?:`[\w-]+` ?)+) \| (yes|no) \| (yes|no) \| ([^|]+) \|$", re.MULTILINE)
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
ROWS = {name: (family, run, vllm) for name, family, plan, run, vllm in ROW.findall(README) if plan == "yes"}


def families(row: str) -> set[str]:
    return set(re.findall(r"`([\w-]+)`", ROWS[row][0]))


def test_every_family_that_is_read_stands_in_one_row() -> None:
    listed = [family for row in ROWS for family in families(row)]
    assert sorted(listed) == sorted({*FAMILIES, *PLANNED})


def test_what_our_engine_runs_is_what_has_a_class() -> None:
    for row, (_, run, _) in ROWS.items():
        for family in families(row):
            assert ("model" in FAMILIES.get(family, ())) == (run == "yes"), family


def test_models_with_states_run_by_vllm_s_own_schedule() -> None:
    """Ours pages keys and values, and leaves the states of recurrent layers to vLLM."""
    with_states = families("linear attention, state-space layers")
    assert all(vllm == "no" for row, (_, _, vllm) in ROWS.items() if families(row) <= set(ENCODER_DECODERS))
    assert ROWS["linear attention, state-space layers"][2] == "under vLLM's scheduler only"
    unbuilt = {family for names in NOT_BUILT.values() for family in names}
    found = {family for family in PLANNED - unbuilt if _has_states(family)}
    assert found <= with_states
    for name in ("Qwen/Qwen3.5-9B", "moonshotai/Kimi-K3", "nvidia/Nemotron-H-56B-Base-8K", "LiquidAI/LFM2.5-VL-1.6B"):
        assert any(kind.recurrent is not None for kind in official(name).kinds), name
    assert len(PUBLISHED["models"]) > 100


def _has_states(family: str) -> bool:
    spec, _ = spec_like(family)
    return any(kind.recurrent is not None for kind in spec.kinds)
