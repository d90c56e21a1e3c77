"""Compute the likely range of a predicted figure from the errors of earlier predictions of published measurements.

`configs/errors.json` contains the ratios of measured to predicted values for each quantity, source (a document, or one
campaign with one model) and cell. `python -m benchmarks.truth --errors` writes it. A figure's range comes from the
ratios of its cell, in which each source has the same weight. If the sources are too few, those of similar cells are
added, and the range is widened. docs/results/truth.md states how many figures of a source lie in the ranges that all
other sources give. `configs/beyond.json` (`--beyond`) has the errors of predictions that were fitted to another load.
"""

from __future__ import annotations

import json
from functools import cache
from math import exp, log
from typing import Literal, NamedTuple

import numpy as np

from xgpt.core.io import configs_dir
from xgpt.core.schema import ModelSpec, PlanDraft

Quantity = Literal["throughput", "TTFT", "TPOT"]
LEAST_ROWS, LEAST_SOURCES = 12, 3
INSIDE = (0.05, 0.95)
UNKNOWN = (0.5, 2.0)
"""Range if there are too few ratios, as factors on the prediction."""
SAME: tuple[tuple[tuple[str, ...], float], ...] = (
    (("load", "engine", "family", "level", "vendor", "profile"), 1.0),
    (("load", "family", "level", "vendor", "profile"), 1.0),
    (("load", "family", "vendor", "profile"), 1.15),
    (("family", "vendor", "profile"), 1.3),
    (("load", "vendor", "profile"), 1.5),
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


LEVELS = {8: "up to 8 requests", 64: "9 to 64 requests", 2**31: "over 64 requests"}
"""Classes of load, by the largest number of requests that a replica has at once."""
MODELS = {"dense": "dense models", "experts": "mixtures of experts", "hybrid": "models with recurrent layers"}


class Cell(NamedTuple):
    """A class of predictions with similar errors.

    Attributes:
        profile: source of the step times.
        level: one of `LEVELS`.
    """

    load: str
    engine: str
    family: str
    device: str
    profile: str
    level: str

    @property
    def vendor(self) -> str:
        return "AMD" if self.device.startswith("mi3") else "others"


class Likely(NamedTuple):
    """A likely range: the measured value is probably between `low` and `high` times the prediction, and in half of the
    cases below `middle` times.
    """

    low: float
    high: float
    rows: int
    shared: str
    middle: float = 1.0


def level_of(running: float) -> str:
    """Return the class of a load with this number of requests at once on a replica."""
    return next(level for most, level in LEVELS.items() if running <= most)


Errors = dict[str, list[tuple[Cell, str, list[float]]]]


@cache
def _shipped() -> Errors:
    path = configs_dir() / "errors.json"
    return errors_in(path.read_text(encoding="utf-8")) if path.is_file() else {}


def errors_in(text: str) -> Errors:
    found: Errors = {}
    for *cell, source, quantity, ratios in json.loads(text):
        found.setdefault(quantity, []).append((Cell(*cell), source, ratios))
    return found


def likely(cell: Cell, quantity: Quantity, *, borrowed: bool = False, errors: Errors | None = None) -> Likely:
    """Return the likely range of a quantity, for predictions of this cell.

    Args:
        borrowed: whether the engine's times are those of another engine or version, or step times were computed with
            another device's efficiencies. If so, the range is widened.
    """
    known = _shipped() if errors is None else errors
    for names, factor in SAME:
        same: dict[str, list[float]] = {}
        for other, source, ratios in known.get(quantity, ()):
            if all(getattr(other, name) == getattr(cell, name) for name in names):
                same.setdefault(source, []).extend(ratios)
        rows = sum(map(len, same.values()))
        if rows >= LEAST_ROWS and len(same) >= LEAST_SOURCES:
            sources = list(same.values())
            low, high = within(sources, factor * (BORROWED if borrowed else 1.0))
            return Likely(low, high, rows, _in_words(cell, names), exp(_quantiles(sources)[1]))
    return Likely(*UNKNOWN, 0, "")


@cache
def rows_of(**of_cell: str) -> int:
    """Return the number of published rows with these fields of a cell, without those on separate devices."""
    return sum(
        len(ratios)
        for cell, _, ratios in _shipped().get("throughput", ())
        if all(getattr(cell, name) == value for name, value in of_cell.items())
    )


def beyond(quantity: Quantity, times: float) -> float:
    """Return within what factor nine of ten figures lay that were predicted for a load `times` as large as the one to
    which the prediction was fitted. Between and beyond the measured ratios it follows a power law.
    """
    if times <= 1:
        return 1.0
    points = _beyond()
    x = [0.0, *(log(ratio) for ratio, _ in points)]
    y = [0.0, *(log(factors[quantity]) for _, factors in points)]
    if log(times) <= x[-1]:
        return exp(float(np.interp(log(times), x, y)))
    return exp(y[-1] * log(times) / x[-1])


@cache
def _beyond() -> list[tuple[float, dict[str, float]]]:
    return [
        (ratio, factors) for ratio, factors in json.loads((configs_dir() / "beyond.json").read_text(encoding="utf-8"))
    ]


def _in_words(cell: Cell, names: tuple[str, ...]) -> str:
    planned = {"analytic": ", planned from datasheets", "imported": ", planned from imported tables"}
    words = {
        "family": f" of {MODELS[cell.family]}",
        "vendor": f" on {cell.vendor}" if cell.vendor == "AMD" else "",
        "level": f" with {cell.level} at once",
        "engine": f" in {cell.engine}",
        "load": f" under {cell.load.replace(' ', '-')} load" if "loop" in cell.load else f" served {cell.load}",
        "profile": planned.get(cell.profile, f", planned from {cell.profile} profiles"),
    }
    return "".join(text for name, text in words.items() if name in names)


def within(sources: list[list[float]], factor: float = 1.0) -> tuple[float, float]:
    """Return a range around the median of the sources' ratios, `factor` times as wide as that between their quantiles
    `INSIDE`. With few sources, it is wider.
    """
    low, middle, high = _quantiles(sources)
    edge = log(1 + 0.5 / len(sources))  # another source may differ much more
    return exp(middle + factor * (low - middle) - edge), exp(middle + factor * (high - middle) + edge)


def _quantiles(sources: list[list[float]]) -> tuple[float, float, float]:
    """Return the logarithms of the quantiles `INSIDE` and of the median between them."""
    logs = np.log([ratio for ratios in sources for ratio in ratios])
    weights = np.concatenate([np.full(len(ratios), 1 / len(ratios)) for ratios in sources])
    order = np.argsort(logs)
    below = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    low, middle, high = np.interp((INSIDE[0], 0.5, INSIDE[1]), below, logs[order])
    return float(low), float(middle), float(high)


def family_of(model: ModelSpec) -> str:
    if any(block.recurrent is not None for block in model.blocks):
        return "hybrid"
    return "dense" if model.experts is None else "experts"


def cell_of(plan: PlanDraft) -> Cell | None:
    """Return the cell of a plan's predictions, or None if its step times were measured."""
    if plan.profile.source == "measured":
        return None
    two_lanes = len(plan.policy.lanes) > 1
    load = "disaggregated" if two_lanes else "open loop" if plan.constraint.maximises_arrivals else "closed loop"
    family = family_of(plan.model)
    framework = "xgpt" if plan.engine is None else plan.engine.framework
    level = level_of(plan.estimate.decode_batch)
    return Cell(load, framework, family, plan.cluster.device.name, plan.profile.source, level)
