"""Ranges of predictions, from the errors on rows that others measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xgpt import api
from xgpt.core.schema import Plan
from xgpt.reporting.plan_text import ranges_from_rows
from xprofiler import ranges
from xprofiler.ranges import LEAST_ROWS, UNKNOWN, Cell, Likely, cell_of, likely, within

HELD = 8
"""Rows in a row that are held back together: neighbours differ in their clients only, and err alike."""


def coverage(quantity: str) -> tuple[int, int]:
    """Of rows that a range was not made from, those inside and all of them."""
    inside = total = 0
    for _, ratios in ranges._shipped()[quantity]:
        for first in (0, 1):
            held = [n for n in range(len(ratios)) if n // HELD % 2 == first]
            used = [ratios[n] for n in range(len(ratios)) if n // HELD % 2 != first]
            if len(used) >= LEAST_ROWS:
                low, high = within(used)
                inside += sum(low <= ratios[n] <= high for n in held)
                total += len(held)
    return inside, total


def test_eight_to_nineteen_of_twenty_held_rows_lie_in_their_ranges() -> None:
    counted = [coverage(quantity) for quantity in ("throughput", "TTFT", "TPOT")]
    inside, total = np.sum(counted, axis=0)
    assert total > 90 and 0.8 <= inside / total <= 0.95, counted


def test_a_cell_without_rows_borrows_and_is_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Cell("open loop", "vllm", "dense", "h100", "imported")
    ratios = np.linspace(0.9, 1.1, 2 * LEAST_ROWS).tolist()
    monkeypatch.setattr(ranges, "_shipped", lambda: {"TPOT": [(known, ratios)]})
    own, near = likely(known, "TPOT"), likely(known._replace(device="h200"), "TPOT")
    far, borrowed = (
        likely(known._replace(engine="sglang", load="offline"), "TPOT"),
        likely(known, "TPOT", borrowed=True),
    )
    assert (
        own.rows == 2 * LEAST_ROWS
        and own.shared == " of dense models on h100 in vllm under open-loop load, planned from imported tables"
    )
    for wider, narrower in ((near, own), (far, near), (borrowed, own)):
        assert wider.low < narrower.low < 1 < narrower.high < wider.high
    assert likely(known, "TTFT") == Likely(*UNKNOWN, 0, "")


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
    assert f"throughput {low:.3g} to {high:.3g} requests/s" in ranges_from_rows(plan)[0]


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
