"""Yield rows of clients in a closed loop from labs' and vendors' pages of 2025 and 2026 (`closed_loops_2026.csv`).

Figures may be fitted to every second row of a model, format and engine. The other rows verify. For `sharegpt`, only
mean lengths are published. Lengths are assumed to be lognormal with that data set's deviation. `uniform` lengths are
from 1 to twice the mean, as in SGLang's benchmark.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.truth.loads import Served, closed_loop, needs
from benchmarks.truth.sources import Figures, Row, cell_of, predicted, read, skew_of, thinned

WIDTHS = {"isl": 1.3, "osl": 1.0}
"""Standard deviations of the logarithm of ShareGPT's lengths."""
LONGEST = 1024


def rows(path: Path, most: int | None) -> Iterator[Row]:
    seen: Counter[tuple[str, ...]] = Counter()
    raws = read(path)
    is_given = {}
    for raw in raws:
        key = raw["model"], raw["stored"], raw["engine"]
        is_given[raw["id"]] = seen[key] % 2 == 0
        seen[key] += 1
    for raw in thinned(raws, most):
        measured = {"throughput": float(raw["rps"]), "TPOT": float(raw["tpot"]), "TTFT": float(raw["ttft"])}
        served = _served(raw)
        found, why_not = ({}, raw["skip"]) if raw["skip"] else predicted(partial(_predict, served, raw))
        group = f"{raw['model']} {raw['stored'] or raw['dtype']} {raw['cluster']} {raw['engine']}"
        cell = cell_of(served, "closed loop")
        yield Row("closed loops 2026", group, is_given[raw["id"]], measured, found, raw["id"], why_not, cell)


def _served(raw: dict[str, str]) -> Served:
    return Served(
        raw["model"],
        raw["cluster"],
        cast(Any, raw["dtype"]),
        int(raw["tp"]),
        raw["engine"],
        int(raw["seqs"]),
        int(raw["budget"]),
        changes=tuple(json.loads(raw["changes"]).items()),
        ep=int(raw["ep"]),
        stored=cast(Any, raw["stored"] or None),
        skew=skew_of(raw["model"]),
    )


def _predict(served: Served, raw: dict[str, str]) -> Figures:
    inputs, outputs = (_lengths(raw, name, np.random.default_rng(i)) for i, name in enumerate(WIDTHS))
    needs(served, max(inputs) + max(outputs))
    times = closed_loop(served, int(raw["clients"]), inputs, outputs)
    return {
        "throughput": len(inputs) / float(times.end_s.max()),
        "TPOT": float(np.mean(times.gap_s)),
        "TTFT": float(np.mean(times.first_s)),
    }


def _lengths(raw: dict[str, str], name: str, rng: np.random.Generator) -> list[int]:
    mean, count = float(raw[name]), int(raw["num"])
    if raw["lengths"] == "equal" or mean <= 4:
        return [round(mean)] * count
    if raw["lengths"] == "uniform":
        return cast(list[int], rng.integers(1, round(2 * mean), count, endpoint=True).tolist())
    drawn = rng.lognormal(0.0, WIDTHS[name], 20 * count)
    scale = mean
    for _ in range(20):  # shortening the longest lengths is compensated in all others
        scale *= mean / float(np.clip(scale * drawn, 4, LONGEST).mean())
    return cast(list[int], np.clip(scale * drawn[:count], 4, LONGEST).astype(int).tolist())
