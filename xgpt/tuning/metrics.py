"""Read the /metrics of vLLM, SGLang, Dynamo and xgpt: counts of requests, histograms of their lengths and times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from prometheus_client.samples import Sample

from xgpt.connection import own_api_key
from xgpt.core.io import configs_dir, load_yaml
from xgpt.metrics_pages import read_samples

Array = npt.NDArray[np.float64]
TIMEOUT_S = 5.0
NAMES: Mapping[str, Mapping[str, list[str]]] = load_yaml(configs_dir() / "metrics.yaml", "metrics")
"""Names of histograms, counters and gauges, by what they state. The first one that a page has is read."""


class Buckets(NamedTuple):
    """A histogram: number of values up to each edge, beyond the edge before it, and the sum of all values.

    Attributes:
        edges: rising; the last one is infinite. # [buckets]
        counts: # [buckets]
    """

    edges: Array
    counts: Array
    total: float

    @property
    def size(self) -> float:
        return float(self.counts.sum())

    @property
    def mean(self) -> float | None:
        return self.total / self.size if self.size else None

    def less(self, before: Buckets | None) -> Buckets:
        if before is None or len(before.edges) != len(self.edges) or self.size < before.size:
            return self
        return Buckets(self.edges, np.maximum(self.counts - before.counts, 0.0), self.total - before.total)

    def plus(self, other: Buckets) -> Buckets:
        return Buckets(self.edges, self.counts + other.counts, self.total + other.total)


class Page(NamedTuple):
    histograms: Mapping[str, Buckets]
    counters: Mapping[str, float]
    gauges: Mapping[str, float]
    model: str = ""

    @property
    def outstanding(self) -> float:
        return sum(self.gauges.values())

    def since(self, before: Page) -> Page:
        """Return what was added since an earlier page of the same engine. If the engine has restarted, this is all."""
        restarted = any(value < before.counters.get(name, 0.0) for name, value in self.counters.items())
        if restarted:
            return self
        histograms = {name: each.less(before.histograms.get(name)) for name, each in self.histograms.items()}
        counters = {name: value - before.counters.get(name, 0.0) for name, value in self.counters.items()}
        return self._replace(histograms=histograms, counters=counters)


KNOWN = [name for names in NAMES.values() for each in names.values() for name in each]


def page_of(samples: Iterable[Sample]) -> Page | None:
    """Return the page that has these samples, or None if it is of no engine that is known.

    Series of several engines or ranks on one page are added.
    """
    found: dict[str, dict[float, float]] = {}
    sums: dict[str, float] = {}
    values: dict[str, float] = {}
    model = ""
    for sample in samples:
        name, value = sample.name, sample.value
        if not math.isfinite(value):
            continue
        model = model or sample.labels.get("model_name", sample.labels.get("model", ""))
        if name.endswith("_bucket") and "le" in sample.labels:
            each = found.setdefault(name.removesuffix("_bucket"), {})
            edge = float(sample.labels["le"])
            each[edge] = each.get(edge, 0.0) + value
        elif name.endswith("_sum"):
            sums[name.removesuffix("_sum")] = sums.get(name.removesuffix("_sum"), 0.0) + value
        else:
            values[name] = values.get(name, 0.0) + value
    histograms = {
        key: _buckets(found[name], sums.get(name, 0.0)) for key, name in _first(NAMES["histograms"], found).items()
    }
    counters = {key: values[name] for key, name in _first(NAMES["counters"], values).items()}
    gauges = {key: values[name] for key, name in _first(NAMES["gauges"], values).items()}
    if not histograms and not gauges:
        return None
    return Page(histograms, counters, gauges, model)


def _first(names: Mapping[str, list[str]], found: Mapping[str, object]) -> dict[str, str]:
    chosen = {key: next((name for name in each if name in found), None) for key, each in names.items()}
    return {key: name for key, name in chosen.items() if name is not None}


def _buckets(cumulative: Mapping[float, float], total: float) -> Buckets:
    edges = sorted(cumulative)
    counts = np.diff([cumulative[edge] for edge in edges], prepend=0.0)
    return Buckets(np.asarray(edges), np.maximum(counts, 0.0), total)


def read_page(url: str) -> Page | None:
    samples = read_samples(url, KNOWN, TIMEOUT_S, own_api_key())
    return None if samples is None else page_of(samples)
