"""Run the property test of plans' claims on any number of random problems.

    python -m benchmarks.claims [--rates] [--first 0] [--count 5000] [--part 0/2] [--seconds S] [--markdown FILE] LINES

Case n is drawn from n alone. Each case adds a line to LINES (JSON): its number, CPU seconds, and failures. Cases in
LINES are not run again, so an interrupted run continues. --seconds ends the run early. With --rates, plans are made for
arrivals, and their rates are tested.
"""

from __future__ import annotations

import json
import random
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from benchmarks.lib import made
from tests.contract.test_claims import Case, claims_hold, rates_hold
from xgpt.core.io import write_atomic
from xscheduler.space import POLICIES

TEXT = """`python -m benchmarks.claims`: random problems (one to four devices, any lengths, tables that rise and that do
not), each planned without a bound and under two, by one policy or all. Throughput never falls as the bound loosens, no
policy and no setting drawn at random beats what the certificate allows, plans read back equal, bounds are kept, and
other requests than those that settled a plan show its figures in simulation."""
OF_RATES = """`python -m benchmarks.claims --rates`: random problems (one to four devices, any lengths, tables that
rise and that do not), each planned for arrivals under three bounds, by one policy or all. Run request by request, a
stated rate keeps its bound; it is below saturation, and within 3% above it the bound is broken or saturation reached.
No plan made for a tighter bound keeps 2% more under a looser one than the plan made for that."""


@click.command(help=__doc__, context_settings={"max_content_width": 120})
@click.argument("lines", type=click.Path(path_type=Path))
@click.option("--rates", is_flag=True, help="Try arrival rates instead of saturated plans.")
@click.option("--first", type=int, default=0, show_default=True)
@click.option("--count", type=int, default=5000, show_default=True)
@click.option("--part", default="0/1", show_default=True, help="Share of the cases: 0/2 and 1/2 are the two halves.")
@click.option("--seconds", type=float, help="Time after which no case begins.")
@click.option("--markdown", "page", type=click.Path(path_type=Path), help="Write the cases of LINES to this page.")
def main(lines: Path, rates: bool, first: int, count: int, part: str, seconds: float | None, page: Path | None) -> None:
    number, parts = map(int, part.split("/"))
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.is_file() else []
    done, ends = {row["case"] for row in rows}, time.monotonic() + (seconds or 1e9)
    for i in range(first + number, first + count, parts):
        if i in done or time.monotonic() > ends:
            continue
        rows.append(tried(i, rates=rates))
        with lines.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    click.echo(summary(rows))
    if page is not None:
        write_atomic(page, made.page("What plans claim", OF_RATES if rates else TEXT, summary(rows)))
    sys.exit(any(row["failed"] for row in rows))


def case(number: int) -> Case:
    """Return the case with this number."""
    rng = random.Random(1_000_003 + number)
    return Case(
        rng.randrange(2**32),
        rng.randint(1, 4),
        rng.choice(("auto", *POLICIES)),
        "length" if rng.randrange(24) else "request",
        rng.random() < 0.5,
        rng.choice((0.5, 0.9, 0.99)),
    )


def tried(number: int, *, rates: bool = False) -> dict[str, Any]:
    """Test a case, and return the result."""
    problem, started, failed = case(number), time.process_time(), None
    try:
        if rates:
            rates_hold(replace(problem, sla="length"))
        else:
            claims_hold(problem)
    except Exception as error:  # whatever the error is, the other cases still run
        places = [frame.name for frame in traceback.extract_tb(error.__traceback__) if "test_claims" in frame.filename]
        failed = f"{problem}: {type(error).__name__} in {places[-1]}: {str(error)[:200]}"
    return {"case": number, "cpu s": round(time.process_time() - started, 2), "failed": failed}


def summary(rows: list[dict[str, Any]]) -> str:
    seconds = sorted(row["cpu s"] for row in rows)
    failures = [row["failed"] for row in rows if row["failed"]]
    text = (
        f"{len(rows)} cases, {len(failures)} failed; CPU seconds: {sum(seconds):.0f} in all, {seconds[-1]:.1f} at most."
    )
    return "\n".join([text, *failures])


if __name__ == "__main__":
    main()
