"""Yield rows of clients in a closed loop from labs' and vendors' pages of 2025 and 2026 (`closed_loops_2026*.csv`).

Figures may be fitted to every second row of a model, format and engine of the first file, and to every second source,
in alphabetical order, of the second one (`_b`). The other rows verify. Lengths of which only the mean is published are
drawn: `sharegpt` lognormal with that data set's deviation, `uniform` from 1 to twice the mean, as in SGLang's
benchmark, `ix` within 11% of the mean. Their means are then made exact.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from benchmarks.truth.loads import Served, closed_loop, needs
from benchmarks.truth.sources import Figures, Row, Setting, cell_of, predicted, read, skew_of
from xprofiler.ranges import family_of

WIDTHS = {"isl": 1.3, "osl": 1.0}
"""Standard deviations of the logarithm of ShareGPT's lengths."""
LONGEST = 1024
SPREADS = {"uniform": 1.0, "ix": 1 / 9}
"""Half the width of a uniform distribution of lengths, as a share of the mean."""


WARMED = ("sgl-cookbook", "SGLang PR", "tt-inference-server", "vLLM")
"""Documents whose tools (vLLM's and SGLang's benchmarks) send the first prompt once before they measure. The
engines cache prefixes by default.
"""
OTHER_KERNELS = {"sgl-cookbook GLM-4.7-Flash": "its command has --attention-backend triton, which has no step times"}
TEXT: dict[str, dict[str, float]] = {
    "cook:Gemma4:635": {"isl": 610.1, "rps": 10 / 53.05, "ttft": 0.07277, "tpot": 0.01232},
    "cook:Gemma4:678": {"isl": 512.842, "rps": 1000 / 182.0, "ttft": 0.32467, "tpot": 0.03395},
    "cook:Gemma4:730": {"isl": 610.1, "rps": 10 / 25.0, "ttft": 0.10374, "tpot": 0.0056},
    "cook:Gemma4:773": {"isl": 512.842, "rps": 1000 / 138.98, "ttft": 0.15377, "tpot": 0.02595},
}
"""Figures of text alone, for rows that have those of prompts with an image, which are not predicted (from the same
document: sgl-cookbook at 7b5bd9c, Apache-2.0).
"""
WITH_STATES = (("schedules_ahead", False), ("state_copies", 3))
"""SGLang 0.5.4 to 0.5.10 turns its overlap schedule off for recurrent layers unless --disable-radix-cache or
--mamba-scheduler-strategy extra_buffer is given (server_args.py), and a request takes three states.
"""
COLUMNS = {"throughput": "rps", "TPOT": "tpot", "TTFT": "ttft"}


def rows(path: Path, *, is_imported: bool = True) -> Iterator[Row]:
    seen: Counter[tuple[str, ...]] = Counter()
    raws = [raw | {name: str(value) for name, value in TEXT.get(raw["id"], {}).items()} for raw in read(path)]
    is_given = {}
    sources = sorted({raw["source"] for raw in raws})
    for raw in raws:
        key = raw["model"], raw["stored"], raw["engine"]
        is_given[raw["id"]] = (sources.index(raw["source"]) if path.stem.endswith("_b") else seen[key]) % 2 == 0
        seen[key] += 1
    name = f"closed loops 2026{', b' if path.stem.endswith('_b') else ''}"
    for raw in raws:
        measured = {name: float(raw[column]) for name, column in COLUMNS.items() if raw[column]}
        group = f"{raw['model']} {raw['stored'] or raw['dtype']} {raw['cluster']} {raw['engine']}"
        skip = raw["skip"] or OTHER_KERNELS.get(raw["source"], "")
        row = Row(name, group, is_given[raw["id"]], measured, note=raw["id"], why_not=skip)
        if not skip:
            served = _served(raw, is_imported=is_imported)
            found, why_not = predicted(partial(_predict, served, raw))
            cell = cell_of(served, "closed loop", int(raw["clients"]))
            lengths = (round(float(raw[column])) for column in WIDTHS)
            sizes = (int(raw[column]) for column in ("clients", "tp", "ep"))
            setting = Setting(raw["model"], raw["stored"] or raw["dtype"], *lengths, *sizes)
            row = replace(row, predicted=found, why_not=why_not, cell=cell, document=raw["source"], setting=setting)
        yield row


def _served(raw: dict[str, str], *, is_imported: bool) -> Served:
    served = Served(
        raw["model"],
        raw["cluster"],
        cast(Any, raw["dtype"]),
        int(raw["tp"]),
        raw["engine"],
        int(raw["seqs"]),
        int(raw["budget"]),
        imported=is_imported,
        changes=tuple(json.loads(raw["changes"]).items()),
        ep=int(raw["ep"]),
        stored=cast(Any, raw["stored"] or None),
        kv_dtype=cast(Any, raw["kv"] or None),
        skew=skew_of(raw["model"]),
    )
    if served.spec.framework == "sglang" and family_of(served.model_spec) == "hybrid":
        return replace(served, changes=(*served.changes, *WITH_STATES))
    return served


def _predict(served: Served, raw: dict[str, str]) -> Figures:
    inputs, outputs = (_lengths(raw, name, np.random.default_rng(i)) for i, name in enumerate(WIDTHS))
    needs(served, max(inputs) + max(outputs))
    is_warm = raw["source"].startswith(WARMED)
    cached = [inputs[0] - 1, *[0] * (len(inputs) - 1)] if is_warm else ()
    times, end_s = closed_loop(served, int(raw["clients"]), inputs, outputs, cached)
    found = {
        "throughput": len(inputs) / end_s,
        "TPOT": float(np.mean(times.tpot_s)),
        "TTFT": float(np.mean(times.ttft_s)),
    }
    return {name: found[name] for name, column in COLUMNS.items() if raw[column]}


def _lengths(raw: dict[str, str], name: str, rng: np.random.Generator) -> list[int]:
    mean, count = float(raw[name]), int(raw["num"])
    if raw["lengths"] == "equal" or mean <= 4:
        return [round(mean)] * count
    if raw["lengths"] in SPREADS:
        spread = SPREADS[raw["lengths"]]
        return _of_mean(rng.uniform(1 - spread, 1 + spread, count), mean)
    drawn = rng.lognormal(0.0, WIDTHS[name], 20 * count)
    scale = mean
    for _ in range(20):  # shortening the longest lengths is compensated in all others
        scale *= mean / float(np.clip(scale * drawn, 4, LONGEST).mean())
    return cast(list[int], np.clip(scale * drawn[:count], 4, LONGEST).astype(int).tolist())


def _of_mean(shape: npt.NDArray[np.float64], mean: float) -> list[int]:
    """Return whole lengths in proportion to `shape`, at least 1, whose sum is the nearest one to `mean` each."""
    ends = np.rint(np.cumsum(shape) * mean * len(shape) / shape.sum())
    return cast(list[int], np.maximum(1, np.diff(ends, prepend=0.0)).astype(int).tolist())
