"""Define the rows of the comparison with papers, and write their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """A paper's figure and xgpt's.

    Attributes:
        source: the paper, and the table, figure or section.
        paper, ours: both values, in words.
        ratio: xgpt's value divided by the paper's, or None if they are not single numbers.
        why: if the claim does not hold, the decisive assumption and the value at which the claim would hold. If it
            holds, what a reader must know.
    """

    source: str
    what: str
    paper: str
    ours: str
    ratio: float | None
    held_if: str
    holds: bool
    why: str = ""


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


Found = Claim | Table


def within(source: str, what: str, paper: float, ours: float, tolerance: float, unit: str, why: str = "") -> Claim:
    space = "" if unit == "x" else " "
    return Claim(
        source,
        what,
        f"{paper:g}{space}{unit}",
        f"{ours:.3g}{space}{unit}",
        float(ours / paper),
        f"±{100 * tolerance:g}%",
        bool(abs(ours / paper - 1) <= tolerance),
        why,
    )


def at_least(source: str, what: str, paper: float, ours: float, unit: str, why: str = "") -> Claim:
    space = "" if unit == "x" else " "
    held_if = f"at least {paper:.3g}{space}{unit}"
    shown = f"{ours:.3g}{space}{unit}"
    holds = bool(ours >= paper * (1 - 1e-9))
    return Claim(source, what, f"{paper:g}{space}{unit}", shown, float(ours / paper), held_if, holds, why)


def judged(source: str, what: str, paper: str, ours: str, held_if: str, holds: bool, why: str = "") -> Claim:
    return Claim(source, what, paper, ours, None, held_if, bool(holds), why)


def claims_table(claims: Sequence[tuple[str, Claim]]) -> str:
    rows = [
        "| source | what | paper | ours | ours / paper | holds if | holds | assumption that decides | part |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for part, c in claims:
        ratio = "" if c.ratio is None else f"{c.ratio:.2f}"
        cells = [c.source, c.what, c.paper, c.ours, ratio, c.held_if, "yes" if c.holds else "**no**", c.why]
        rows.append(f"| {' | '.join(cells)} | [{part}](#{part}) |")
    return "\n".join(rows) + "\n"


def as_markdown(table: Table, level: int) -> str:
    lines = [table.columns, ("---",) * len(table.columns), *table.rows]
    text = "\n".join(f"| {' | '.join(row)} |" for row in lines)
    return f"{'#' * level} {table.title}\n\n{table.note + chr(10) * 2 if table.note else ''}{text}\n"
