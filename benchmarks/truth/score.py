"""Errors of predictions, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.truth.sources import Row

HEADER = "| source | rows | quantity | median | mean | 90% | bias |\n|---|---|---|---|---|---|---|"
SIZE, MARGIN = 480, 48


def table(rows: list[Row], *, by_group: bool = False) -> str:
    """Errors in percent: median, mean and 90th percentile of their sizes, and their median with its sign."""
    lines = [HEADER]
    for source in dict.fromkeys(row.source for row in rows):
        source_rows = [row for row in rows if row.source == source]
        lines += _lines(source, source_rows)
        fitted, others = (
            [row for row in source_rows if row.is_fitted],
            [row for row in source_rows if not row.is_fitted],
        )
        if fitted and others:
            lines += [*_lines(f"{source}: fitted to", fitted), *_lines(f"{source}: verified on", others)]
        against, others = (
            [row for row in source_rows if row.contradicts],
            [row for row in source_rows if not row.contradicts],
        )
        if against and others:
            lines += [*_lines(f"{source}: faster than its kernels' tables", against)]
            lines += [*_lines(f"{source}: without these", others)]
        if by_group:
            for group in sorted({row.group for row in source_rows}):
                lines += _lines(f"{source}: {group}", [row for row in source_rows if row.group == group])
    return "\n".join(lines)


def _lines(name: str, rows: list[Row]) -> Iterator[str]:
    for quantity in dict.fromkeys(name for row in rows for name in row.predicted):
        errors = 100 * np.asarray([row.errors()[quantity] for row in rows if quantity in row.predicted])
        sizes = np.abs(errors)
        figures = (np.median(sizes), np.mean(sizes), np.quantile(sizes, 0.9))
        text = " | ".join(f"{figure:.1f}" for figure in figures)
        yield f"| {name} | {len(errors)} | {quantity} | {text} | {np.median(errors):+.1f} |"


def plot(rows: list[Row]) -> str:
    """Predicted over measured, both on a logarithmic scale, a colour for each source."""
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
