"""Run `xgpt fleet`: write fleet.json, and print the day's tables."""

from __future__ import annotations

from typing import Any

import click

from xgpt import api
from xgpt.cli import options, render
from xgpt.cli.fleet_tables import summary
from xgpt.cli.outputs import output_file, write
from xgpt.core.io import dump_json

SHORT_S = 120
"""Length of an interval below which a note on the unit is printed, since such a number usually means minutes."""


def run(output: str, force: bool, as_json: bool, interval_s: float, **_: Any) -> None:
    """Run the command. See `xgpt.cli.commands`."""
    if interval_s < SHORT_S:
        click.echo(
            f"note: --interval {interval_s:g} means {interval_s:g} seconds; for minutes give {60 * interval_s:g}",
            err=True,
        )
    file = output_file(output)
    with render.progress_bar() as progress:
        found = api.fleet(**{"latency_bound_s": None, **options.given()}, progress=progress)
    text = dump_json(found)
    write(file, text)
    if as_json:
        click.echo(text, nl=False)
    else:
        render.show(*summary(found), f"next: xgpt report {output}")
