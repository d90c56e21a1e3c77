"""xgpt report"""

from __future__ import annotations

import click

from xgpt.cli.options import Whole


@click.command("report")
@click.argument("plan_path", metavar="PLAN.JSON")
@click.option(
    "-o", "--output", default="report.html", show_default=True, metavar="FILE", help="Where to write the page."
)
@click.option("--profile", "profile_path", metavar="FILE", help="The profile that the plan was made from.")
@click.option("--seed", type=Whole(0), default=0, show_default=True, help="Seed of the simulated requests.")
def command(plan_path: str, output: str, profile_path: str | None, seed: int) -> None:
    """Draw a plan as one self-contained page, for a screen and for paper.

    \b
    Example:
      xgpt report plan.json -o report.html
    """
    from pathlib import Path

    import numpy as np

    from xgpt.app.profiles import profile_of
    from xgpt.app.reporting import report
    from xgpt.cli import render
    from xgpt.io import load_json, write_atomic
    from xgpt.schema import Plan

    plan = load_json(Path(plan_path), Plan, "plan")
    page = report(plan, profile_of(plan, profile_path), np.random.default_rng(seed))
    write_atomic(Path(output), page)
    render.show(f"wrote {output}")
