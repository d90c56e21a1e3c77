"""Rows compute what the flattened batch computes, token by token, however requests are laid out in them."""

import numpy as np
import pytest
import torch

import xrunner.tcb.rows as row_attention
import xrunner.tcb.rows as rows_module
from benchmarks.tcb import layouts
from benchmarks.tcb.layouts import run_rows, slotted_rows
from tests.numerics.checkpoints import VOCABULARY
from tests.numerics.test_families import FIRST_SHAPES, make_worker
from xgpt.core.policies import LaneSettings, OneLane, Pool
from xgpt.core.policies.request import Request
from xgpt.core.policies.tcb import concatenated_rows, padded_rows
from xrunner.engine import Engine
from xrunner.generation import Generation

rng = np.random.default_rng(3)
REQUESTS = [Request(i, int(rng.integers(1, 14)), int(rng.integers(1, 9))) for i in range(11)]
PROMPTS = {one.id: tuple(rng.integers(0, VOCABULARY, one.input_length).tolist()) for one in REQUESTS}
LENGTHS = {one.id: one.max_output for one in REQUESTS}
ROWS = [REQUESTS[:4], REQUESTS[4:5], REQUESTS[5:]]

SHAPES = [name for name in FIRST_SHAPES if not name.startswith(("gpt_oss", "gemma", "mistral", "phi3", "deepseek"))]
"""Rows know no windows, no sinks, no soft caps and no latent keys."""

SLOTTED, LEFT_OVER = slotted_rows(ROWS, 65, 16)
BATCHES = {
    "padded": padded_rows(REQUESTS),
    "concatenated": concatenated_rows(ROWS),
    "slotted": SLOTTED,
    "one request": padded_rows(REQUESTS[2:3]),
}


@pytest.fixture(scope="module")
def flattened(checkpoint):
    """Checkpoint -> its model, and the tokens of REQUESTS as what serves computes them."""
    rows = {}

    def make(name):
        if name not in rows:
            worker = make_worker(checkpoint(name)[0], "reference")
            engine = Engine(OneLane(LaneSettings(mix=True, max_batch=6), Pool(64, 8)), worker)
            for one in REQUESTS:
                engine.submit(Generation(one.id, PROMPTS[one.id], one.max_output))
            outputs = {one.id: [] for one in REQUESTS}
            while (tokens := engine.step()) is not None:
                for token in tokens:
                    outputs[token.id].append(token.token)
            rows[name] = worker.model, outputs
        return rows[name]

    return make


def test_the_layouts_are_what_they_should_be():
    assert not LEFT_OVER and SLOTTED.slots_per_row == 4 and SLOTTED.most_a_slot > 1
    assert any(
        len(row) > 1 and len({p.slot for p in SLOTTED.places if p.id in {r.id for r in row}}) > 1 for row in ROWS
    )


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("layout", BATCHES)
@pytest.mark.parametrize("free_slots", [False, True])
def test_tokens_are_those_of_the_flattened_batch(flattened, name, layout, free_slots):
    model, expected = flattened(name)
    outputs = run_rows(model, BATCHES[layout], PROMPTS, LENGTHS, free_slots=free_slots)
    assert outputs == {place.id: expected[place.id] for place in BATCHES[layout].places}


@pytest.mark.parametrize("name", ["opt-tied", "t5-tied"])
def test_slots_that_have_ended_leave(flattened, name, monkeypatch):
    """Each request in a slot of its own: fewer and fewer are computed, and only where that is asked for."""
    model, _ = flattened(name)
    head, sizes = model.head, []

    def count(hidden):
        sizes.append(len(hidden))
        return head(hidden)

    monkeypatch.setattr(model, "head", count)
    monkeypatch.setattr(layouts, "LEAVING_SHARE", 0.0)
    run_rows(model, BATCHES["padded"], PROMPTS, LENGTHS)
    assert sizes == [len(REQUESTS)] * max(LENGTHS.values())
    sizes.clear()
    run_rows(model, BATCHES["padded"], PROMPTS, LENGTHS, free_slots=True)
    assert sizes == [sum(n > step for n in LENGTHS.values()) for step in range(max(LENGTHS.values()))]


@pytest.mark.parametrize("name", ["opt-tied", "t5-tied"])
@pytest.mark.parametrize("layout", ["concatenated", "slotted"])
def test_the_comparison_notices_a_dropped_mask(flattened, name, layout, monkeypatch):
    model, expected = flattened(name)
    monkeypatch.setattr(rows_module, "same_owner", lambda q, k: torch.ones(*q.shape, k.shape[1], dtype=torch.bool))
    assert run_rows(model, BATCHES[layout], PROMPTS, LENGTHS) != expected


def test_masks_in_parts_change_nothing(flattened, monkeypatch):
    model, expected = flattened("t5-tied")
    monkeypatch.setattr(row_attention, "MASK_BYTES", 1)
    assert run_rows(model, BATCHES["slotted"], PROMPTS, LENGTHS) == expected
