"""Compute the likely range of a predicted figure from the errors of earlier predictions of published measurements.

`configs/errors.json` contains the ratios of measured to predicted values for each quantity and cell (load, engine,
family of models, device, source of step times). `python -m benchmarks.truth --errors` writes it. A figure's range comes
from the ratios of its cell. If these are too few, those of similar cells are added, and the range is widened.
"""

from __future__ import annotations

import json
from functools import cache
from math import exp, log
from typing import Literal, NamedTuple

import numpy as np

from xgpt.core.io import configs_dir
from xgpt.core.schema import PlanDraft

Quantity = Literal["throughput", "TTFT", "TPOT"]
LEAST_ROWS = 12
"""Least number of ratios from which a range is computed."""
INSIDE = (0.05, 0.95)
"""Quantiles of the ratios that bound a range."""
UNKNOWN = (0.5, 2.0)
"""Range if there are too few ratios, as factors on the prediction."""
SAME: tuple[tuple[tuple[str, ...], float], ...] = (
    (("load", "engine", "family", "device", "profile"), 1.0),
    (("load", "engine", "family", "profile"), 1.15),
    (("engine", "family", "profile"), 1.3),
    (("load", "engine", "profile"), 1.5),
    (("load", "family", "profile"), 1.7),
    (("family", "profile"), 2.0),
    (("family",), 2.2),
)
"""Sets of fields in which other cells must agree with the figure's cell, in the order in which they are tried, and each
set's factor on the width of the range.
"""
BORROWED = 1.25
"""Factor on the width of a range if times belong to another engine or version, or were computed with another device's
efficiencies.
"""


class Cell(NamedTuple):
    """A class of predictions with similar errors.

    Attributes:
        load: open loop, closed loop, offline or disaggregated.
        family: dense or experts.
        profile: source of step times (imported or analytic).
    """

    load: str
    engine: str
    family: str
    device: str
    profile: str


class Likely(NamedTuple):
    """A likely range: the measured value is probably between `low` and `high` times the prediction.

    Attributes:
        shared: what these measurements have in common with the prediction, such as " of dense models, planned from
            datasheets".
    """

    low: float
    high: float
    rows: int
    shared: str


Errors = dict[str, list[tuple[Cell, list[float]]]]
"""Ratios of measured to predicted values by quantity and cell."""


@cache
def _shipped() -> Errors:
    path = configs_dir() / "errors.json"
    return errors_in(path.read_text(encoding="utf-8")) if path.is_file() else {}


def errors_in(text: str) -> Errors:
    """Parse the text of an errors.json."""
    found: Errors = {}
    for *cell, quantity, ratios in json.loads(text):
        found.setdefault(quantity, []).append((Cell(*cell), ratios))
    return found


def likely(cell: Cell, quantity: Quantity, *, borrowed: bool = False, errors: Errors | None = None) -> Likely:
    """Return the likely range of a quantity, for predictions of this cell.

    Args:
        borrowed: whether the engine's times are those of another engine or version, or step times were computed with
            another device's efficiencies. If so, the range is widened.
        errors: known ratios. None means those in `configs/errors.json`.
    """
    known = _shipped() if errors is None else errors
    for names, factor in SAME:
        same = [
            ratios
            for other, ratios in known.get(quantity, ())
            if all(getattr(other, name) == getattr(cell, name) for name in names)
        ]
        ratios = [ratio for each in same for ratio in each]
        if len(ratios) >= LEAST_ROWS:
            low, high = within(ratios, factor * (BORROWED if borrowed else 1.0))
            return Likely(low, high, len(ratios), _in_words(cell, names))
    return Likely(*UNKNOWN, 0, "")


def _in_words(cell: Cell, names: tuple[str, ...]) -> str:
    planned = {"analytic": ", planned from datasheets", "imported": ", planned from imported tables"}
    words = {
        "family": f" of {'dense models' if cell.family == 'dense' else 'mixtures of experts'}",
        "device": f" on {cell.device}",
        "engine": f" in {cell.engine}",
        "load": f" under {cell.load.replace(' ', '-')} load" if "loop" in cell.load else f" served {cell.load}",
        "profile": planned.get(cell.profile, f", planned from {cell.profile} profiles"),
    }
    return "".join(text for name, text in words.items() if name in names)


def within(ratios: list[float], factor: float = 1.0) -> tuple[float, float]:
    """Return a range around the median of the ratios, `factor` times as wide as that between their quantiles `INSIDE`.
    With few ratios, it is wider.
    """
    logs = np.log(ratios)
    middle = float(np.median(logs))
    low, high = (middle + factor * (float(np.quantile(logs, q)) - middle) for q in INSIDE)
    edge = log(1 + 0.5 / len(ratios))  # with few ratios, others may differ much more
    return exp(low - edge), exp(high + edge)


def cell_of(plan: PlanDraft) -> Cell | None:
    """Return the cell of a plan's predictions, or None if its step times were measured."""
    if plan.profile.source == "measured":
        return None
    two_lanes = len(plan.policy.lanes) > 1
    load = "disaggregated" if two_lanes else "open loop" if plan.constraint.maximises_arrivals else "closed loop"
    family = "dense" if plan.model.experts is None else "experts"
    framework = "xgpt" if plan.engine is None else plan.engine.framework
    return Cell(load, framework, family, plan.cluster.device.name, plan.profile.source)
