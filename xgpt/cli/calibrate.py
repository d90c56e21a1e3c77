"""Run `xgpt calibrate`, and print the errors before and after the fit."""

from __future__ import annotations

from typing import Any

import click

from xgpt import api
from xgpt.cli import options, render
from xgpt.cli.outputs import output_file, write
from xgpt.core.io import dump_json


def run(
    plan_path: str,
    measured: tuple[str, ...],
    output: str | None,
    engine_output: str | None,
    force: bool,
    as_json: bool,
    **_: Any,
) -> None:
    """Run the command. See `xgpt.cli.commands`."""
    file = None if output is None else output_file(output)
    engine_file = None if engine_output is None else output_file(engine_output, "engine_output")
    with render.at_work("simulating the measured loads"):
        found = api.calibrate(plan_path, measured, **options.given())
    if file is not None:
        write(file, dump_json(found.profile))
    if engine_file is not None:
        write(engine_file, dump_json(found.engine))
    if as_json:
        click.echo(dump_json(found.output), nl=False)
    else:
        render.show(*render.calibrated_tables(found.output))
