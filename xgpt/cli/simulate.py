"""xgpt simulate"""

from __future__ import annotations

from typing import Any

import click

from xgpt.cli.options import json_option, load_options
from xgpt.cli.outputs import force_option, output_file, write
from xgpt.cli.values import Decimal


@click.command("simulate")
@click.argument("plan_path", metavar="PLAN.JSON")
@load_options(2000)
@click.option(
    "--burstiness",
    type=Decimal(0, min_open=True),
    metavar="CV",
    help="Coefficient of variation of the gaps between arrivals: 1 for Poisson, above 1 for bursts.",
)
@click.option(
    "--own-times", is_flag=True, help="Replay a trace as recorded: its pairs of lengths and its arrival times."
)
@click.option("--timeline", metavar="FILE", help="Write the steps as a Chrome trace, which Perfetto opens.")
@force_option
@json_option
def command(plan_path: str, timeline: str | None, force: bool, as_json: bool, **asked: Any) -> None:
    """Run a plan request by request on the simulated engine.

    \b
    Examples:
      xgpt simulate plan.json --requests 5000 --arrival-rate 1.5 --timeline timeline.json
      xgpt simulate plan.json --arrival-rate 1:120,4:60,1:120
    """
    from xgpt import api
    from xgpt.cli import render
    from xgpt.core.schema.outputs import SimulateOutput

    file = None if timeline is None else output_file(timeline, "timeline")
    with render.at_work("simulating"):
        run = api.simulate(plan_path, **asked)
    if file is not None:
        write(file, run.chrome_trace())
    if as_json:
        found = SimulateOutput.model_validate({**run.figures, "goodput_by_class": run.kept or None})
        click.echo(found.model_dump_json(indent=1, exclude_none=True))
    else:
        render.show(*render.simulated_tables(run))
