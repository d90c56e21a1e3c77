"""Compare the figures of papers (ExeGPT, ORCA, TCB, PeriFlow) with xgpt's.

    python -m benchmarks.papers [PART ...] [--quick] [--record]
    python -m benchmarks.papers --figures

A part computes some rows of the table. Without named parts, all run, or with --quick only those that neither search nor
measure. --record stores each part's rows for docs/results/papers.md, and its tables for the pictures, as soon as the
part has run; rows of other parts stay. --figures draws docs/results/figures.md's pictures from what is stored.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from typing import NamedTuple

from benchmarks.lib import results
from benchmarks.lib.results import record, stored, table
from benchmarks.papers import drift, exegpt, measured, orca, periflow, steps, tcb
from benchmarks.papers.claims import Claim, Found, Table
from tools import make_pictures


class Part(NamedTuple):
    """Some rows of the table.

    Attributes:
        kind: "forms" (closed forms and short simulations), "search" (searches for schedules) or "measure"
            (runs on this machine).
    """

    make: Callable[[], Iterable[Found]]
    kind: str


PARTS = {
    "exegpt-figure-4": Part(steps.figure_4, "forms"),
    "exegpt-tables-6-7": Part(steps.tables_6_and_7, "forms"),
    "exegpt-randomised": Part(steps.randomised_inputs, "search"),
    "exegpt-steadied": Part(steps.steadied, "search"),
    "exegpt-figures-6-8": Part(exegpt.figures_6_and_8, "search"),
    "exegpt-figure-7": Part(exegpt.figure_7, "forms"),
    "exegpt-figure-9": Part(exegpt.figure_9, "search"),
    "exegpt-figure-10": Part(exegpt.figure_10, "search"),
    "exegpt-figure-11": Part(drift.figure_11, "search"),
    "exegpt-rra-drift": Part(drift.drift_of_rra, "search"),
    "exegpt-table-5": Part(measured.table_5, "search"),
    "exegpt-profiling": Part(measured.profiling, "measure"),
    "orca-figure-9": Part(orca.figure_9, "forms"),
    "orca-figure-10a": Part(orca.figure_10a, "forms"),
    "orca-figure-10b": Part(orca.figure_10b, "forms"),
    "orca-figure-10c": Part(orca.figure_10c, "forms"),
    "orca-figure-11": Part(orca.figure_11, "forms"),
    "periflow": Part(periflow.claims, "forms"),
    "tcb-figures-9-12": Part(tcb.figures_9_to_12, "forms"),
    "tcb-crossover": Part(tcb.crossover, "forms"),
    "tcb-slots": Part(tcb.slots, "forms"),
    "tcb-orders": Part(tcb.orders_and_overhead, "forms"),
    "tcb-competitive": Part(tcb.competitive_ratio, "forms"),
    "tcb-served": Part(measured.tcb_served, "measure"),
}


COLUMNS = ("part, date", "source", "what", "paper", "ours", "holds if", "holds", "what decides")
PAPERS = {"exegpt": ("exegpt",), "orca": ("orca", "periflow"), "tcb": ("tcb",)}
"""Results of the page, and the first words of their parts' names."""


def rows_of(claims: Iterable[Claim]) -> list[list[str]]:
    """Return the cells of rows. What a row shares with the previous one is not repeated."""
    rows, last = [], ""
    for one in claims:
        why = "as above" if one.why and one.why == last else one.why
        rows.append([one.source, one.what, one.paper, one.ours, one.held_if, "yes" if one.holds else "**no**", why])
        last = one.why
    return rows


def keep(name: str, found: Sequence[Found]) -> None:
    """Store a part's rows beside those of its paper's other parts, and its tables."""
    [paper] = [paper for paper, words in PAPERS.items() if name.split("-")[0] in words]
    cell = f"`{name}`, {date.today():%Y-%m-%d}"
    ours = [
        [cell, source.partition(" ")[2] or source, *row]
        for source, *row in rows_of(one for one in found if isinstance(one, Claim))
    ]
    kept = {part: [] for part in PARTS}
    for row in stored("papers")[paper].rows:
        kept[row[0].split("`")[1]].append(row)
    rows = [row for part in PARTS for row in (ours if part == name else kept[part])]
    held = sum(row[COLUMNS.index("holds")] == "yes" for row in rows)
    record(f"papers/{paper}", "{held} of {rows} rows hold.", table(COLUMNS, rows), held=held, rows=len(rows))
    for one in found:
        if isinstance(one, Table):
            results.store(f"figures/papers/{one.title}", one.note, table(one.columns, one.rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="run only parts that neither search nor measure")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--figures", action="store_true")
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"{unknown[0]!r} is not a part; known parts are {', '.join(PARTS)}")
    if options.figures:
        make_pictures.main()
        return
    for name, part in PARTS.items():
        if name in options.parts or (not options.parts and (part.kind == "forms" or not options.quick)):
            found = list(part.make())
            _show(name, found)
            if options.record:
                keep(name, found)


def _show(name: str, found: Sequence[Found]) -> None:
    print(f"{name}: {PARTS[name].make.__module__}.{PARTS[name].make.__name__}", flush=True)
    for one in found:
        if isinstance(one, Claim):
            verdict = "holds" if one.holds else f"does not hold: {one.why}"
            print(f"  {one.source:16} {one.what}: paper {one.paper}, ours {one.ours} ({one.held_if}): {verdict}")
        else:
            print(f"  {one.title}")
            for row in (one.columns, *one.rows):
                print("    " + "  ".join(f"{cell:>12}" for cell in row))


if __name__ == "__main__":
    main()
