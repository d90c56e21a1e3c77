"""Run `xgpt bench`, and print predicted and measured figures."""

from __future__ import annotations

from typing import Any

import click

from xgpt import api
from xgpt.cli import options, render
from xgpt.cli.options import refuse_idle
from xgpt.cli.outputs import output_file, write
from xgpt.core.io import dump_json
from xgpt.core.schema import UrlReport


def run(target: str, calibrate: str | None, force: bool, as_json: bool, **_: Any) -> None:
    """Run the command. See `xgpt.cli.commands`."""
    if target.startswith(("http://", "https://")):
        refuse_idle(["engine"], "it applies only to a plan file: a server at a URL already runs an engine")
        refuse_idle(["saturated"], "it applies only to a plan file: for a URL give --arrival-rate or --concurrency")
    else:
        refuse_idle(
            ["concurrency"],
            "it applies only to a URL: for a plan file, as many requests as the plan can run are always outstanding",
        )
    file = None if calibrate is None else output_file(calibrate, "calibrate")
    with render.progress_bar() as progress:
        found = api.bench(target, progress=progress, calibrate=calibrate is not None, **options.given())
    report = found.report
    if file is not None and found.profile is not None:
        write(file, dump_json(found.profile))
    if as_json:
        click.echo(dump_json(report), nl=False)
    elif isinstance(report, UrlReport):
        render.show(*render.url_report(report))
    else:
        render.show(*render.bench_report(report))
