"""xgpt replan"""

from __future__ import annotations

from typing import Any

import click

from xgpt.cli.options import json_option, plan_profile_option
from xgpt.cli.outputs import output_file, output_option, write
from xgpt.cli.values import Decimal


@click.command("replan")
@click.argument("plan_path", metavar="PLAN.JSON")
@click.option(
    "--lengths",
    required=True,
    metavar="CSV|URL",
    help="Trace of requests (CSV, JSON lines), or URL of a running server (its API key in XGPT_API_KEY).",
)
@plan_profile_option
@click.option(
    "--horizon",
    "horizon_s",
    type=Decimal(0, min_open=True),
    default=600,
    metavar="S",
    help="Seconds within which a change of placement must repay its pause.",
)
@click.option(
    "--least-gain",
    type=Decimal(0, 1),
    default=0.05,
    metavar="SHARE",
    help="Least gain of throughput, as a share, for which the plan is changed.",
)
@output_option("Where to write the plan to run from now on, changed or not.")
@json_option
def command(plan_path: str, output: str | None, force: bool, as_json: bool, **asked: Any) -> None:
    """Judge a plan under other lengths: the best plan for them, what it gains, and what the switch costs.

    With the URL of a server, the plan that it runs now is judged, which may differ from PLAN.JSON.

    \b
    Examples:
      xgpt replan plan.json --lengths today.csv -o new.json
      xgpt replan plan.json --lengths http://127.0.0.1:8000
    """
    from pathlib import Path

    from xgpt import api
    from xgpt.cli import render
    from xgpt.core.io import dump_json, load_json
    from xgpt.core.schema import Plan
    from xgpt.reporting.plan_text import settings_text

    file = None if output is None else output_file(output)
    given = load_json(Path(plan_path), Plan, "plan")
    with render.at_work("judging what else could run"):
        found = api.replan(given, **asked)
    if file is not None:
        write(file, dump_json(found.plan))
    if as_json:
        click.echo(dump_json(found.decision), nl=False)
    else:
        notes = render.decision_notes(found.decision, found.observation)
        if found.judged != given:
            says = f"{given.policy.kind}: {settings_text(given)}"
            notes.insert(0, f"judged: the plan that the server runs now, not {plan_path} ({says})")
        render.show(render.decision_table(found.decision), *notes)
