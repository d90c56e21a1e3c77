"""The table of the papers: every row names a part, every part a function; optima are optima."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmarks.papers.__main__ as papers
from benchmarks.lib.results import stored, table
from benchmarks.papers.__main__ import PARTS, rows_of
from benchmarks.papers.claims import Claim, at_least, within
from benchmarks.tcb import competitive
from tests.rings import few

PAGE = Path(__file__).parents[2] / "docs/results/papers.md"


def test_a_row_that_does_not_hold_names_its_assumption() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    failed = [line.split(" | ") for line in lines if " | **no** | " in line]
    assert all(len(cells[-1]) > 40 or cells[-1].startswith("as above") for cells in failed)


@pytest.mark.parametrize("name", ["exegpt-figure-4", "orca-figure-9"])
def test_a_part_is_made(name: str) -> None:
    claims = [one for one in PARTS[name].make() if isinstance(one, Claim)]
    rows = rows_of(claims)
    assert [row[1] for row in rows] == [claim.what for claim in claims]
    assert {row[6] for row in rows} <= {"as above", *(claim.why for claim in claims)}


def test_a_part_is_recorded_beside_the_rows_of_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: dict[str, Any] = {}
    monkeypatch.setattr(papers, "record", lambda name, claim, lines, **figures: recorded.update(figures, lines=lines))
    papers.keep("exegpt-figure-4", [within("ExeGPT Fig. 4", "one row now", 1.0, 1.0, 0.1, "x")])
    others = [row for row in stored("papers")["exegpt"].rows if "`exegpt-figure-4`" not in row[0]]
    mine, *rest = recorded["lines"][2:]
    assert mine.startswith("| `exegpt-figure-4`, ") and "one row now" in mine
    assert rest == table(papers.COLUMNS, others)[2:]
    assert (recorded["rows"], recorded["held"]) == (len(rest) + 1, 1 + sum(row[-2] == "yes" for row in others))


def test_verdicts() -> None:
    assert within("x", "y", 2.0, 2.29, 0.15, "s").holds and not within("x", "y", 2.0, 2.31, 0.15, "s").holds
    assert at_least("x", "y", 2.0, 2.0, "s").holds and not at_least("x", "y", 2.0, 1.99, "s").holds


def test_the_integer_programme_finds_what_trying_all_schedules_finds() -> None:
    rng = np.random.default_rng(0)
    case = competitive.Case("small", 7, 3, 2, 9)
    for _ in range(40):
        instance = competitive.draw(case, rng)
        best, proven = competitive.optimum(instance)
        assert proven and best == pytest.approx(competitive.optimum_by_trying(instance))


@pytest.mark.parametrize("eta", few(competitive.ETAS))
def test_das_reaches_its_constant_on_larger_instances(eta: float) -> None:
    rng = np.random.default_rng(1)
    ratios = []
    for _ in range(25):
        instance = competitive.draw(competitive.CASES[1], rng)
        ratios.append(competitive.online(instance, eta) / competitive.optimum(instance)[0])
    assert competitive.constant(eta) <= min(ratios) <= max(ratios) <= 1 + 1e-9
    assert min(ratios) < 1
