"""xgpt autoscale"""

from __future__ import annotations

from typing import Any

import click

from xgpt.cli.options import json_option, refuse_idle
from xgpt.cli.values import Decimal, Whole


@click.command("autoscale")
@click.argument("fleet_path", metavar="FLEET.JSON")
@click.option(
    "--driver",
    type=click.Choice(["local", "kubernetes"]),
    default="local",
    help="Where replicas run. local: processes of `xgpt serve` on this machine, behind a front that routes requests. "
    "kubernetes: Deployments, scaled through the API server.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing.")
@click.option(
    "--look",
    "look_s",
    type=Decimal(1),
    default=15,
    metavar="S",
    help="Time between two looks at the load.",
)
@click.option(
    "--day-begins",
    metavar="HH:MM",
    help="Time of day, UTC, at which the planned day begins.  [default: the time at which this command starts]",
)
@click.option(
    "--port",
    type=Whole(1, 65535),
    default=8000,
    help="With --driver local: port of the front, on loopback.",
)
@click.option(
    "--state",
    default="fleet-state",
    metavar="DIR",
    help="With --driver local: directory of the fleet's state, which a restarted controller reads.",
)
@click.option(
    "--name",
    metavar="NAME",
    help="With --driver kubernetes: the fleet's name in the labels of its Deployments. Default: the plan's.",
)
@click.option(
    "--namespace", metavar="NAME", help="With --driver kubernetes. Default: that of the pod that runs this command."
)
@click.option(
    "--api-server",
    metavar="URL",
    help="With --driver kubernetes: URL of the API server, as from `kubectl proxy`. Default: that of the cluster that "
    "runs this command.",
)
@click.option(
    "--simulate",
    "trace",
    metavar="FILE",
    help="Instead, run the controller over a day's trace on the simulated clock, and print the share of requests that "
    "keep the bounds, and the cost.",
)
@json_option
def command(fleet_path: str, as_json: bool, trace: str | None, **asked: Any) -> None:
    """Fit a fleet to a live load: start replicas before the bounds are at risk, drain them when that saves cost.

    The forecast is the day in fleet.json at today's level, or today's trend where that has been more accurate. A
    controller that is restarted goes on with the fleet that it finds. Ctrl-C or SIGTERM ends the replicas on this
    machine once their requests have finished; on Kubernetes they stay.

    \b
    Examples:
      xgpt autoscale fleet.json --port 8000
      xgpt autoscale fleet.json --driver kubernetes --namespace llm --dry-run
      xgpt autoscale fleet.json --simulate tomorrow.csv
    """
    import json

    from xgpt import api
    from xgpt.cli import render
    from xgpt.core.errors import InputError

    if trace is not None:
        refuse_idle(set(asked) - {"look_s"}, "it does not go with --simulate")
        with render.at_work("simulating"):
            figures = api.simulate_autoscale(fleet_path, trace, look_s=asked["look_s"])
        if as_json:
            click.echo(json.dumps(figures.figures, indent=1))
        else:
            rows = [[name, f"{value:.4g}"] for name, value in figures.figures.items()]
            render.show(render.table("the controller on the simulated clock", ["figure", "value"], rows))
        return
    if as_json:
        raise InputError("--json", as_json, "it goes with --simulate")

    def note(line: str) -> None:
        click.echo(line, err=True)

    api.autoscale(fleet_path, **asked, on_note=note)
