"""The papers' figures beside ours.

    python -m benchmarks.papers [--quick] [--json results/papers.json] [--markdown docs/REPRODUCTION.md]

Profiles are computed from datasheets, with one set of efficiencies a device kind. At the paper's settings where it
names them; where it does not, the search chooses. Searched rows stand in two columns: over FasterTransformer as the
paper ran it, and over static batches at their own best placement.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.papers import exegpt, orca
from benchmarks.papers.claims import Claim, markdown

SECTIONS: tuple[tuple[Callable[[], Iterator[Claim]], bool], ...] = (
    (exegpt.tables_6_and_7, False),
    (exegpt.figure_7, False),
    (orca.figures_10_and_11, False),
    (exegpt.figure_9, True),
    (exegpt.figure_10, True),
    (exegpt.figure_11, True),
    (exegpt.drift_of_rra, True),
    (exegpt.ratios_to_static, True),
    (exegpt.scheduling_seconds, True),
)
"""What makes the claims, and whether it searches."""

COLUMNS = ("model", "cluster", "task", "bound", "FT", "static", "ours", "policy", "over FT", "over static")

PAGE = """# The papers' figures, reproduced

Made by `python -m benchmarks.papers --markdown docs/REPRODUCTION.md`. All times are predictions: profiles computed
from datasheets with one set of efficiencies a device kind (`configs/devices`), the closed forms of `xsimulator`, and,
where a schedule is searched for, `xscheduler`. What TCB reports is measured by `python -m benchmarks.tcb`, Table 5 by
`python -m benchmarks.monotonicity`.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only what needs no search")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    claims: list[Claim] = []
    for section, searches in SECTIONS:
        if searches and options.quick:
            continue
        for claim in section():
            claims.append(claim)
            print(f"{claim.source:16} {claim.what:58} {claim.paper:28} {claim.ours:40} {claim.verdict}", flush=True)
            if claim.why and claim.verdict != "holds":
                print(f"{'':16} because {claim.why}")
    print(", ".join(f"{count} {verdict}" for verdict, count in Counter(c.verdict for c in claims).items()))
    rows = [] if options.quick else exegpt.scenario_rows()
    for row in rows:
        print("  ".join(f"{cell:>12}" for cell in row))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        document = {"claims": [asdict(claim) for claim in claims], "scenarios": [COLUMNS, *rows]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        text = PAGE + markdown(claims)
        if rows:
            table = "\n".join(f"| {' | '.join(row)} |" for row in [list(COLUMNS), ["---"] * len(COLUMNS), *rows])
            text += "\n## Figures 6 and 8: requests a second\n\n" + table + "\n"
        else:
            text += "\nWithout `--quick` the same command adds the figures that need a search.\n"
        options.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
