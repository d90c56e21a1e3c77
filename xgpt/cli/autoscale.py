"""xgpt autoscale"""

from __future__ import annotations

from typing import Any

import click

from xgpt.cli import options
from xgpt.cli.options import json_option, refuse_idle


@options.command("autoscale")
@click.argument("fleet_path", metavar="FLEET.JSON")
@click.option(
    "--simulate",
    "simulated_trace",
    metavar="FILE",
    help="Instead, follow the recommendations over a day's trace on the simulated clock, and print the share of "
    "requests that keep the bounds, and the cost.",
)
@json_option
def command(fleet_path: str, as_json: bool, simulated_trace: str | None, look_s: float, once: bool, **_: Any) -> None:
    """Recommend how many replicas of each kind a live load takes, as a Prometheus metric for an autoscaler to act on.

    The metric is xgpt_replicas_wanted. It comes from the plan, the live load, and a forecast: the day in fleet.json at
    today's level, or today's trend where that has been more accurate. `xgpt export fleet.json --to k8s` writes
    autoscalers (HPA, KEDA) that act on it. This command starts and ends no replicas.

    \b
    Examples:
      xgpt autoscale fleet.json --scrape http://127.0.0.1:8000
      xgpt autoscale fleet.json --arrival-rate 12 --once
      xgpt autoscale fleet.json --simulate tomorrow.csv
    """
    import json
    from pathlib import Path

    from xgpt import api
    from xgpt.cli import render
    from xgpt.core.errors import InputError
    from xgpt.core.io import load_json
    from xgpt.core.schema.fleet import FleetPlan

    asked = options.given()
    if simulated_trace is not None:
        refuse_idle(set(asked) - {"look_s"}, "it does not go with --simulate")
        with render.at_work("simulating"):
            figures: dict[str, Any] = dict(api.simulate_autoscale(fleet_path, simulated_trace, look_s=look_s).figures)
        rows = [[name, f"{value:.4g}"] for name, value in figures.items()]
        title, columns = "the day on the simulated clock", ["figure", "value"]
    elif once:
        refuse_idle({"host", "port"}, "it does not go with --once, which publishes nothing")
        with render.at_work("looking at the load"):
            found = api.autoscale(fleet_path, **asked)
        if found is None:
            return
        kinds = load_json(Path(fleet_path), FleetPlan, "fleet").kinds
        wanted = {kind.name: number for kind, number in zip(kinds, found.replicas, strict=True)}
        figures = {"replicas": wanted, "need_per_s": found.need_per_s}
        rows = [[name, str(number)] for name, number in wanted.items()]
        title, columns = f"replicas for {found.need_per_s:.3g} requests/s", ["kind", "replicas"]
    else:
        if as_json:
            raise InputError("--json", as_json, "it goes with --simulate or --once")
        api.autoscale(fleet_path, **asked, on_note=lambda line: click.echo(line, err=True))
        return
    if as_json:
        click.echo(json.dumps(figures, indent=1))
    else:
        render.show(render.table(title, columns, rows))
