"""Rows of the comparison with papers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """A paper's figure and xgpt's.

    Attributes:
        source: the paper, and the table, figure or section.
        paper, ours: both values, in words.
        why: what decides, as a noun, and, if the claim does not hold, the value at which it would.
    """

    source: str
    what: str
    paper: str
    ours: str
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
        f"±{100 * tolerance:g}%",
        bool(abs(ours / paper - 1) <= tolerance),
        why,
    )


def at_least(source: str, what: str, paper: float, ours: float, unit: str, why: str = "") -> Claim:
    space = "" if unit == "x" else " "
    held_if = f"at least {paper:.3g}{space}{unit}"
    shown = f"{ours:.3g}{space}{unit}"
    holds = bool(ours >= paper * (1 - 1e-9))
    return Claim(source, what, f"{paper:g}{space}{unit}", shown, held_if, holds, why)


def judged(source: str, what: str, paper: str, ours: str, held_if: str, holds: bool, why: str = "") -> Claim:
    return Claim(source, what, paper, ours, held_if, bool(holds), why)
