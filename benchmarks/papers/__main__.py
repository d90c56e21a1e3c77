"""The papers' figures with ours.

    python -m benchmarks.papers [--quick] [--jsonl results/papers.jsonl] [--markdown docs/results/papers.md]

Profiles are computed from datasheets, with one set of efficiencies a device kind. At the paper's settings where it
names them; where it does not, the search chooses. Searched rows stand in two columns: over FasterTransformer as the
paper ran it, and over static batches at their own best placement. What stands in the JSON lines is not made again.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers import exegpt, orca, scenarios
from benchmarks.papers.claims import Claim, markdown
from benchmarks.papers.scenarios import Scenario

SECTIONS: dict[str, tuple[Callable[[], Iterator[Claim]], bool]] = {
    "ExeGPT, Tables 6 and 7": (exegpt.tables_6_and_7, False),
    "ExeGPT, Figure 7": (exegpt.figure_7, False),
    "ORCA": (orca.figures_9_to_11, False),
    "ExeGPT, Figure 9": (exegpt.figure_9, True),
    "ExeGPT, Figure 10": (exegpt.figure_10, True),
    "ExeGPT, Figure 11": (exegpt.figure_11, True),
    "ExeGPT, RRA under drift": (exegpt.drift_of_rra, True),
}
"""What makes the claims, and whether it searches."""

COLUMNS = ("model", "cluster", "task", "bound", "FT", "static", "ours", "policy", "over FT", "over static")

PAGE = """# The papers' figures, reproduced

Made by `python -m benchmarks.papers --markdown docs/results/papers.md`. All times are predictions: profiles computed
from datasheets with one set of efficiencies a device kind (`configs/devices`), the closed forms of `xsimulator`, and,
where a schedule is searched for, `xscheduler`. What TCB reports is measured by `python -m benchmarks.tcb`
([TCB](tcb.md)), ExeGPT's Table 5 by `python -m benchmarks.monotonicity`.

"""


class Store:
    """What has been made, in lines of JSON: a run that was broken off goes on where it was."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        self._made: dict[str, Any] = dict(json.loads(line) for line in lines)

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            self._made[name] = make()
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([name, self._made[name]]) + "\n")
        return self._made[name]

    def claims(self, name: str, make: Callable[[], Iterator[Claim]]) -> list[Claim]:
        return [Claim(**claim) for claim in self.get(name, lambda: [asdict(claim) for claim in make()])]

    def scenarios(self, *, large: bool) -> list[Scenario]:
        found = []
        for names in scenarios.names(large):
            found += self.get("scenarios " + ", ".join(names), lambda names=names: scenarios.find(large, *names))
        return [Scenario(*row) for row in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only what needs no search")
    parser.add_argument("--jsonl", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    store = Store(options.jsonl)
    claims: list[Claim] = []
    for name, (section, searches) in SECTIONS.items():
        if not (searches and options.quick):
            claims += _shown(store.claims(name, section))
    rows: list[list[str]] = []
    if not options.quick:
        small, large = store.scenarios(large=False), store.scenarios(large=True)
        claims += _shown([*exegpt.ratios_to_static(small, large), *exegpt.scheduling_seconds([*small, *large])])
        rows = exegpt.scenario_rows([*small, *large])
    print(", ".join(f"{count} {verdict}" for verdict, count in Counter(c.verdict for c in claims).items()))
    for row in rows:
        print("  ".join(f"{cell:>12}" for cell in row))
    if options.markdown:
        versions = f"Python {platform.python_version()}, numpy {np.__version__}"
        made = f"{date.today()}, {versions}. Of the machine only 7.7 tells."
        text = f"{PAGE}{made}\n\n{markdown(claims)}"
        if rows:
            table = "\n".join(f"| {' | '.join(row)} |" for row in [list(COLUMNS), ["---"] * len(COLUMNS), *rows])
            text += "\n## Figures 6 and 8: requests a second\n\n" + table + "\n"
        else:
            text += "\nWithout `--quick` the same command adds the figures that need a search.\n"
        options.markdown.write_text(text, encoding="utf-8")


def _shown(claims: list[Claim]) -> list[Claim]:
    for claim in claims:
        print(f"{claim.source:16} {claim.what:58} {claim.paper:28} {claim.ours:40} {claim.verdict}", flush=True)
        if claim.why and claim.verdict != "holds":
            print(f"{'':16} because {claim.why}")
    return claims


if __name__ == "__main__":
    main()
