"""Make the tables of docs/results/truth.md from rows, and write them into the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import date
from itertools import product

import numpy as np

from benchmarks.lib import results
from benchmarks.truth.order import choices, ranks
from benchmarks.truth.score import coverage, table
from benchmarks.truth.sources import Row
from xgpt.deciding.verified import ENGINES, LEAST, too_few
from xprofiler.ranges import LEVELS, MODELS, Cell

QUANTITIES = ("throughput", "TPOT", "TTFT")
STEP_TIMES = {"imported": "imported tables", "analytic": "datasheets"}
COMMAND = "python -m benchmarks.truth --measured DIR --page"
BY_SHAPE = {
    "a device whose efficiency is derived from that of another": ("`like` in configs/devices", "of AMD as above"),
    "pipelines": ("more than one stage", 0),
    "drafts": ("speculative decoding", 0),
    "attention by data with shared experts": ("more parts of experts than the tensor-parallel degree", 0),
}
"""Labels that a plan's device or shape decides: the rule, and the predicted published rows."""


def write_page(rows: list[Row]) -> None:
    """Store the tables of the page, and write them into it."""
    served = [row for row in rows if row.cell is not None and row.cell.load != "disaggregated"]
    apart = [row for row in rows if row.cell is not None and row.cell.load == "disaggregated"]
    loops = [row for row in served if row.cell is not None and row.cell.load == "closed loop"]
    later = [row for row in loops if row.source.startswith("closed loops 2026, b")]
    fitted = "Engines' figures were fitted to every second source, in alphabetical order, and"
    made = {
        "unfitted": ("Closed loops to which nothing was fitted, all sources.", _medians(loops, _unfitted)),
        "later": (
            "Closed loops published with engines of late 2026: medians in percent, bias in parentheses. "
            f"{fitted} the other sources were in sight, so their medians are optimistic.",
            _medians(later, lambda row: ("fitted" if row.is_fitted else "left out",)),
        ),
        "loads": (
            "Median signed error of throughput in percent, by clients, on rows of NVIDIA's devices to which nothing "
            "was fitted (numbers of rows).",
            _loads(loops),
        ),
        "all": ("Median errors on rows to which nothing was fitted.", table(served).splitlines()),
        "disaggregated": ("Prefill and decode on separate devices.", table(apart).splitlines()),
        "choices": (
            "Of a published sweep over tensor-parallel degrees and clients, xgpt takes the setting with most output "
            "tokens a second and device within a bound on TPOT. Good: it loses at most 5% against the measured best, "
            "and its measured TPOT exceeds the bound by at most a tenth.",
            choices(rows).splitlines(),
        ),
        "ranks": (
            "Output tokens a second and device of two published settings that differ in one property only (a vendor: "
            "also in engine and degree): how often the higher one is predicted higher. The last column is a rule that "
            "predicts nothing: fewer devices, or more memory bandwidth.",
            ranks(rows).splitlines(),
        ),
        "coverage": (
            "Share of figures that lie in the ranges that all other sources give. A source is a document, or one "
            "campaign with one model, as a whole.",
            coverage(served).replace("| others |", "| NVIDIA |").splitlines(),
        ),
        "labels": (
            'Labels "not verified" that an answer may have, and the published rows behind each.',
            _labels(len(apart)),
        ),
    }
    stored = {name: _result(claim, lines) for name, (claim, lines) in made.items() if len(lines) > 2}
    results.keep("truth", stored)
    results.write("truth")


def _result(claim: str, lines: Sequence[str]) -> results.Result:
    columns, _, *cells = ([cell.strip() for cell in line.strip()[1:-1].split("|")] for line in lines)
    machine = "step times from aiconfigurator-core 0.12"
    return results.Result(claim=claim, command=COMMAND, date=date.today(), machine=machine, columns=columns, rows=cells)


def _unfitted(row: Row) -> tuple[str, ...] | None:
    return None if row.is_fitted else ()


def _medians(rows: list[Row], more: Callable[[Row], tuple[str, ...] | None]) -> list[str]:
    """Return the lines of a table with a line for each class of rows: absolute medians, and signed ones."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if (cell := row.cell) is None or not row.predicted or (last := more(row)) is None:
            continue
        if cell.vendor != "AMD" or cell.profile == "analytic":
            vendor = "AMD" if cell.vendor == "AMD" else "NVIDIA"
            found.setdefault((cell.family, vendor, STEP_TIMES[cell.profile], *last), []).append(row)
    columns = ("family", "vendor", "step times", *(("sources",) if more is not _unfitted else ()))
    lines = [
        (*key, len(each), len({row.document for row in each}), *(_median(each, name) for name in QUANTITIES))
        for key, each in sorted(found.items())
    ]
    return results.table((*columns, "rows", "documents", *QUANTITIES), lines)


def _errors(rows: Iterable[Row], name: str) -> list[float]:
    return [100 * row.errors()[name] for row in rows if name in row.predicted]


def _median(rows: list[Row], name: str) -> str:
    errors = _errors(rows, name)
    return f"{np.median(np.abs(errors)):.1f} ({np.median(errors):+.1f})" if errors else ""


def _loads(rows: list[Row]) -> list[str]:
    lines = []
    for family, profile in product(MODELS, STEP_TIMES):
        cells = []
        for level in LEVELS.values():
            errors = _errors(
                (
                    row
                    for row in rows
                    if row.cell is not None
                    and not row.is_fitted
                    and (row.cell.family, row.cell.profile, row.cell.level) == (family, profile, level)
                    and row.cell.vendor != "AMD"
                ),
                "throughput",
            )
            cells.append(f"{np.median(errors):+.1f} ({len(errors)})" if errors else "")
        lines.append((family, STEP_TIMES[profile], *cells))
    return results.table(("family", "step times", *LEVELS.values()), lines)


def _labels(num_apart: int) -> list[str]:
    found = {words: (rule, str(number)) for words, (rule, number) in BY_SHAPE.items()}
    found["prefill and decode on separate devices"] = "two lanes", f"{num_apart}, with the errors above"
    vendors = {"NVIDIA": "h200", "AMD": "mi300x"}
    for family, engine, device, profile in product(MODELS, ENGINES, vendors.values(), STEP_TIMES):
        if (few := too_few(Cell("closed loop", engine, family, device, profile, ""))) is not None:
            words, number = few
            found[words] = f"fewer than {LEAST} rows", str(number)
    return results.table(("label", "rule", "published rows"), [(words, *cells) for words, cells in found.items()])
