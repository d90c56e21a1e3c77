"""xgpt report"""

from __future__ import annotations

from typing import Any

import click

from xgpt.cli.options import plan_profile_option
from xgpt.cli.values import Whole


@click.command("report")
@click.argument("plan_path", metavar="PLAN.JSON")
@click.option("-o", "--output", default="report.html", metavar="FILE", help="Where to write the page.")
@plan_profile_option
@click.option("--seed", type=Whole(0), default=0, help="Seed of the simulated requests.")
def command(plan_path: str, output: str, **asked: Any) -> None:
    """Draw a plan, or a day's fleet, as one self-contained HTML page.

    \b
    Examples:
      xgpt report plan.json -o report.html
      xgpt report fleet.json -o day.html
    """
    from pathlib import Path

    from xgpt import api
    from xgpt.cli import render
    from xgpt.core.io import check_writable, write_atomic

    check_writable(Path(output))
    with render.at_work("simulating, and drawing"):
        page = api.report(plan_path, **asked)
    write_atomic(Path(output), page)
    render.show(f"wrote {output}")
