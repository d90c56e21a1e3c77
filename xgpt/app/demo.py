"""`make demo`: profile this machine, plan under a bound, serve the plan, replay a workload, compare."""

from __future__ import annotations

from pathlib import Path

import click

DIRECTORY = Path("demo")
LATENCY_BOUND_S = 9.8
NUM_REQUESTS = 120


def run(command: list[str]) -> None:
    """Run one xgpt command as a user would, showing it first; an error ends the demo with its exit code."""
    from xgpt.cli import main as xgpt

    click.secho("\n$ xgpt " + " ".join(command), bold=True)
    try:
        xgpt(command)
    except SystemExit as end:
        if end.code:
            raise


def main() -> None:
    """Plan, serve and bench the default model; everything lands in ./demo."""
    DIRECTORY.mkdir(exist_ok=True)
    plan = str(DIRECTORY / "plan.json")
    run(["plan", "--latency-bound", str(LATENCY_BOUND_S), "-o", plan])
    run(["bench", plan, "--requests", str(NUM_REQUESTS)])


if __name__ == "__main__":
    main()
