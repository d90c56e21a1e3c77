"""Read histograms of lengths: Prometheus metrics pages, and answers to queries for these metrics."""

from __future__ import annotations

import logging
import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np

from xgpt.core.documents import read_json
from xgpt.core.errors import InputError
from xgpt.core.schema.workload import Histogram, Workload
from xgpt.core.trace_files import names, text_of

logger = logging.getLogger(__name__)

POINTS = 8


def read_metrics(path: Path, name: str, field: str) -> Workload:
    """Return the length histograms of a metrics page, or of a query for these metrics over time, which states how the
    counts have grown. Lengths are spread evenly over each bucket.
    """
    text = text_of(path, field)
    if text.lstrip()[:1] == "{":
        text = _grown(path, field, text)
    try:
        histograms = {role: _buckets(text, known) for role, known in names().histograms.items()}
        spread = {role: _spread(buckets) for role, (buckets, _) in histograms.items() if any(buckets.values())}
    except (ValueError, OverflowError):
        accepted = "its histograms of lengths must have finite counts that do not fall below zero: fetch the page again"
        raise InputError(field, str(path), accepted) from None
    for role in histograms:
        if role not in spread:
            accepted = (
                f"no request is counted in a histogram of {role} lengths, such as vllm:{names().histograms[role][0]}: "
                "give the metrics page of a server that has answered requests"
            )
            raise InputError(field, str(path), accepted)
    for role, histogram in spread.items():
        mean = histograms[role][1]
        logger.warning(
            "%s: %s lengths are spread evenly over each bucket, which gives a mean of %.0f tokens%s; the correlation "
            "of inputs and outputs is not known",
            path.name, role, histogram.mean, "" if mean is None else f" (the page's own sum gives {mean:.0f})",
        )  # fmt: skip
    return Workload(name=name, input=spread["input"], output=spread["output"])


def _grown(path: Path, field: str, text: str) -> str:
    """Return the answer to a Prometheus query as a metrics page: the growth of each counter over the query's time, or
    its value if the query is for one moment.
    """
    page = []
    try:
        for series in read_json(text)["data"]["result"]:
            labels = dict(series["metric"])
            values = [float(value) for _, value in series.get("values", [series["value"]] if "value" in series else [])]
            # A counter begins anew from zero when its process restarts.
            steps = [max(after - before, 0.0) if after >= before else after for before, after in pairwise(values)]
            grown = sum(steps) if len(values) > 1 else values[0]
            name = labels.pop("__name__")
            written = [f'{key}="{value}"' for key, value in labels.items()]
            page.append(f"{name}{{{','.join(written)}}} {grown}")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        accepted = "give the answer to a query for the buckets of lengths, such as vllm:request_prompt_tokens_bucket"
        raise InputError(field, str(path), accepted) from None
    return "\n".join(page)


def _buckets(text: str, names: tuple[str, ...]) -> tuple[dict[float, float], float | None]:
    counts: dict[float, float] = {}
    totals = {"sum": 0.0, "count": 0.0}
    for name, kind, labels, value in re.findall(
        r"^(?:\w+:)?(\w+?)_(bucket|sum|count)(?:\{(.*?)\})?\s+([-+.\w]+)", text, flags=re.MULTILINE
    ):
        if name not in names:
            continue
        if kind in totals:
            totals[kind] += float(value)
        elif (limit := re.search(r'le="([^"]+)"', labels)) is not None:
            counts[float(limit[1])] = counts.get(float(limit[1]), 0.0) + float(value)
    return counts, totals["sum"] / totals["count"] if totals["count"] else None


def _spread(buckets: dict[float, float]) -> Histogram:
    """Return lengths spread evenly over these buckets (cumulative counts by upper limit). Lengths above the last finite
    limit count as this limit.
    """
    below, low = 0.0, 0
    weights: dict[int, float] = {}
    for limit, count in sorted(buckets.items()):
        high = int(min(limit, 2**31 - 1)) if math.isfinite(limit) else low
        if count > below and high:
            points = np.unique(np.linspace(min(low + 1, high), high, POINTS).round().astype(int)).tolist()
            for point in points:
                weights[point] = weights.get(point, 0.0) + (count - below) / len(points)
        below, low = max(below, count), high
    lengths = sorted(weights)
    total = sum(weights.values())
    return Histogram(lengths=tuple(lengths), probabilities=tuple(weights[length] / total for length in lengths))
