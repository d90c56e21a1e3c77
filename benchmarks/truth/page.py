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
        "unfitted": (
            "Closed loops to which nothing was fitted, all sources. The last column is the median of the documents' "
            "medians, for the same three quantities.",
            _medians([row for row in loops if not row.is_fitted], CLASS, _class_of),
        ),
        "documents": (
            "The rows from imported tables among these, by document.",
            _medians(
                [row for row in loops if not row.is_fitted and _class_of(row)[2] == STEP_TIMES["imported"]],
                ("family", "document"),
                lambda row: (_class_of(row)[0], row.document),
            ),
        ),
        "later": (
            "Closed loops published with engines of late 2026: medians in percent, bias in parentheses. "
            f"{fitted} the other sources were in sight, so their medians are optimistic.",
            _medians(
                later, (*CLASS, "sources"), lambda row: (*_class_of(row), "fitted" if row.is_fitted else "left out")
            ),
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


CLASS = ("family", "vendor", "step times")


def _class_of(row: Row) -> tuple[str, ...]:
    assert row.cell is not None
    return row.cell.family, "AMD" if row.cell.vendor == "AMD" else "NVIDIA", STEP_TIMES[row.cell.profile]


def _medians(rows: list[Row], columns: Sequence[str], key: Callable[[Row], tuple[str, ...]]) -> list[str]:
    """Return the lines of a table with a line for each class of rows: absolute medians, and signed ones."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.predicted:
            found.setdefault(key(row), []).append(row)
    lines, has_documents = list[tuple[object, ...]](), "document" not in columns
    for of, each in sorted(found.items()):
        documents = sorted({row.document for row in each})
        found_in = (str(len(documents)),) if has_documents else ()
        lines.append((*of, len(each), *found_in, *(_median(each, name) for name in QUANTITIES)))
        if has_documents:
            by_document = (
                [np.median(np.abs(errors)) for name in documents if (errors := _errors(each, quantity, name))]
                for quantity in QUANTITIES
            )
            lines[-1] += (", ".join(f"{np.median(found):.1f}" for found in by_document if found),)
    more = ("documents",) if has_documents else ()
    return results.table((*columns, "rows", *more, *QUANTITIES, *(("by document",) if more else ())), lines)


def _errors(rows: Iterable[Row], name: str, document: str | None = None) -> list[float]:
    return [100 * row.errors()[name] for row in rows if name in row.predicted and document in (None, row.document)]


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
