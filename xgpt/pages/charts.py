"""Draw charts as SVG with matplotlib. The same input gives the same bytes.

A page embeds a chart as an image (a data URL), so a chart cannot run scripts or access the page.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

COLOURS = ("#0b5fa5", "#d1731a", "#1a7f4b", "#8a4fa8", "#b3261e", "#6b7785")
ENCODE, DECODE, BOTH = COLOURS[1], COLOURS[0], COLOURS[3]

_STYLE: dict[Any, Any] = {
    # Names in a plan are text, not formulas.
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "xgpt",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": "#1b2430",
    "xtick.color": "#1b2430",
    "ytick.color": "#1b2430",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8b96a3",
    "axes.labelcolor": "#1b2430",
    "axes.axisbelow": True,
    "grid.color": "#d9dfe6",
    "legend.frameon": False,
}


class Chart(NamedTuple):
    source: str
    alt: str
    caption: str


class Series(NamedTuple):
    name: str
    x: Sequence[float]
    y: Sequence[float]


def _draw(figure: Figure, alt: str, caption: str) -> Chart:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight", transparent=True)
    encoded = base64.b64encode(buffer.getvalue()).decode("ascii")
    return Chart(f"data:image/svg+xml;base64,{encoded}", alt, caption)


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height))
    return figure, figure.add_subplot()


def timeline(
    spans: Sequence[tuple[int, float, float, str]], rows: Sequence[str], decoding: Series, alt: str, caption: str
) -> Chart:
    """Draw the steps of each stage over time, coloured by encode (prefill) and decode. Below them, draw the number of
    requests in decode.

    Args:
        spans: for each step its row, its first and last second, and its kind.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(10, 1.6 + 0.35 * len(rows)))
        bars, batch = figure.subplots(2, 1, sharex=True, height_ratios=(0.5 + 0.35 * len(rows), 0.9))
        for kind, colour in (("encode", ENCODE), ("decode", DECODE), ("encode and decode", BOTH)):
            of_kind = [(row, start_s, end_s - start_s) for row, start_s, end_s, name in spans if name == kind]
            for row in sorted({row for row, *_ in of_kind}):
                ranges = [(start_s, seconds) for of_row, start_s, seconds in of_kind if of_row == row]
                bars.broken_barh(ranges, (row - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=0.4)
            if of_kind:
                bars.plot([], [], color=colour, linewidth=6, label=kind)
        bars.set_yticks(range(len(rows)), rows)
        bars.set_ylim(len(rows) - 0.5, -0.5)
        bars.tick_params(axis="y", length=0)
        bars.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
        batch.step(decoding.x, decoding.y, where="post", color=DECODE, linewidth=1.2)
        batch.set_ylim(bottom=0)
        batch.set_ylabel(decoding.name)
        batch.set_xlabel("seconds")
        batch.grid(axis="y")
        bars.margins(x=0)
        return _draw(figure, alt, caption)


def frontier(
    lines: Sequence[Series], chosen: tuple[float, float], bound_s: float | None, alt: str, caption: str
) -> Chart:
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(10, 4)
        for line, colour in zip(lines, COLOURS, strict=False):
            axes.step(line.x, line.y, where="post", color=colour, label=line.name, linewidth=1.6)
        axes.plot(*chosen, marker="o", color="#1b2430", markersize=7, linestyle="none", label="this plan", zorder=5)
        if bound_s is not None:
            axes.axvline(bound_s, color="#b3261e", linewidth=1.2, linestyle="--", label=f"bound {bound_s:g} s")
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("latency, s")
        axes.set_ylabel("requests/s")
        axes.grid()
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        return _draw(figure, alt, caption)


def bounded(lines: Sequence[Series], load_per_s: float | None, most_per_s: float, alt: str, caption: str) -> Chart:
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(8, 3.4)
        for line, colour in zip(lines, COLOURS, strict=False):
            axes.plot(line.x, line.y, color=colour, label=line.name, linewidth=1.6, marker="o", markersize=3)
        axes.axhline(1, color="#b3261e", linewidth=1.2, linestyle="--", label="bound")
        axes.axvline(
            most_per_s,
            color="#6b7785",
            linewidth=1.2,
            label=f"kept up to {most_per_s:.3g}/s" if most_per_s else "kept at no rate",
        )
        if load_per_s is not None:
            axes.axvline(
                load_per_s, color="#1b2430", linewidth=1.2, linestyle=":", label=f"your load {load_per_s:.3g}/s"
            )
        axes.set_ylim(0, max(1.6, *(1.3 * line.y[0] for line in lines)))
        axes.set_xlim(left=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
        axes.set_xlabel("requests/s")
        axes.set_ylabel("time, of its bound")
        axes.grid()
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
        return _draw(figure, alt, caption)


def memory(
    devices: Sequence[str], parts: dict[str, Sequence[float]], limit_gib: float, alt: str, caption: str
) -> Chart:
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(10, 0.9 + 0.3 * len(devices))
        left = [0.0] * len(devices)
        for (name, values), colour in zip(parts.items(), COLOURS, strict=False):
            axes.barh(range(len(devices)), values, left=left, color=colour, label=name, height=0.7)
            left = [a + b for a, b in zip(left, values, strict=True)]
        axes.axvline(limit_gib, color="#b3261e", linewidth=1.2, linestyle="--", label="usable")
        axes.set_yticks(range(len(devices)), devices)
        axes.set_ylim(len(devices) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(left=0)
        axes.set_xlabel("GiB")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
        return _draw(figure, alt, caption)


def histogram(edges: npt.ArrayLike, shares: npt.ArrayLike, mean: float, label: str, alt: str, caption: str) -> Chart:
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(5, 2.4)
        axes.stairs(shares, edges, fill=True, color=COLOURS[0], alpha=0.75)
        axes.axvline(mean, color="#1b2430", linewidth=1.2, label=f"mean {mean:.0f}")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
        axes.set_xlabel(label)
        axes.legend(loc="upper right")
        return _draw(figure, alt, caption)


def rounds(rates: Sequence[float], errors: Sequence[float], most_per_s: float, alt: str, caption: str) -> Chart:
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(10, 3)
        at = range(1, len(rates) + 1)
        axes.errorbar(at, rates, yerr=errors, fmt="o", color=COLOURS[0], markersize=5, capsize=3)
        axes.step(at, list(accumulate(rates, max)), where="post", color=COLOURS[0], linewidth=1.2)
        axes.axhline(most_per_s, color="#6b7785", linewidth=1.2, linestyle="--")
        axes.annotate(f"no setting exceeds {most_per_s:.3g}", (1, most_per_s), (0, 3), textcoords="offset points")
        axes.set_xticks(at)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("measurement")
        axes.set_ylabel("requests/s")
        return _draw(figure, alt, caption)


class DayChart(NamedTuple):
    hours: Sequence[float]  # the intervals' edges
    load: Sequence[float]  # requests a second
    replicas: dict[str, Sequence[int]]
    kept: Sequence[float | None]  # share of requests
    asked: float  # the share that must be kept
    costs: Sequence[float]  # in an hour
    constant_cost: float  # the constant fleet's


def day(chart: DayChart, *, alt: str, caption: str) -> Chart:
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(10, 7))
        arriving, running, keeping, costing = figure.subplots(4, 1, sharex=True)
        arriving.stairs(chart.load, chart.hours, fill=True, color=COLOURS[0], alpha=0.75)
        arriving.set_ylabel("requests/s")
        below = [0] * len(chart.load)
        for (name, counts), colour in zip(chart.replicas.items(), COLOURS * len(chart.replicas), strict=False):
            above = [a + b for a, b in zip(below, counts, strict=True)]
            running.stairs(above, chart.hours, baseline=below, fill=True, color=colour, alpha=0.75, label=name)
            below = above
        running.set_ylabel("replicas")
        running.legend(loc="upper left", ncols=6)
        kept = [float("nan") if share is None else 100 * share for share in chart.kept]
        keeping.stairs(kept, chart.hours, baseline=None, color=COLOURS[2])
        keeping.axhline(100 * chart.asked, color="#b3261e", linewidth=1.2, linestyle="--")
        keeping.set_ylabel("% kept")
        costing.stairs(chart.costs, chart.hours, fill=True, color=COLOURS[0], alpha=0.75)
        costing.axhline(chart.constant_cost, color="#1b2430", linewidth=1.2, linestyle="--")
        costing.set_ylabel("cost an hour")
        costing.set_xlabel("hours")
        for axes in (arriving, running, costing):
            axes.set_ylim(bottom=0)
        running.set_ylim(top=1.4 * max(1, *below))  # for the legend
        running.set_xlim(chart.hours[0], chart.hours[-1])
        figure.align_ylabels()
        return _draw(figure, alt, caption)
