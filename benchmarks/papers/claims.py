"""Rows of the comparison with papers, and the values at which they would hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import floor, log10


@dataclass(frozen=True)
class Claim:
    """A paper's figure and xgpt's.

    Attributes:
        source: the paper, and the table, figure or section.
        paper, ours: both values, in words.
        why: what decides, as a noun, and, if the claim does not hold, the value at which it would, or that nothing
            explains it.
        of_paper: whether the paper states the goal. Otherwise it is ours.
        taken_together: whether the row compares several of the paper's figures with each other.
    """

    source: str
    what: str
    paper: str
    ours: str
    held_if: str
    holds: bool
    why: str = ""
    of_paper: bool = True
    taken_together: bool = False

    def with_own_goal(self) -> Claim:
        return replace(self, of_paper=False, held_if=f"{OWN}{self.held_if}")


OWN = "ours: "
"""Begins a goal that the paper does not state."""


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
        f"{float(f'{ours:.3g}'):g}{space}{unit}",
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


def joint(source: str, what: str, paper: str, found: str, holds: bool, why: str = "") -> Claim:
    return Claim(source, what, paper, found, "", bool(holds), "" if holds else why, taken_together=True)


def edge(holds: Callable[[float], bool], outside: float, inside: float, precision: float) -> float:
    """Bisect between a value at which something does not hold and one at which it does, and return one at which it does
    and which is at most the share `precision` off the edge. Whole numbers stay whole.
    """
    whole = isinstance(outside, int) and isinstance(inside, int)
    while abs(outside - inside) > max(whole, precision * inside):
        middle = (outside + inside) // 2 if whole else (outside + inside) / 2
        outside, inside = (outside, middle) if holds(middle) else (middle, inside)
    return inside


@dataclass(frozen=True)
class Range:
    """The values from `least` to `most` at which something holds. An end that is the last value tried is `cut`."""

    least: float
    most: float
    cut: tuple[bool, bool]

    def __str__(self) -> str:
        ends = zip((self.least, self.most), self.cut, strict=True)
        return " to ".join(f"{two_digits(end)}{' (last tried)' * cut}" for end, cut in ends)


def two_digits(value: float) -> str:
    """Return whole numbers as they are, and others with two significant digits."""
    if isinstance(value, int) or not value:
        return f"{value:g}"
    return f"{round(value, 1 - floor(log10(abs(value)))):g}"


def held_at(holds: Callable[[float], bool], tried: Sequence[float], precision: float = 0.01) -> Range | None:
    """Return the first range of values at which something holds, with edges bisected between the values tried."""
    kept = [holds(value) for value in tried]
    if True not in kept:
        return None
    first = kept.index(True)
    last = kept.index(False, first) - 1 if False in kept[first:] else len(kept) - 1
    before, after = first == 0, last == len(kept) - 1
    least = tried[first] if before else edge(holds, tried[first - 1], tried[first], precision)
    most = tried[last] if after else edge(holds, tried[last + 1], tried[last], precision)
    return Range(least, most, (before, after))


def common(ranges: Sequence[Range | None]) -> Range | None:
    known = [one for one in ranges if one is not None]
    least, most = max(known, key=lambda one: one.least), min(known, key=lambda one: one.most)
    if len(known) < len(ranges) or least.least > most.most:
        return None
    return Range(least.least, most.most, (least.cut[0], most.cut[1]))
