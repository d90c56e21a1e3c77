"""Keep the tables of measurements in benchmarks/results, from which `make results` writes them into their pages."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from xgpt.core.io import write_atomic
from xgpt.core.machine import detect

ROOT = Path(__file__).parents[2]
STORED = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "results"


class Result(BaseModel):
    """One claim, the table that shows it, and the command that measures it again.

    Attributes:
        claim: one sentence; {NAME} stands for a figure.
        figures: the figures of the claim, computed from the table's rows.
        commit: the last commit that has the command; none if this one has it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    claim: str
    figures: dict[str, str] = {}
    command: str
    commit: str = ""
    date: date
    machine: str
    columns: list[str]
    rows: list[list[str]]

    def lines(self) -> Iterator[str]:
        yield self.claim.format(**self.figures)
        yield from ("", f"| {' | '.join(self.columns)} |", f"|{'---|' * len(self.columns)}")
        yield from (f"| {' | '.join(row)} |" for row in self.rows)
        yield from ("", f"{self.remade}, {self.date:%Y-%m-%d}, {self.machine}.")

    @property
    def remade(self) -> str:
        """The command, in Markdown."""
        return f"`{self.command}`{f' of commit {self.commit}' if self.commit else ''}"


def stored(page: str) -> dict[str, Result]:
    path = STORED / f"{page}.json"
    return {name: Result(**one) for name, one in json.loads(path.read_text()).items()} if path.exists() else {}


def record(name: str, claim: str, table: Iterable[str], command: str = "", **figures: object) -> None:
    """Print a table, store it as PAGE/NAME, and write it into its page.

    Args:
        table: its Markdown lines.
        command: makes all of its rows again. None means this one.
        figures: what {NAME} in the claim stands for.
    """
    print("\n".join(store(name, claim, table, command, **figures).lines()), flush=True)
    write(name.rpartition("/")[0])


def store(name: str, claim: str, table: Iterable[str], command: str = "", **figures: object) -> Result:
    page, _, key = name.rpartition("/")
    columns, _, *rows = ([cell.strip() for cell in line.strip()[1:-1].split("|")] for line in table)
    result = Result(
        claim=claim,
        figures={name: str(figure) for name, figure in figures.items()},
        command=command or _command(),
        date=date.today(),
        machine=detect().device.name,
        columns=columns,
        rows=rows,
    )
    keep(page, stored(page) | {key: result})
    return result


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the Markdown lines of a table."""
    lines = (columns, ["---"] * len(columns), *rows)
    return [f"| {' | '.join(map(str, cells))} |" for cells in lines]


def keep(page: str, results: Mapping[str, Result]) -> None:
    document = {name: one.model_dump(mode="json", exclude_defaults=True) for name, one in results.items()}
    write_atomic(STORED / f"{page}.json", json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def write(page: str) -> None:
    path = PAGES / f"{page}.md"
    write_atomic(path, filled(path.read_text(encoding="utf-8"), stored(page)))
    write_atomic(PAGES / "index.md", claims())


def claims() -> str:
    """Return the page that lists each claim with its command and the date of its last measurement."""
    rows = [
        (f"[{page}: {name}]({page}.md)", next(one.lines()).partition(". ")[0].removesuffix("."), one.remade, one.date)
        for page in sorted(path.stem for path in STORED.glob("*.json"))
        for name, one in stored(page).items()
    ]
    return "\n".join(["# Claims", "", *table(("table", "claim", "command", "measured"), rows), ""])


def filled(text: str, results: Mapping[str, Result]) -> str:
    """Return a page with its results.

    Raises:
        KeyError: the page has a place for a result that is not stored.
    """
    before, *places = text.split("<!-- result: ")
    for place in places:
        name, _, rest = place.partition(" -->")
        before += "\n".join([f"<!-- result: {name} -->", *results[name].lines(), "<!-- end -->"])
        before += rest.partition("<!-- end -->")[2]
    return before


def _command() -> str:
    module = sys.modules["__main__"].__spec__
    name = (module.name if module else "").removesuffix(".__main__")
    given = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    return f"python -m {name} {shlex.join(given)}".rstrip()
