"""Compute the errors of predictions, and compare them with the aims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xgpt.core.schema import BenchReport

AIMS = {"throughput_rps": 5.0, "latency_s": 8.0, "ttft": 10.0, "itl_p99_s": 15.0, "whole_mean_s": 8.0}
"""Aims in percent for the raw error, as the median over loads on a machine without other work."""
INSIDE = 0.9
"""Share of the measured figures that should be within their ranges."""


class Checked(NamedTuple):
    """A measured figure, the prediction's error, and the error at the pace of the run's steps (`of_model`).

    Attributes:
        width: width of the figure's range, divided by the middle, or None without a range.
        is_inside: whether the figure is within its range.
    """

    measured: float
    error: float
    of_model: float | None
    width: float | None = None
    is_inside: bool = False


def checked(report: BenchReport) -> dict[str, Checked]:
    found = {}
    for figure in report.figures:
        name = "ttft" if figure.metric in ("ttft_s", "ttft_mean_s") else figure.metric
        if name in AIMS:
            width = None
            if figure.low is not None and figure.high is not None:
                width = 2 * (figure.high - figure.low) / (figure.high + figure.low)
            found[name] = Checked(figure.measured, figure.error, figure.error_at_pace, width, not figure.is_outside)
    return found


def summary(rows: Sequence[Mapping[str, Checked]]) -> list[str]:
    """Return a Markdown table of errors over loads: raw errors, then errors at the pace of the steps."""
    lines = ["| figure | aim | raw error, median | worst | loads within the aim | at the pace, median | worst |"]
    lines[0] += " inside the range | its width, median |"
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for name, aim in AIMS.items():
        found = [row[name] for row in rows if name in row]
        if not found:
            continue
        errors = [abs(one.error) for one in found]
        models = [abs(one.error if one.of_model is None else one.of_model) for one in found]
        within = sum(100 * error <= aim for error in errors)
        cells = [name, f"{aim:g}%", *(f"{100 * value:.1f}%" for value in (np.median(errors), max(errors)))]
        cells += [f"{within} of {len(errors)}", *(f"{100 * value:.1f}%" for value in (np.median(models), max(models)))]
        widths = [one.width for one in found if one.width is not None]
        inside = sum(one.is_inside for one in found if one.width is not None)
        cells += [f"{inside} of {len(widths)}", f"{100 * np.median(widths):.0f}%"] if widths else ["-", "-"]
        lines.append(f"| {' | '.join(cells)} |")
    ranged = [one for row in rows for one in row.values() if one.width is not None]
    if ranged:
        inside = sum(one.is_inside for one in ranged)
        lines += ["", f"Of {len(ranged)} figures {inside} lie within their ranges (aim: {100 * INSIDE:.0f}%)."]
    return lines
