"""One line of the comparison, and how it is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["holds", "fails", "reported"]


@dataclass(frozen=True)
class Claim:
    """A paper's figure with ours. `why` says what explains a difference."""

    source: str
    what: str
    paper: str
    ours: str
    verdict: Verdict = "reported"
    why: str = ""


def within(source: str, what: str, paper: float, ours: float, tolerance: float, unit: str, why: str = "") -> Claim:
    """A figure with a relative tolerance; `why` is kept where it fails."""
    error = ours / paper - 1
    holds = abs(error) <= tolerance
    shown = f"{ours:.3g} {unit} ({100 * error:+.0f}%)"
    return Claim(source, what, f"{paper:g} {unit}", shown, "holds" if holds else "fails", "" if holds else why)


def judged(source: str, what: str, paper: str, ours: str, holds: bool, why: str = "") -> Claim:
    return Claim(source, what, paper, ours, "holds" if holds else "fails", why)


def markdown(claims: Sequence[Claim]) -> str:
    rows = ["| source | what | paper | ours | | why |", "|---|---|---|---|---|---|"]
    for c in claims:
        why = "" if c.verdict == "holds" else c.why
        rows.append(f"| {c.source} | {c.what} | {c.paper} | {c.ours} | {c.verdict} | {why} |")
    return "\n".join(rows) + "\n"
