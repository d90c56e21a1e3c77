"""xgpt fleet"""

from __future__ import annotations

from typing import Any

import click

from xgpt.cli import options
from xgpt.cli.options import json_option
from xgpt.cli.outputs import output_file, output_option, write


@options.command("fleet", most_used=("output",))
@output_option("Where to write the fleet.", default="fleet.json")
@json_option
def command(output: str, force: bool, as_json: bool, **_: Any) -> None:
    """Find how many replicas hold each interval of a day's load at the least cost, and write fleet.json.

    Replicas may be of several kinds. The day is simulated request by request on the fleet that is found, and, for
    comparison, on the cheapest one that never changes.

    \b
    Examples:
      xgpt fleet --trace day.csv --latency-bound 15 --model llama-3.1-8b --cluster h100x8
      xgpt fleet --trace day.yaml --latency-bound 15 --ttft 2 --model llama-3.1-8b \\
        --among h100x8=2.9,a100x16=1.4,l40sx8=0.9 --devices 64
    """
    from xgpt import api
    from xgpt.cli import render
    from xgpt.cli.fleet_tables import summary
    from xgpt.core.io import dump_json

    file = output_file(output)
    with render.progress_bar() as progress:
        found = api.fleet(**{"latency_bound_s": None, **options.given()}, progress=progress)
    text = dump_json(found)
    write(file, text)
    if as_json:
        click.echo(text, nl=False)
    else:
        render.show(*summary(found), f"next: xgpt report {output}")
