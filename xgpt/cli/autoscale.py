"""Run `xgpt autoscale`, and print its recommendations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from xgpt import api
from xgpt.cli import options, render
from xgpt.cli.options import refuse_idle
from xgpt.core.errors import InputError
from xgpt.core.io import load_json
from xgpt.core.schema.fleet import FleetPlan


def run(fleet_path: str, as_json: bool, simulated_trace: str | None, look_s: float, once: bool, **_: Any) -> None:
    """Run the command. See `xgpt.cli.commands`."""
    asked = options.given()
    if simulated_trace is not None:
        refuse_idle(set(asked) - {"look_s"}, "it cannot be combined with --simulate")
        with render.at_work("simulating"):
            figures: dict[str, Any] = dict(api.simulate_autoscale(fleet_path, simulated_trace, look_s=look_s).figures)
        rows = [[name, f"{value:.4g}"] for name, value in figures.items()]
        title, columns = "the day on the simulated clock", ["figure", "value"]
    elif once:
        refuse_idle({"host", "port"}, "it cannot be combined with --once, which publishes nothing")
        with render.at_work("reading the load"):
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
            raise InputError("--json", as_json, "it needs --simulate or --once")
        api.autoscale(fleet_path, **asked, on_note=lambda line: click.echo(line, err=True))
        return
    if as_json:
        click.echo(json.dumps(figures, indent=1))
    else:
        render.show(render.table(title, columns, rows))
