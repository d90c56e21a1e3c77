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
APART = {
    "disaggregated": ("prefill and decode on separate devices", "two lanes"),
    "attention by data": (
        "attention by data with shared experts",
        "more parts of experts than the tensor-parallel degree",
    ),
}
"""By load: the label and its rule."""
BY_SHAPE = {
    "a device whose efficiency is derived from that of another": ("`like` in configs/devices", "of AMD as above"),
    "pipelines": ("more than one stage", 0),
    "drafts": ("speculative decoding", 0),
}
"""Labels that a plan's device or shape decides: the rule, and the predicted published rows."""


CAUSES = {
    "cook:DeepSeek-R1:421": "TTFT explained: median 132 ms, mean 274, 99% 840: prompts that start together wait for "
    "kernels that are not loaded yet",
    "cook:DeepSeek-R1:743": "TTFT explained: median 190 ms, mean 487, as above",
    "cook:GLM-4.6": "explained in part: no table has its experts. SGLang 0.5.6 runs them with Triton's kernel; from "
    "that kernel's nearest shape, throughput is 16 to 37% too high",
    "cook:Gemma4:730": "TTFT explained: median 47 ms, mean 104 of ten requests",
    "cook:Nemotron3-Nano:239": "inconsistent source: of 2,116,125 tokens counted, 1,076,256 remain if the text is "
    "tokenised again; a stall of 5.4 s; no table has experts in FP8, nor Mamba-2",
    "cook:Nemotron3-Nano:308": "TTFT explained: median 93 ms, mean 212; a stall of 5.2 s",
    "340:qwen3-30b-a3b": "inconsistent source: TTFT of 4,096 tokens (75 ms, two requests) is below that of 2,048 (81); "
    "TPOT unexplained (vLLM 0.10, tables of 0.14)",
    "340:qwen3-1.7b": "TTFT unexplained: four requests, host not stated",
}
"""What explains errors of left-out rows, by the start of their names. Medians are those of the same document."""


def write_page(rows: list[Row]) -> None:
    """Store the tables of the page, and write them into it."""
    apart = [row for row in rows if row.cell is not None and row.cell.load in APART]
    served = [row for row in rows if row.cell is not None and row.cell.load not in APART]
    loops = [row for row in served if row.cell is not None and row.cell.load == "closed loop"]
    later = [row for row in loops if row.source.startswith("closed loops 2026, b")]
    fitted = "Engines' figures were fitted to every second source, in alphabetical order, and"
    covered, by_chance = coverage(served)
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
        "each": (
            "Left-out rows from imported tables, one by one: signed errors in percent. Little's law: the measured rate "
            "times the measured time of a request, divided by the clients; below 1, since clients idle at the end.",
            _each([row for row in later if not row.is_fitted and _class_of(row)[2] == STEP_TIMES["imported"]]),
        ),
        "loads": (
            "Median signed error of throughput in percent, by clients, on rows of NVIDIA's devices to which nothing "
            "was fitted (numbers of rows).",
            _loads(loops),
        ),
        "all": ("Median errors on rows to which nothing was fitted.", table(served).splitlines()),
        "disaggregated": (
            "Prefill and decode on separate devices, and attention by data with shared experts.",
            table(apart).splitlines(),
        ),
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
            f"campaign with one model, as a whole. {by_chance}",
            covered.replace("| others |", "| NVIDIA |").splitlines(),
        ),
        "labels": (
            'Labels "not verified" that an answer may have, and the published rows behind each.',
            _labels(apart),
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


def _each(rows: list[Row]) -> list[str]:
    lines = []
    for row in rows:
        if row.predicted and (of := row.setting) is not None:
            errors, measured = row.errors(), row.measured
            cells = [f"{100 * errors[name]:+.0f}" if name in errors else "" for name in QUANTITIES]
            whole_s = measured.get("TTFT", np.nan) + (of.output - 1) * measured.get("TPOT", np.nan)
            law = measured["throughput"] * whole_s / of.clients
            load = f"{of.clients} x {of.prompt}/{of.output}"
            cause = next((text for start, text in CAUSES.items() if row.note.startswith(start)), "")
            lines.append((row.note, load, *cells, "" if np.isnan(law) else f"{law:.2f}", cause))
    return results.table(("row", "clients, lengths", *QUANTITIES, "Little's law", "what explains it"), lines)


def _labels(apart: list[Row]) -> list[str]:
    found = {words: (rule, str(number)) for words, (rule, number) in BY_SHAPE.items()}
    for load, (words, rule) in APART.items():
        number = sum(row.cell is not None and row.cell.load == load for row in apart)
        found[words] = rule, f"{number}, with the errors above"
    vendors = {"NVIDIA": "h200", "AMD": "mi300x"}
    for family, engine, device, profile in product(MODELS, ("xgpt", *ENGINES), vendors.values(), STEP_TIMES):
        if (few := too_few(Cell("closed loop", engine, family, device, profile, ""))) is not None:
            words, number = few
            found[words] = f"fewer than {LEAST} rows", str(number)
    return results.table(("label", "rule", "published rows"), [(words, *cells) for words, cells in found.items()])
