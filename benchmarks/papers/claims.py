"""Rows of the comparison with papers."""

from __future__ import annotations

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
