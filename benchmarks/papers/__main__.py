"""The papers' figures and ours: ExeGPT, ORCA, TCB, PeriFlow.

    python -m benchmarks.papers [PART ...] [--quick] [--jsonl FILE] [--again] [--markdown docs/results/papers.md]

A part stands behind some rows of the table, and names the function that makes them; without parts, all are made, with
--quick those that neither search nor measure. What stands in the JSON lines is not made again, so a whole run can be
made in pieces, and broken off; --again makes the named parts anew. The page names the commit of each part.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.papers import derivations, drift, exegpt, measured, orca, periflow, tcb
from benchmarks.papers.claims import Claim, Found, Table, as_markdown, claims_table
from xgpt.core.io import write_atomic


class Part(NamedTuple):
    """Some rows of the table.

    Attributes:
        make: makes them.
        kind: "forms": closed forms and simulations of seconds; "search": searches for schedules; "measure": runs on
            this machine.
        keeps: what makes and keeps, under results/, that the part reads, and how long that takes the first time.
    """

    make: Callable[[], Iterable[Found]]
    kind: str
    keeps: str = ""


PARTS = {
    "exegpt-tables-6-7": Part(exegpt.tables_6_and_7, "forms"),
    "exegpt-figures-6-8": Part(exegpt.figures_6_and_8, "search", "benchmarks.scheduler, 6 minutes more"),
    "exegpt-figure-7": Part(exegpt.figure_7, "forms"),
    "exegpt-figure-9": Part(exegpt.figure_9, "search"),
    "exegpt-figure-10": Part(exegpt.figure_10, "search"),
    "exegpt-figure-11": Part(drift.figure_11, "search"),
    "exegpt-rra-drift": Part(drift.drift_of_rra, "search"),
    "exegpt-table-4": Part(measured.table_4, "measure", "benchmarks.loading, 25 minutes more"),
    "exegpt-table-5": Part(measured.table_5, "search"),
    "exegpt-formulas": Part(derivations.corrections, "forms"),
    "orca-figure-9": Part(orca.figure_9, "forms"),
    "orca-figure-10": Part(orca.figure_10, "forms"),
    "orca-figure-11": Part(orca.figure_11, "forms"),
    "periflow": Part(periflow.claims, "forms"),
    "tcb-figures-9-12": Part(tcb.figures_9_to_12, "forms"),
    "tcb-crossover": Part(tcb.crossover, "forms"),
    "tcb-slots": Part(tcb.slots, "forms"),
    "tcb-orders": Part(tcb.orders_and_overhead, "forms"),
    "tcb-competitive": Part(tcb.competitive_ratio, "forms"),
    "tcb-served": Part(measured.tcb_served, "measure"),
}

PAGE = """# The papers' figures

Every figure of ExeGPT, ORCA, PeriFlow and TCB that this project can put a value to. Unless a row says measured, ours is
a prediction: profiles computed from datasheets with one set of efficiencies a device kind (`configs/devices`), the
closed forms and the simulated engine of `xsimulator`, and, where a schedule is searched for, `xscheduler`
(`--objective saturated`). No parameter was set for a row. "Holds if" is the goal of a row; where it does not hold, the
column after it names the one assumption that decides, and the value of it at which the row would hold.

SLA (a) bounds the quantile of all requests, (b) a request whose output has the quantile's length (ExeGPT 7.6). TNB pads
requests to the longest of a batch, TTB batches them by length as TurboTransformer does, TCB concatenates them; das is
TCB's order, fcfs that of arrival; variance is that of the lengths; where nothing else is said, four times what TNB
serves arrives.

What stands behind a row: its last column leads to its line in the table of [parts](#parts), with the command that makes
the part again, `python -m benchmarks.papers PART`, and the function; both stand below each other table, too.

"""


PARTS_HEAD = """## Parts

The commit is the one whose code made a part. Seconds are of two shared cores, at loads of up to 10. Where a part reads
what another command keeps under `results/`, it makes that first where it is not there.

| part | command | code | kind | s | reads what is kept by | commit |
|---|---|---|---|---|---|---|
"""


class Made(NamedTuple):
    """A part's rows, the seconds that they took, and the commit whose code made them."""

    found: list[Found]
    seconds: float
    commit: str


class Store:
    """What has been made, in lines of JSON: a run that was broken off goes on where it was."""

    def __init__(self, path: Path | None, again: Sequence[str]) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        self._made: dict[str, Any] = dict(json.loads(line) for line in lines)
        for name in again:
            self._made.pop(name, None)

    def get(self, name: str, part: Part) -> Made:
        """Return what there is of a part, or make it."""
        if name not in self._made:
            start = time.perf_counter()
            found = [["claim" if isinstance(one, Claim) else "table", asdict(one)] for one in part.make()]
            self._made[name] = {"found": found, "seconds": time.perf_counter() - start, "commit": _commit()}
            if self._path is not None:
                text = "".join(json.dumps([key, value]) + "\n" for key, value in self._made.items())
                write_atomic(self._path, text)
        kept_part = json.loads(json.dumps(self._made[name]))
        found = [_read(kind, fields) for kind, fields in kept_part["found"]]
        return Made(found, kept_part["seconds"], kept_part["commit"])

    def has(self, name: str) -> bool:
        return name in self._made


def _read(kind: str, fields: dict[str, Any]) -> Found:
    if kind == "claim":
        return Claim(**fields)
    return Table(fields["title"], tuple(fields["columns"]), tuple(map(tuple, fields["rows"])), fields["note"])


def _commit() -> str:
    """The commit of the code that runs, with a plus where files differ from it."""
    command = ("git", "describe", "--always", "--dirty=+", "--exclude=*")
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent).stdout.strip()


def page(parts: dict[str, Made]) -> str:
    claims = [(name, one) for name, part_made in parts.items() for one in part_made.found if isinstance(one, Claim)]
    num_held = sum(claim.holds for _, claim in claims)
    versions = f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}"
    commits = ", ".join(dict.fromkeys(part_made.commit for part_made in parts.values()))
    text = f"{PAGE}{date.today()}, commit {commits}, {versions}; {num_held} of {len(claims)} rows hold.\n\n"
    text += f"{claims_table(claims)}\n{PARTS_HEAD}"
    for name, part_made in parts.items():
        text += f'| <a id="{name}"></a>{name} | {_command(name)} | {_code(name)} | {PARTS[name].kind} '
        text += f"| {part_made.seconds:.0f} | {PARTS[name].keeps or '-'} | {part_made.commit} |\n"
    for name, part_made in parts.items():
        for one in part_made.found:
            if isinstance(one, Table):
                text += f"\n{as_markdown(one)}\n{_command(name)}, by {_code(name)}.\n"
    return text


def _command(name: str) -> str:
    return f"`python -m benchmarks.papers {name}`"


def _code(name: str) -> str:
    make = PARTS[name].make
    return f"`{make.__module__}.{make.__name__}`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="only what neither searches nor measures")
    parser.add_argument("--jsonl", type=Path)
    parser.add_argument("--again", action="store_true", help="make the named parts anew")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"{unknown[0]!r} is no part; known: {', '.join(PARTS)}")
    store = Store(options.jsonl, (options.parts or list(PARTS)) if options.again else ())
    for name, part in PARTS.items():
        named = name in options.parts
        if named or (not options.parts and (part.kind == "forms" or not options.quick)):
            _show(name, store.get(name, part).found)
    if options.markdown:
        contents = {name: store.get(name, part) for name, part in PARTS.items() if store.has(name)}
        write_atomic(options.markdown, page(contents))


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
