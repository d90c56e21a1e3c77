"""Compare the figures of papers (ExeGPT, ORCA, TCB, PeriFlow) with xgpt's.

    python -m benchmarks.papers [PART ...] [--quick] [--jsonl FILE] [--record]

A part computes some rows of the table. Without named parts, all run, or with --quick only those that neither search nor
measure. Results of the same commit in the JSON lines are not computed again, so an interrupted run continues. --record
stores the rows for docs/results/papers.md and the tables for its pictures, all of one commit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lib import results
from benchmarks.lib.results import record, table
from benchmarks.papers import drift, exegpt, measured, orca, periflow, tcb
from benchmarks.papers.claims import Claim, Found, Table
from xgpt.core.io import write_atomic


class Part(NamedTuple):
    """Some rows of the table.

    Attributes:
        kind: "forms" (closed forms and short simulations), "search" (searches for schedules) or "measure"
            (runs on this machine).
    """

    make: Callable[[], Iterable[Found]]
    kind: str


PARTS = {
    "exegpt-figure-4": Part(exegpt.figure_4, "forms"),
    "exegpt-tables-6-7": Part(exegpt.tables_6_and_7, "forms"),
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


class Store:
    """The results of one commit, in lines of JSON; an interrupted run continues where it stopped."""

    def __init__(self, path: Path | None) -> None:
        self._path, self.commit = path, _commit()
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        kept = [json.loads(line) for line in lines]
        self._made = {name: entries for name, commit, entries in kept if commit == self.commit}

    def get(self, name: str, part: Part) -> list[Found]:
        if name not in self._made:
            self._made[name] = [["claim" if isinstance(one, Claim) else "table", asdict(one)] for one in part.make()]
            if self._path is not None:
                lines = [json.dumps([key, self.commit, value]) + "\n" for key, value in self._made.items()]
                write_atomic(self._path, "".join(lines))
        return [_read(kind, fields) for kind, fields in json.loads(json.dumps(self._made[name]))]

    def has(self, name: str) -> bool:
        return name in self._made


def _read(kind: str, fields: dict[str, Any]) -> Found:
    if kind == "claim":
        return Claim(**fields)
    return Table(fields["title"], tuple(fields["columns"]), tuple(map(tuple, fields["rows"])), fields["note"])


def _commit() -> str:
    command = ("git", "describe", "--always", "--dirty=+", "--exclude=*")
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent).stdout.strip()


COLUMNS = ("source", "what", "paper", "ours", "ours / paper", "holds if", "holds", "assumption that decides")
PAPERS = {"exegpt": ("ExeGPT",), "orca": ("ORCA", "PeriFlow"), "tcb": ("TCB",)}
"""Results of the page, and the first words of their rows' sources."""


def rows_of(claims: Iterable[Claim]) -> list[list[str]]:
    """Return the cells of rows. An assumption that a row shares with the previous one is not repeated."""
    rows, last = [], ""
    for one in claims:
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        why = "as above" if one.why and one.why == last else one.why
        rows.append(
            [one.source, one.what, one.paper, one.ours, ratio, one.held_if, "yes" if one.holds else "**no**", why]
        )
        last = one.why
    return rows


def keep_all(found: Sequence[Found]) -> None:
    claims = [one for one in found if isinstance(one, Claim)]
    for name, sources in PAPERS.items():
        group = [one for one in claims if one.source.split()[0] in sources]
        held = sum(one.holds for one in group)
        record(
            f"papers/{name}", "{held} of {rows} rows hold.", table(COLUMNS, rows_of(group)), held=held, rows=len(group)
        )
    for one in found:
        if isinstance(one, Table):
            results.store(f"figures/papers/{one.title}", one.note, table(one.columns, one.rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="run only parts that neither search nor measure")
    parser.add_argument("--jsonl", type=Path)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"{unknown[0]!r} is not a part; known parts are {', '.join(PARTS)}")
    store = Store(options.jsonl)
    for name, part in PARTS.items():
        if name in options.parts or (not options.parts and (part.kind == "forms" or not options.quick)):
            _show(name, store.get(name, part))
    if options.record:
        keep_all([one for name, part in PARTS.items() for one in store.get(name, part)])


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
