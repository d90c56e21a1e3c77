"""xgpt report"""

from __future__ import annotations

from typing import Any

import click

from xgpt.cli import options
from xgpt.cli.outputs import output_file, output_option, write


@options.command("report")
@click.argument("plan_path", metavar="PLAN.JSON")
@output_option("Where to write the page.", default="report.html")
def command(plan_path: str, output: str, force: bool, **_: Any) -> None:
    """Draw a plan, or a day's fleet, as one self-contained HTML page.

    \b
    Examples:
      xgpt report plan.json -o report.html
      xgpt report fleet.json -o day.html
    """
    from xgpt import api
    from xgpt.cli import render

    file = output_file(output)
    with render.at_work("simulating, and drawing"):
        page = api.report(plan_path, **options.given())
    write(file, page)
