"""Ranges of predictions, from the errors on rows that others measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xgpt import api
from xgpt.core.schema import Plan
from xgpt.reporting.plan_text import ranges_in_words
from xprofiler import ranges
from xprofiler.ranges import LEAST_ROWS, LEVELS, MODELS, UNKNOWN, Cell, Likely, cell_of, likely, within


def coverage(family: str, level: str) -> tuple[int, int]:
    """Of figures of NVIDIA's devices from imported tables, those in the range that all other sources give, and all."""
    inside = total = 0
    for quantity, found in ranges._shipped().items():
        for cell, source, ratios in found:
            if (cell.family, cell.vendor, cell.profile, cell.level) != (family, "others", "imported", level):
                continue
            others = {quantity: [each for each in found if each[1] != source]}
            edges = likely(cell, quantity, errors=others)
            inside += sum(edges.low <= ratio <= edges.high for ratio in ratios)
            total += len(ratios)
    return inside, total


@pytest.mark.parametrize("level", LEVELS.values())
@pytest.mark.parametrize("family", MODELS)
def test_figures_of_a_source_that_was_left_out_lie_in_their_ranges(family: str, level: str) -> None:
    """Of hybrids, one source has most rows. Without it, the ranges are those of all models."""
    inside, total = coverage(family, level)
    assert total >= 60 and 0.8 <= inside / total <= (1 if family == "hybrid" else 0.97), (inside, total)


def test_a_cell_without_rows_borrows_and_is_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Cell("open loop", "vllm", "dense", "h100", "imported", LEVELS[8])
    ratios = np.linspace(0.9, 1.1, LEAST_ROWS).tolist()
    monkeypatch.setattr(ranges, "_shipped", lambda: {"TPOT": [(known, name, ratios) for name in "abc"]})
    own, far = likely(known, "TPOT"), likely(known._replace(engine="sglang", load="offline"), "TPOT")
    borrowed = likely(known, "TPOT", borrowed=True)
    assert (
        own.rows == 3 * LEAST_ROWS
        and own.shared
        == " of dense models with up to 8 requests at once in vllm under open-loop load, planned from imported tables"
    )
    for wider, narrower in ((far, own), (borrowed, own)):
        assert wider.low < narrower.low < 1 < narrower.high < wider.high
    assert likely(known, "TTFT") == Likely(*UNKNOWN, 0, "")


def test_one_large_source_does_not_decide_a_range() -> None:
    """A hundred figures of one deployment say little about the next one."""
    one, others = [1.0] * 100, [[0.6] * 4, [1.5] * 4]
    low, high = within([one, *others])
    assert low < 0.6 and high > 1.5


def test_ranges_of_another_vendor_are_its_own() -> None:
    cell = Cell("closed loop", "sglang", "experts", "mi300x", "analytic", LEVELS[64])
    assert " on AMD" in likely(cell, "throughput").shared


def test_a_plan_states_the_ranges_of_its_figures_and_the_rows_behind_them() -> None:
    """A reader of plan.json has what the command line prints."""
    asked: dict[str, Any] = {"model": "llama-3.1-8b", "cluster": "h100x1", "workload": "orca", "policy": "chunked"}
    made = api.plan(**asked, latency_bound_s=60, objective="saturated", engine="vllm")
    plan = Plan.model_validate_json(made.model_dump_json())
    cell = cell_of(plan)
    assert cell is not None
    own = likely(cell, "throughput", borrowed=True)
    low, high = plan.estimate.ranges["throughput_rps"]
    assert (low, high) == pytest.approx([edge * plan.estimate.throughput_rps for edge in (own.low, own.high)])
    assert plan.estimate.ranges_from["throughput_rps"].startswith(f"from {own.rows} measurements of dense models")
    assert f"throughput {low:.3g} to {high:.3g} requests/s" in ranges_in_words(plan)[0]
    wide = plan.with_estimate(ranges=plan.estimate.ranges | {"ttft_s": (0.0028, 294.0)})
    assert "first token too uncertain for a range (from " in ranges_in_words(wide)[0], "no reader can use it"


@pytest.mark.parametrize(("cluster", "like"), [("gh200-96gb-x1", "h100-80gb-hbm3"), ("h100x1", None)])
def test_efficiencies_of_a_similar_device_are_said_and_widen_the_ranges(cluster: str, like: str | None) -> None:
    asked: dict[str, Any] = {"model": "llama-3.1-8b", "cluster": cluster, "workload": "orca", "policy": "orca"}
    plan = api.plan(**asked, latency_bound_s=60, objective="saturated")
    warned = f"the `efficiency` of gh200-96gb was fitted on {like}: measure a profile for closer step times"
    assert (warned in plan.estimate.warnings) == (like is not None)
    cell = cell_of(plan)
    assert cell is not None
    own = likely(cell, "throughput", borrowed=like is not None)
    edges = plan.estimate.ranges["throughput_rps"]
    assert edges == pytest.approx([edge * plan.estimate.throughput_rps for edge in (own.low, own.high)])
