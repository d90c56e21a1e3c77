"""Run `xgpt simulate`, and print its figures."""

from __future__ import annotations

from typing import Any

import click

from xgpt import api
from xgpt.cli import options, render
from xgpt.cli.outputs import output_file, write
from xgpt.core.schema.documents import SimulateOutput
from xgpt.resolve import load_trace


def run(plan_path: str, timeline: str | None, force: bool, as_json: bool, **asked: Any) -> None:
    """Run the command. See `xgpt.cli.commands`."""
    file = None if timeline is None else output_file(timeline, "timeline")
    with render.at_work("simulating"):
        run = api.simulate(plan_path, keep_steps=file is not None, **options.given())
    if file is not None:
        write(file, run.chrome_trace())
    if asked["own_times"]:
        _tell_share(asked)
    if as_json:
        found = SimulateOutput.model_validate({**run.figures, "goodput_by_class": run.kept or None})
        click.echo(found.model_dump_json(indent=1, exclude_none=True))
    else:
        render.show(*render.simulated_tables(run))
        if not run.steps:
            click.echo(
                "note: with so many requests, single steps are not simulated, so gaps between tokens and idle shares "
                "are not known; --timeline simulates every step",
                err=True,
            )


def _tell_share(asked: dict[str, Any]) -> None:
    """Print on standard error how much of the trace was replayed, unless all of it was."""
    trace, num_requests = load_trace(asked["workload"]), asked.get("num_requests") or 2000
    if trace is None or num_requests == "all":
        return
    count = len(trace.since(asked["since_s"]).input)
    if count > num_requests:
        share = f"only the first {num_requests} of {count} requests"
        click.echo(f"note: the figures cover {share}; --requests all replays the whole trace", err=True)
