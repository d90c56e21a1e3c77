"""The table that `--attack-report FILE` writes: for each point, the earlier and the measured effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.attack.points import POINTS, Point
from tests.attack.target import GAP_S, HEALTH_S


class Report:
    """A plugin that gathers what tests recorded, by the points that they are marked with."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            points = {number for mark in item.iter_markers("point") for number in mark.args}
            points |= {number for number, point in POINTS.items() if _entry(item.nodeid, point)}
            item.user_properties.append(("points", sorted(points)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 1)}
            self._rows.append(row | dict(report.user_properties))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write FILE as JSON, and next to it the table as markdown."""
        if hasattr(session.config, "workerinput"):
            return
        self._path.write_text(json.dumps(self._rows, indent=1) + "\n")
        self._path.with_suffix(".md").write_text(self._table())

    def _table(self) -> str:
        lines = ["| point | before | case | now |", "|---|---|---|---|"]
        for number, point in POINTS.items():
            rows = [row for row in self._rows if number in row["points"]]
            measured = [row for row in rows if "case" in row]
            others = [row for row in rows if "case" not in row]
            said = [(f"{row['case']}, {row['flavour']}", _shown(row)) for row in measured]
            entries = {row["test"]: _entry(row["test"], point) or row["test"].partition("[")[0] for row in others}
            for test in dict.fromkeys(entries.values()):
                outcomes = [row["outcome"] for row in others if entries[row["test"]] == test]
                counted = ", ".join(f"{outcomes.count(one)} {one}" for one in dict.fromkeys(outcomes))
                said.append((test.removeprefix("tests/"), counted))
            for at, (case, now) in enumerate(said or [("", "not run")]):
                head = f"{number} {point.what} | {point.before}" if at == 0 else " | "
                lines.append(f"| {head} | {case} | {now} |")
        return "\n".join(lines) + "\n"


def _entry(test: str, point: Point) -> str | None:
    """The node id under which a point names this test."""
    return next((shown for shown in point.elsewhere if test.partition("[")[0].startswith(shown)), None)


def _shown(row: dict[str, Any]) -> str:
    """Return what a case recorded, in words."""
    names = {"gap_s": "gap {0} to {1} s", "health_s": "/health {0} to {1} s", "mib": "{0}, at most {1}, then {2} MiB"}
    parts = [text.format(*row[name]) for name, text in names.items() if name in row]
    if "gap_s" in row and "health_s" in row:
        parts.append(_judged(row))
    return ", ".join([row["outcome"], *parts, *([row["note"]] if row.get("note") else [])])


def _judged(row: dict[str, Any]) -> str:
    """Return whether others felt no more than they should; the control is the same without the attack."""
    beyond = []
    for name, what, most_s in (("health_s", "/health", HEALTH_S), ("gap_s", "gap", GAP_S)):
        control_s, felt_s = row[name]
        if felt_s > most_s:
            beyond.append(f"{what} beyond {most_s:g} s" + (", and so is the control" if control_s > most_s else ""))
    return "; ".join(beyond) or "within all aims"
