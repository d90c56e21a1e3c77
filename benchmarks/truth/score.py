"""Show errors of predictions as a table and as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np

from benchmarks.truth.sources import Row
from xprofiler.ranges import LEAST_ROWS, Quantity, errors_in, likely

HEADER = (
    "| load | engine | family | quantity | not fitted: rows | median | 90% | bias | fitted: rows | median | 90% |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def table(rows: list[Row], *, by_group: bool = False) -> str:
    """Return a table of the errors in percent of rows without fitted figures, and of rows to which figures were fitted.

    The columns are the median and 90th percentile of absolute errors, and the median of signed errors (bias).
    """
    lines, by_kind = [HEADER], {}
    for row in rows:
        by_kind.setdefault(row.kind, []).append(row)
    for kind, found in sorted(by_kind.items()):
        lines += _lines(kind, found)
        for group in sorted({row.group for row in found}) if by_group else ():
            lines += _lines((*kind[:2], group), [row for row in found if row.group == group])
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


def errors_of(rows: list[Row]) -> str:
    """Return the JSON of configs/errors.json: ratios of measured to predicted values, by cell and quantity.

    If a cell has at least `LEAST_ROWS` rows without fitted figures, only these count.
    """
    found: dict[tuple[str, ...], dict[bool, list[float]]] = {}
    for row in rows:
        for name, error in row.errors().items():
            if row.cell is not None and name in AS_NAMED:
                ratios = found.setdefault((*row.cell, AS_NAMED[name]), {True: [], False: []})
                ratio = 1 / (1 + error)
                ratios[row.is_fitted].append(round(1 / ratio if name == "e2e mean" else ratio, 3))
    kept = [
        [*key, ratios[False] if len(ratios[False]) >= LEAST_ROWS else ratios[True] + ratios[False]]
        for key, ratios in sorted(found.items())
    ]
    return "[\n" + ",\n".join(json.dumps(each) for each in kept) + "\n]\n"


def coverage(rows: list[Row], seed: int) -> str:
    """Return lines that state how many figures of a random half of the rows are within the ranges from the other half.

    Rows with the same measured figures are one measurement, and belong to the same half.
    """
    measurements: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row.cell is not None and row.predicted:
            measurements.setdefault((row.group, *sorted(row.measured.items())), []).append(row)
    order = np.random.default_rng(seed).permutation(len(measurements))
    each = list(measurements.values())
    given, held = ([row for i in half for row in each[i]] for half in np.array_split(order, 2))
    errors = errors_in(errors_of(given))
    counts: dict[tuple[str, str], list[bool]] = {}
    for row in held:
        assert row.cell is not None
        for name, error in row.errors().items():
            if name in AS_NAMED:
                quantity, ratio = AS_NAMED[name], 1 + error if name == "e2e mean" else 1 / (1 + error)
                found = likely(row.cell, quantity, errors=errors)
                lies_inside = found.low <= ratio <= found.high
                for key in (("all", "all"), ("all", quantity), (f"{row.cell.load} {row.cell.engine}", quantity)):
                    counts.setdefault(key, []).append(lies_inside)
    lines = [f"seed {seed}: {len(held)} rows held back, {len(given)} given"]
    lines += [
        f"  {' '.join(key)}: {sum(inside)} of {len(inside)}, {np.mean(inside):.0%}" for key, inside in counts.items()
    ]
    return "\n".join(lines)
