"""Show errors of predictions as a table and as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache, partial

import numpy as np

from benchmarks.truth.sources import Row
from xprofiler.ranges import Quantity, errors_in, likely

HEADER = (
    "| load | engine | family | quantity | not fitted: rows | median | 90% | bias | fitted: rows | median | 90% |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def table(rows: list[Row]) -> str:
    """Return a table of the errors in percent of rows without fitted figures, and of rows to which figures were fitted.

    The columns are the median and 90th percentile of absolute errors, and the median of signed errors (bias).
    """
    lines, by_kind = [HEADER], {}
    for row in rows:
        by_kind.setdefault(row.kind, []).append(row)
    for kind, found in sorted(by_kind.items()):
        lines += _lines(kind, found)
    return "\n".join(lines)


def _lines(kind: tuple[str, str, str], rows: list[Row]) -> Iterator[str]:
    for quantity in dict.fromkeys(name for row in rows for name in row.predicted):
        cells = [*kind, quantity]
        for is_fitted in (False, True):
            found = [row.errors()[quantity] for row in rows if row.is_fitted is is_fitted and quantity in row.predicted]
            errors = 100 * np.asarray(found)
            figures = [f"{np.quantile(np.abs(errors), q):.1f}" for q in (0.5, 0.9)] if found else ["", ""]
            bias = [f"{np.median(errors):+.1f}" if found else ""] if not is_fitted else []
            cells += [str(len(found)), *figures, *bias]
        yield f"| {' | '.join(cells)} |"


AS_NAMED: dict[str, Quantity] = {
    "e2e mean": "throughput",
    "TTFT mean": "TTFT",
    "throughput": "throughput",
    "TTFT": "TTFT",
    "TPOT": "TPOT",
}
"""By quantity in rows: its name in ranges. Under open arrivals, a plan's rate gets the error of the time to the last
token."""


AIM, LEAST = (0.8, 0.95), 10
"""Shares of figures that ranges should contain, in classes with at least so many rows."""


def errors_of(rows: list[Row]) -> str:
    """Return the JSON of configs/errors.json: ratios of measured to predicted values, by cell, source and quantity.

    Sources to which figures were fitted count, too: an engine's figure is one for all models, so it fits none of them.
    """
    found: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        if row.cell is not None:
            for name, ratio in ratios_of(row):
                found.setdefault((*row.cell, row.document, name), []).append(round(ratio, 3))
    return "[\n" + ",\n".join(json.dumps([*key, ratios]) for key, ratios in sorted(found.items())) + "\n]\n"


def ratios_of(row: Row) -> Iterator[tuple[Quantity, float]]:
    """Yield ratios of measured to predicted figures, by their names in ranges."""
    for name, error in row.errors().items():
        if name in AS_NAMED:
            yield AS_NAMED[name], 1 + error if name == "e2e mean" else 1 / (1 + error)


def coverage(rows: list[Row]) -> tuple[str, str]:
    """Return a table of how many figures lie in the ranges that all other sources give, and a sentence on what share of
    classes chance alone would put outside the aim.
    """
    counts: dict[tuple[str, str, str, str], dict[Quantity, list[bool]]] = {}
    sources: dict[tuple[str, str, str, str], set[str]] = {}
    held = [row for row in rows if row.cell is not None and row.predicted]
    known = errors_in(errors_of(rows))
    for document in sorted({row.document for row in held}):
        others = {name: [each for each in found if each[1] != document] for name, found in known.items()}
        within = cache(partial(likely, errors=others))
        for row in (row for row in held if row.document == document):
            assert row.cell is not None
            key = row.cell.family, row.cell.vendor, row.cell.profile, row.cell.level
            sources.setdefault(key, set()).add(document)
            for quantity, ratio in ratios_of(row):
                edges = within(row.cell, quantity)
                counts.setdefault(key, {}).setdefault(quantity, []).append(edges.low <= ratio <= edges.high)
    lines = [
        "| family | vendor | step times | at once | sources | throughput | TPOT | TTFT |",
        "|---|---|---|---|---|---|---|---|",
    ]
    classes = list[tuple[float, int, int]]()
    for key, by_quantity in sorted(counts.items()):
        inside = [by_quantity.get(name, []) for name in ("throughput", "TPOT", "TTFT")]
        classes += [(float(np.mean(each)), len(each), len(sources[key])) for each in inside if len(each) >= LEAST]
        cells = [f"{100 * np.mean(each):.0f}% of {len(each)}" if each else "" for each in inside]
        lines.append(f"| {' | '.join((*key, str(len(sources[key])), *cells))} |")
    return "\n".join(lines), by_chance(classes)


def by_chance(classes: list[tuple[float, int, int]]) -> str:
    """Say how many of these shares (with their numbers of rows and sources) lie outside `AIM`, and how many would by
    chance if ranges held for exactly nine of ten figures.
    """
    from scipy.stats import binom

    low, high = AIM

    def missed(number: int) -> float:
        """Return the probability that the share of so many figures is outside, as a whole percentage."""
        inside = [k for k in range(number + 1) if low <= round(k / number, 2) <= high]
        return 1 - float(binom.pmf(inside, number, 0.9).sum())

    shares = [round(share, 2) for share, *_ in classes]
    outside = [share for share in shares if not low <= share <= high]
    rows, documents = (sum(map(missed, numbers)) for numbers in list(zip(*classes, strict=True))[1:])
    return (
        f"Of {len(classes)} shares with at least {LEAST} rows, {len(outside)} are outside {low:.0%} to {high:.0%}: "
        f"{sum(share < low for share in outside)} below, {sum(share > high for share in outside)} above. If each range "
        f"held for exactly nine of ten figures, chance would put {rows:.1f} outside if rows were independent, and "
        f"{documents:.1f} if all rows of a source lay inside or outside together."
    )
