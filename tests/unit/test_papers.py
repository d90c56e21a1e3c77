"""The table of the papers: every row names a part, every part a function; optima are optima."""

from __future__ import annotations

import re
import shlex
from typing import Any

import numpy as np
import pytest

import benchmarks.papers.__main__ as papers
from benchmarks.lib.results import stored, table
from benchmarks.papers.__main__ import PAPERS, PARTS, by_part, chosen, rows_of
from benchmarks.papers.claims import Claim, Range, at_least, common, held_at, within
from benchmarks.tcb import competitive
from tests.rings import few


def _rows(result: str) -> list[dict[str, str]]:
    found = stored("papers")[result]
    return [dict(zip(found.columns, row, strict=True)) for row in found.rows]


def test_a_row_that_does_not_hold_says_where_it_does_or_that_nothing_explains_it() -> None:
    for row in (row for paper in PAPERS for row in _rows(paper)):
        why = row["what decides"]
        assert row["holds"] == "yes" or "holds at " in why or "not explained" in why or why == "as above", row
        assert not re.search(r"holds (?!at )", why), row


def test_the_command_below_a_table_makes_all_of_its_rows() -> None:
    for name, found in stored("papers").items():
        parts = set(re.findall(r"`(\S+)`", " ".join(f"{row[0]} {row[-1]}" for row in found.rows))) & {*PARTS}
        words = shlex.split(found.command.removesuffix(" --record"))[3:]
        assert parts <= {*chosen(words)}, name


def test_an_edge_is_bisected_between_values_tried() -> None:
    found = held_at(lambda x: 1.3 <= x <= 7.7, (0.0, 1.0, 2.0, 5.0, 10.0))
    assert found is not None and found.cut == (False, False)
    assert (found.least, found.most) == (pytest.approx(1.3, rel=0.01), pytest.approx(7.7, rel=0.01))
    assert found.least >= 1.3 and found.most <= 7.7, "edges are values at which it was seen to hold"
    assert str(held_at(lambda cap: 48 <= cap <= 81, (24, 64, 128))) == "48 to 81"
    assert str(held_at(lambda x: x >= 3.0, (1.0, 5.0))) == "3 to 5 (last tried)"
    assert held_at(lambda x: x > 20.0, (1.0, 5.0)) is None


def test_figures_that_need_different_values_contradict_each_other() -> None:
    low, high, middle = (Range(*ends, (False, False)) for ends in ((0.6, 1.8), (2.4, 9.0), (1.0, 3.0)))
    assert common([low, high, middle]) is None and common([low, None]) is None
    assert str(common([low, middle])) == "1 to 1.8"


FORMS = [name for name, part in PARTS.items() if part.kind == "forms" and name != "tcb-orders"]
"""Parts whose rows depend on the code alone. tcb-orders has a row with seconds of this machine."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", few(dict.fromkeys(["exegpt-figure-4", "orca-figure-9", *FORMS]), 2))
def test_a_part_computes_the_rows_of_the_page(name: str) -> None:
    found = [row for result in (*PAPERS, "joint") for row in by_part(stored("papers")[result].rows).get(name, [])]
    claims = [one for one in PARTS[name].make() if isinstance(one, Claim)]
    rows = [[row[0].partition(" ")[2] or row[0], *row[1:]] for row in rows_of(claims)]
    assert [row[1:] for row in found] == rows, f"python -m benchmarks.papers {name} --record"


def test_a_part_is_recorded_beside_the_rows_of_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: dict[str, Any] = {}
    kept: dict[str, tuple[list[str], dict[str, Any]]] = {}
    monkeypatch.setattr(papers, "record", lambda name, claim, lines, *_, **figures: recorded.update(lines=lines))
    monkeypatch.setattr(
        papers.results, "store", lambda name, claim, lines, *_, **figures: kept.update({name: (lines, figures)})
    )
    row = within("ExeGPT Fig. 4", "one row now", 1.0, 1.0, 0.1, "x")
    papers.keep("exegpt-figure-4", [row, row.with_own_goal()], 12.4)
    num = len(by_part(stored("papers")["exegpt"].rows)["exegpt-figure-4"])
    others = _rows("exegpt")[num:]
    mine, own, *rest = kept["papers/exegpt"][0][2:]
    figures = kept["papers/exegpt"][1]
    assert mine.startswith("| `exegpt-figure-4` | ") and "one row now" in mine and "| ours: ±10% |" in own
    assert rest == table(papers.COLUMNS, [row.values() for row in others])[2:]
    stated = [row for row in others if not row["holds if"].startswith("ours: ")]
    assert figures["rows"] == len(stated) + 1 and figures["held"] == 1 + sum(row["holds"] == "yes" for row in stated)
    assert figures["own"] == 1 + len(others) - len(stated)
    [run] = [line for line in recorded["lines"] if "`exegpt-figure-4` 12" in line]
    assert re.match(r"\| [0-9a-f]{7,}\+? \| ", run)
    assert len(re.findall("`exegpt-figure-4`", "".join(recorded["lines"]))) == 1


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
