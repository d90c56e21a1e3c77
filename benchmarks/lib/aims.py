"""How near predictions are to measurements, and how near they are to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xgpt.core.schema import BenchReport

AIMS = {"throughput_rps": 5.0, "latency_s": 8.0, "ttft": 10.0, "itl_p99_s": 15.0, "whole_mean_s": 8.0}
"""Per cent within which the model's error is to lie, in the median over loads."""


class Checked(NamedTuple):
    """A figure that was measured, the prediction's error, and the one at the pace of the run's steps (the model's)."""

    measured: float
    error: float
    of_model: float | None


def checked(report: BenchReport) -> dict[str, Checked]:
    """Return what was found of each figure that there is an aim for."""
    found = {}
    for figure in report.figures:
        name = "ttft" if figure.metric in ("ttft_s", "ttft_mean_s") else figure.metric
        if name in AIMS:
            found[name] = Checked(figure.measured, figure.error, figure.error_at_pace)
    return found


def summary(rows: Sequence[Mapping[str, Checked]]) -> list[str]:
    """Return a Markdown table of errors, with the aims for the model's."""
    lines = ["| figure | aim | median error | the model's, median | the model's, worst | loads within the aim |"]
    lines.append("|---|---|---|---|---|---|")
    for name, aim in AIMS.items():
        found = [row[name] for row in rows if name in row]
        errors = [abs(one.error) for one in found]
        models = [abs(one.error if one.of_model is None else one.of_model) for one in found]
        if models:
            within = sum(100 * error <= aim for error in models)
            lines.append(
                f"| {name} | {aim:g}% | {100 * np.median(errors):.1f}% | {100 * np.median(models):.1f}% | "
                f"{100 * max(models):.1f}% | {within} of {len(models)} |"
            )
    return lines
