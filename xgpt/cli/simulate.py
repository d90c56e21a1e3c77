"""xgpt simulate"""

from __future__ import annotations

from typing import Any

import click

from xgpt.cli.options import json_option, load_options
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
@click.option("--trace", metavar="FILE", help="Write the steps as a Chrome trace, which Perfetto opens.")
@json_option
def command(plan_path: str, trace: str | None, as_json: bool, **asked: Any) -> None:
    """Run a plan request by request on the simulated engine.

    \b
    Examples:
      xgpt simulate plan.json --requests 5000 --arrival-rate 1.5 --trace timeline.json
      xgpt simulate plan.json --arrival-rate 1:120,4:60,1:120
    """
    from pathlib import Path

    from xgpt import api
    from xgpt.cli import render
    from xgpt.core.io import write_atomic
    from xgpt.core.schema.outputs import SimulateOutput

    with render.at_work("simulating"):
        run = api.simulate(plan_path, **asked)
    if trace is not None:
        write_atomic(Path(trace), run.chrome_trace())
    if as_json:
        found = SimulateOutput.model_validate({**run.figures, "goodput_by_class": run.kept or None})
        click.echo(found.model_dump_json(indent=1, exclude_none=True))
    else:
        render.show(*render.simulated_tables(run))
