"""Compare the figures of papers (ExeGPT, ORCA, TCB, PeriFlow) with xgpt's.

    python -m benchmarks.papers [PAPER | PART ...] [--quick] [--record]
    python -m benchmarks.papers --figures

A part computes some rows of a paper's table. Without named parts, all run, or with --quick only those that neither
search nor measure. --record stores each part's rows for docs/results/papers.md, its commit and processor time, and its
tables for the pictures, as soon as the part has run; rows of other parts stay. --figures draws the pictures of
docs/results/figures.md from what is stored.
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import date
from typing import NamedTuple

from benchmarks.lib import results
from benchmarks.lib.results import record, stored, table
from benchmarks.papers import drift, exegpt, existing, measured, orca, orca_engines, periflow, steps, tcb
from benchmarks.papers.claims import OWN, Claim, Found, Table
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
    "exegpt-joint": Part(steps.taken_together, "forms"),
    "exegpt-randomised": Part(steps.randomised_inputs, "search"),
    "exegpt-steadied": Part(steps.steadied, "search"),
    "exegpt-figures-6-8": Part(exegpt.figures_6_and_8, "search"),
    "exegpt-figure-7": Part(existing.figure_7, "forms"),
    "exegpt-figure-9": Part(exegpt.figure_9, "search"),
    "exegpt-figure-10": Part(exegpt.figure_10, "search"),
    "exegpt-figure-11": Part(drift.figure_11, "search"),
    "exegpt-rra-drift": Part(drift.drift_of_rra, "search"),
    "exegpt-table-5": Part(measured.table_5, "search"),
    "exegpt-profiling": Part(measured.profiling, "measure"),
    "orca-figure-9": Part(orca_engines.figure_9, "forms"),
    "orca-figure-10a": Part(orca.figure_10a, "forms"),
    "orca-figure-10b": Part(orca.figure_10b, "forms"),
    "orca-joint": Part(orca.taken_together, "forms"),
    "orca-figure-10c": Part(orca.figure_10c, "forms"),
    "orca-figure-11": Part(orca.figure_11, "forms"),
    "periflow": Part(periflow.claims, "forms"),
    "tcb-figures-9-12": Part(tcb.figures_9_to_12, "forms"),
    "tcb-joint": Part(tcb.taken_together, "forms"),
    "tcb-crossover": Part(tcb.crossover, "forms"),
    "tcb-slots": Part(tcb.slots, "forms"),
    "tcb-orders": Part(tcb.orders_and_overhead, "forms"),
    "tcb-competitive": Part(tcb.competitive_ratio, "forms"),
    "tcb-served": Part(measured.tcb_served, "measure"),
}


COLUMNS = ("part", "source", "what", "paper", "ours", "holds if", "holds", "what decides")
JOINT = ("part", "figures", "what they share", "paper", "found", "consistent", "why not")
RUNS = ("commit", "date", "parts, with processor seconds")
PAPERS = {"exegpt": ("exegpt",), "orca": ("orca", "periflow"), "tcb": ("tcb",)}
"""Results of the page, and the first words of their parts' names."""


def rows_of(claims: Iterable[Claim]) -> list[list[str]]:
    """Return the cells of rows. What a row shares with the previous one is not repeated."""
    rows, last = [], ""
    for one in claims:
        why = "as above" if one.why and one.why == last else one.why
        goal = [] if one.taken_together else [one.held_if]
        rows.append([one.source, one.what, one.paper, one.ours, *goal, "yes" if one.holds else "**no**", why])
        last = one.why
    return rows


def paper_of(part: str) -> str:
    [paper] = [paper for paper, words in PAPERS.items() if part.split("-")[0] in words]
    return paper


def keep(name: str, found: Sequence[Found], seconds: float) -> None:
    """Store a part's rows beside those of its paper's other parts, its run, and its tables."""
    paper, claims = paper_of(name), [one for one in found if isinstance(one, Claim)]
    rows = _beside(name, paper, [one for one in claims if not one.taken_together])
    of_paper = [row for row in rows if not row[COLUMNS.index("holds if")].startswith(OWN)]
    held, own = _held(of_paper), [row for row in rows if row not in of_paper]
    claim = "{held} of {rows} rows hold" + (", and {own_held} of {own} whose goal is ours." if own else ".")
    figures = {"held": held, "rows": len(of_paper)} | ({"own_held": _held(own), "own": len(own)} if own else {})
    command = f"python -m benchmarks.papers {paper} --record"
    results.store(f"papers/{paper}", claim, table(COLUMNS, rows), command, **figures)
    if joint := [one for one in claims if one.taken_together]:
        rows = _beside(name, "joint", joint)
        claim = "{agree} of {rows} groups of figures agree."
        results.store("papers/joint", claim, table(JOINT, rows), JOINT_COMMAND, agree=_held(rows), rows=len(rows))
    runs = {
        part: (commit, day, needed)
        for commit, day, parts in stored("papers")["runs"].rows
        for part, needed in re.findall(r"`(\S+)` (\S+)", parts.replace(",", ""))
    } | {name: (_commit(), f"{date.today():%Y-%m-%d}", f"{seconds:.0f}")}
    together: dict[tuple[str, str], list[str]] = {}
    for part in PARTS:
        if part in runs:
            together.setdefault(runs[part][:2], []).append(f"`{part}` {runs[part][2]}")
    rows = [[*where, ", ".join(parts)] for where, parts in together.items()]
    record("papers/runs", "{num} parts.", table(RUNS, rows), "python -m benchmarks.papers --record", num=len(runs))
    for one in found:
        if isinstance(one, Table):
            results.store(f"figures/papers/{one.title}", one.note, table(one.columns, one.rows))


JOINT_COMMAND = "python -m benchmarks.papers exegpt-joint orca-joint tcb-joint --record"


def _beside(name: str, result: str, claims: Sequence[Claim]) -> list[list[str]]:
    """Return the rows of a part beside those of a result's other parts."""
    kept = by_part(stored("papers")[result].rows) | {
        name: [["", source.partition(" ")[2] or source, *row] for source, *row in rows_of(claims)]
    }
    for part, rows in kept.items():
        if rows:
            rows[0][0] = f"`{part}`"
    return [row for part in PARTS for row in kept.get(part, [])]


def by_part(rows: Iterable[Sequence[str]]) -> dict[str, list[list[str]]]:
    """Return a result's rows by part, which its first row alone names."""
    found: dict[str, list[list[str]]] = {}
    part = ""
    for row in rows:
        part = row[0].strip("`") or part
        found.setdefault(part, []).append(["", *row[1:]])
    return found


def _held(rows: Sequence[Sequence[str]]) -> int:
    return sum("yes" in row for row in rows)


def _commit() -> str:
    """Return the commit of the code that runs, with + if the code has changed since."""
    changed, commit = (
        subprocess.run(["git", *words], capture_output=True, text=True, check=True, cwd=results.ROOT).stdout.strip()
        for words in (("status", "--porcelain", "--", "*.py"), ("rev-parse", "--short=8", "HEAD"))
    )
    return commit + "+" * bool(changed)


def _processor_s() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in both)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join((*PAPERS, *PARTS)))
    parser.add_argument("--quick", action="store_true", help="run only parts that neither search nor measure")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--figures", action="store_true")
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in (*PAPERS, *PARTS)]
    if unknown:
        parser.error(f"{unknown[0]!r} is not a part; known parts are {', '.join(PARTS)}")
    if options.figures:
        make_pictures.main()
        return
    for name in chosen(options.parts, quick=options.quick):
        started = _processor_s()
        found = list(PARTS[name].make())
        _show(name, found)
        if options.record:
            keep(name, found, _processor_s() - started)


def chosen(words: Collection[str], *, quick: bool = False) -> list[str]:
    """Return the parts that names of papers and parts choose. None choose all, or all that are quick."""
    if words:
        return [part for part in PARTS if {part, paper_of(part)} & {*words}]
    return [name for name, part in PARTS.items() if part.kind == "forms" or not quick]


def _show(name: str, found: Sequence[Found]) -> None:
    print(f"{name}: {PARTS[name].make.__module__}.{PARTS[name].make.__name__}", flush=True)
    for one in found:
        if isinstance(one, Claim):
            verdict = "holds" if one.holds else f"does not hold: {one.why}"
            goal = f" ({one.held_if})" * bool(one.held_if)
            print(f"  {one.source:16} {one.what}: paper {one.paper}, ours {one.ours}{goal}: {verdict}")
        else:
            print(f"  {one.title}")
            for row in (one.columns, *one.rows):
                print("    " + "  ".join(f"{cell:>12}" for cell in row))


if __name__ == "__main__":
    main()
