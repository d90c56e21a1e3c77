"""Compare the figures of papers (ExeGPT, ORCA, TCB, PeriFlow) with xgpt's.

    python -m benchmarks.papers [PART ...] [--quick] [--jsonl FILE] [--markdown docs/results/papers.md]

A part computes some rows of the table. Without named parts, all run, or with --quick only those that neither search nor
measure. Results of the same commit in the JSON lines are not computed again, so an interrupted run continues. All
results of a page are from one commit.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.papers import drift, exegpt, measured, orca, periflow, tcb
from benchmarks.papers.claims import Claim, Found, Table, as_markdown, claims_table
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

HOW = {
    "forms": "from closed forms and short simulations",
    "search": "by searching for schedules",
    "measure": "by measuring on this machine",
}
"""How a kind of part is computed, in words."""

PAGE = """# The papers' figures

This page compares our figures with those in ExeGPT (ASPLOS '24), ORCA (OSDI '22), PeriFlow's article and TCB (ICPP
'22). Unless a row says "measured", our figure is a prediction from datasheet profiles with one set of efficiencies for
each kind of device (`configs/devices`), from closed forms, and from simulation. Schedules are found by `xgpt plan
--objective saturated`. No parameter was adjusted to make an individual row fit.

"Holds if" is the goal of a row. If a row does not hold, its outcome depends on an assumption. The column "assumption
that decides" names this assumption and the value at which the row would hold. Statements of the papers without a figure
are left out. ExeGPT's Table 4 (times to load weights over PCIe) is also left out; [several devices](devices.md)
measures loading on CPUs. [Formulas](formulas.md) corrects two of ExeGPT's formulas.

| name | meaning |
|---|---|
| FT, DSI | FasterTransformer, DeepSpeed Inference |
| SLA (a) | the bound limits a quantile of the latencies of all requests (ExeGPT 7.6) |
| SLA (b) | the bound limits the latency of a request whose output has the quantile's length |
| TNB | pads requests to the longest of a batch |
| TTB | batches requests of similar lengths, as TurboTransformers does |
| TCB | concatenates requests in rows |
| das, fcfs | TCB's order of admission; the order of arrival |
| variance | the variance of the lengths |
| A over B | A's throughput divided by B's, unless the row names another figure |
| over FT | our throughput divided by FT's |

Unless a row about TCB says otherwise, four times as many requests arrive as TNB can serve. `python -m benchmarks.papers
PART` computes the rows of a part.

"""


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


def page(parts: Mapping[str, Sequence[Found]], commit: str) -> str:
    claims = [(name, one) for name, found in parts.items() for one in found if isinstance(one, Claim)]
    num_held = sum(claim.holds for _, claim in claims)
    versions = f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}"
    text = f"{PAGE}{date.today()}, commit {commit}, {versions}; {num_held} of {len(claims)} rows hold.\n\n"
    if missing := [name for name in PARTS if name not in parts]:
        text += f"Parts that were not run on this commit: {', '.join(missing)}.\n\n"
    text += claims_table(claims)
    for name, found in parts.items():
        make = PARTS[name].make
        tables = "".join(f"\n{as_markdown(one, 3)}" for one in found if isinstance(one, Table))
        text += f"\n## {name}\n\nComputed by `{make.__module__}.{make.__name__}` {HOW[PARTS[name].kind]}.\n{tables}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="run only parts that neither search nor measure")
    parser.add_argument("--jsonl", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"{unknown[0]!r} is not a part; known parts are {', '.join(PARTS)}")
    store = Store(options.jsonl)
    for name, part in PARTS.items():
        if name in options.parts or (not options.parts and (part.kind == "forms" or not options.quick)):
            _show(name, store.get(name, part))
    if options.markdown:
        parts = {name: store.get(name, part) for name, part in PARTS.items() if store.has(name)}
        write_atomic(options.markdown, page(parts, store.commit))


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
