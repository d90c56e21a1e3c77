"""Read the predictions that `benchmarks.prediction` made on this machine before it measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.lib.aims import checked
from benchmarks.truth.sources import Figures, Row, thinned
from xgpt.core.schema import BenchReport

NAMES = {
    "throughput_rps": "throughput",
    "latency_s": "latency",
    "ttft": "TTFT",
    "itl_p99_s": "gaps p99",
    "whole_mean_s": "e2e mean",
}


def rows(folder: Path, most: int | None) -> Iterator[Row]:
    """Yield a row for each load, with predictions at the pace at which the machine ran the steps."""
    entries = [entry for path in sorted(folder.glob("prediction*.json")) for entry in json.loads(path.read_text())]
    for entry in thinned(entries, most):
        report = BenchReport.model_validate(entry["report"])
        predicted: Figures = {}
        measured: Figures = {}
        for name, figure in checked(report).items():
            error = figure.error if figure.of_model is None else figure.of_model
            measured[NAMES[name]] = figure.measured
            predicted[NAMES[name]] = figure.measured * (1 + error)
        load = "saturated" if report.arrival_rate_per_s is None else "open loop"
        yield Row("this machine", load, False, measured, predicted, f"{report.workload} {report.plan_sha256[:8]}")


def folder_of(measured: Path | None) -> Path | None:
    for folder in (measured, Path("results")):
        if folder is not None and any(folder.glob("prediction*.json")):
            return folder
    return None
