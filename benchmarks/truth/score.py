"""Show errors of predictions as a table and as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np

from benchmarks.truth.sources import Row
from xprofiler.ranges import LEAST_ROWS, Quantity, errors_in, likely

SIZE, MARGIN = 480, 48
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


def plot(rows: list[Row]) -> str:
    points = [
        (row.source, quantity, row.measured[quantity], value)
        for row in rows
        for quantity, value in row.predicted.items()
        if quantity.startswith(("e2e", "TTFT", "TPOT"))
    ]
    values = np.log10([value for *_, a, b in points for value in (a, b)])
    low, high = float(np.floor(values.min())), float(np.ceil(values.max()))
    scale = (SIZE - 2 * MARGIN) / (high - low)
    colours = dict(zip(dict.fromkeys(p[0] for p in points), ("#4269d0", "#efb118", "#ff725c", "#6cc5b0"), strict=False))

    def at(value: float) -> float:
        return MARGIN + (float(np.log10(value)) - low) * scale

    marks = [
        f'<circle cx="{at(measured):.1f}" cy="{SIZE - at(predicted):.1f}" r="2" fill="{colours[source]}" '
        f'fill-opacity="0.5"/>'
        for source, _, measured, predicted in points
    ]
    ticks = [
        f'<text x="{at(10.0**e):.0f}" y="{SIZE - MARGIN + 16}" text-anchor="middle">{10.0**e:g} s</text>'
        f'<text x="{MARGIN - 6}" y="{SIZE - at(10.0**e) + 4:.0f}" text-anchor="end">{10.0**e:g}</text>'
        for e in range(int(low), int(high) + 1)
    ]
    names = [
        f'<circle cx="{MARGIN + 12}" cy="{MARGIN + 14 + 16 * i}" r="4" fill="{colour}"/>'
        f'<text x="{MARGIN + 22}" y="{MARGIN + 18 + 16 * i}">{source}</text>'
        for i, (source, colour) in enumerate(colours.items())
    ]
    edge = SIZE - MARGIN
    lines = [
        f'<line x1="{at(10**low):.0f}" y1="{SIZE - at(10**low):.0f}" x2="{at(10**high):.0f}" '
        f'y2="{SIZE - at(10**high):.0f}" stroke="#888"/>',
        f'<rect x="{MARGIN}" y="{MARGIN}" width="{edge - MARGIN}" height="{edge - MARGIN}" fill="none" stroke="#888"/>',
        f'<text x="{SIZE / 2}" y="{SIZE - 8}" text-anchor="middle">measured</text>',
        f'<text x="{MARGIN}" y="{MARGIN - 10}">predicted, s</text>',
    ]
    body = "\n".join([*lines, *marks, *ticks, *names])
    page = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE}" font-family="sans-serif"'
    return f'{page} font-size="11">\n{body}\n</svg>\n'
