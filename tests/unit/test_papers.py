"""The table of the papers: every row names a part, every part a function; optima are optima."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

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
    assert {row[7] for row in rows} <= {"as above", *(claim.why for claim in claims)}


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
