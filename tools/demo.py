"""`make demo`: profile this machine, plan under a bound, serve the plan, replay a workload, compare the figures."""

from __future__ import annotations

from pathlib import Path

import click

from xgpt import api
from xgpt.cli import main as xgpt
from xgpt.cli import render
from xgpt.core.errors import InfeasibleError
from xgpt.core.io import load_json
from xgpt.core.schema import BenchReport, Plan
from xprofiler.others import NOTABLE

DIRECTORY = Path("demo")
LATENCY_BOUND_S = 9.8
NUM_REQUESTS, LEAST_REQUESTS, MOST_S = 120, 24, 120.0
"""`NUM_REQUESTS` requests are measured, or if these would take longer than `MOST_S` seconds, fewer, but at least
`LEAST_REQUESTS`.
"""


def plan_for(bound_s: float, path: str) -> None:
    """Plan under a bound, or without one if this machine is too slow for it."""
    try:
        _run(["plan", "--latency-bound", str(bound_s), "-o", path])
    except SystemExit as end:
        if end.code != InfeasibleError.exit_code:
            raise
        _run(["plan", "--latency-bound", "inf", "-o", path])


def measure(path: str) -> BenchReport:
    """Serve the plan, and print the predicted and the measured figures."""
    count = num_requests(load_json(Path(path), Plan, "plan"))
    _show(["bench", path, "--requests", str(count)])
    with render.progress_bar() as progress:
        report = api.bench(path, num_requests=count, progress=progress).report
    assert isinstance(report, BenchReport)
    render.show(*render.bench_report(report))
    return report


def has_changed(report: BenchReport) -> bool:
    """Return whether the machine has changed since it was profiled: steps took longer than the plan allows, or a figure
    is outside its usual range and the load, the clock rate or the steps' pace differ.
    """
    differs = report.differences is not None or abs((report.pace or 1.0) - 1) > NOTABLE
    return report.is_disturbed or (report.is_outside and differs)


def num_requests(plan: Plan) -> int:
    """Return how many requests the demo measures: fewer if the plan promises a low arrival rate on a slow machine."""
    promised = plan.estimate.capacity
    if promised is None:
        return NUM_REQUESTS
    return max(LEAST_REQUESTS, min(NUM_REQUESTS, int(MOST_S * promised.rate_per_s)))


def _run(command: list[str]) -> None:
    """Print one xgpt command and run it. An error ends the demo with the command's exit code."""
    _show(command)
    try:
        xgpt(command)
    except SystemExit as end:
        if end.code:
            raise


def _show(command: list[str]) -> None:
    click.secho("\n$ xgpt " + " ".join(command), bold=True)


def main() -> None:
    """Plan, serve and measure the default model. All files are written to ./demo.

    If the machine has changed since it was profiled, it is profiled again, and the new plan is measured.
    """
    DIRECTORY.mkdir(exist_ok=True)
    path = str(DIRECTORY / "plan.json")
    plan_for(LATENCY_BOUND_S, path)
    if not has_changed(measure(path)):
        return
    click.echo("the machine has changed since it was profiled, so it is profiled again, for a new plan")
    _run(["profile"])
    plan_for(LATENCY_BOUND_S, path)
    if has_changed(measure(path)):
        click.echo("the machine has changed again; repeat `make demo` when no other work runs on it")


if __name__ == "__main__":
    main()
