"""`make demo`: profile this machine, plan under a bound, serve the plan, replay a workload, compare the figures."""

from __future__ import annotations

from pathlib import Path

import click

from xgpt.cli import main as xgpt
from xgpt.core.errors import InfeasibleError

DIRECTORY = Path("demo")
LATENCY_BOUND_S = 9.8
NUM_REQUESTS = 120


def run(command: list[str]) -> None:
    """Run one xgpt command as a user would, showing it first; an error ends the demo with its exit code."""
    click.secho("\n$ xgpt " + " ".join(command), bold=True)
    try:
        xgpt(command)
    except SystemExit as end:
        if end.code:
            raise


def plan_for(bound_s: float, path: str) -> None:
    """Plan under a bound, or without one if this machine is too slow for it."""
    try:
        run(["plan", "--latency-bound", str(bound_s), "-o", path])
    except SystemExit as end:
        if end.code != InfeasibleError.exit_code:
            raise
        run(["plan", "--latency-bound", "inf", "-o", path])


def main() -> None:
    """Plan, serve and bench the default model; everything lands in ./demo."""
    DIRECTORY.mkdir(exist_ok=True)
    plan = str(DIRECTORY / "plan.json")
    plan_for(LATENCY_BOUND_S, plan)
    run(["bench", plan, "--requests", str(NUM_REQUESTS)])


if __name__ == "__main__":
    main()
