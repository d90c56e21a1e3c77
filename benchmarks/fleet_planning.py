"""Time the planning of a day of 96 intervals for up to 64 devices of each of three kinds.

    python -m benchmarks.fleet_planning [--runs 3] STATE

This runs the command `xgpt fleet`, which starts, draws the day's requests, plans, and simulates all requests on every
tried fleet. Its figures are written to STATE/planning.json; benchmarks.fleet shows them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from benchmarks.lib import made
from xgpt.core.io import load_json, write_atomic
from xgpt.core.schema.fleet import FleetPlan

PLANNING = "planning.json"
HOURS = ((6, 5, "conv"), (3, 20, "conv"), (3, 60, "conv"), (2, 40, "code"), (4, 50, "conv"), (6, 10, "conv"))
"""Parts of the day: hours, requests a second, and the Azure workload."""
AMONG = "h100x8=2.9,a100x16=1.4,l40sx8=0.9"
ASKED = ("--model", "llama-3.1-8b", "--latency-bound", "20", "--ttft", "2", "--among", AMONG, "--devices", "64")


@dataclass(frozen=True)
class Planning:
    """The times of runs of the command.

    Attributes:
        seconds: total time of each run after loops are compiled.
        planning_s, verifying_s: times that the last run reports.
    """

    seconds: list[float]
    planning_s: float
    verifying_s: float
    requests: int
    intervals: int
    cores: int
    commit: str


@click.command(help=__doc__, context_settings={"max_content_width": 120})
@click.argument("state", type=click.Path(path_type=Path))
@click.option("--runs", default=3)
def main(state: Path, runs: int) -> None:
    state.mkdir(parents=True, exist_ok=True)
    trace, out, seconds = state / "weekday.yaml", state / "weekday.json", []
    stages = [{"hours": hours, "rate_per_s": rate, "workload": f"azure-{kind}"} for hours, rate, kind in HOURS]
    write_atomic(trace, json.dumps({"name": "weekday", "stages": stages}))  # JSON is YAML
    command = [sys.executable, "-m", "xgpt", "fleet", "--trace", str(trace), *ASKED, "-o", str(out)]
    for i in range(1 + runs):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds += [time.perf_counter() - started] if i else []  # the first one may compile its loops
    print(", ".join(f"{hours:.2f} s" for hours in seconds))
    fleet = load_json(out, FleetPlan, "fleet")
    hours = (fleet.planning_s, fleet.verifying_s, fleet.num_requests, len(fleet.intervals))
    planning = Planning(seconds, *hours, len(os.sched_getaffinity(0)), made.commit())
    write_atomic(state / PLANNING, json.dumps(asdict(planning), indent=1) + "\n")


if __name__ == "__main__":
    main()
