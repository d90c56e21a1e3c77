"""xgpt replan"""

from __future__ import annotations

from typing import Any

import click

from xgpt.cli.options import Decimal, json_option


@click.command("replan")
@click.argument("plan_path", metavar="PLAN.JSON")
@click.option(
    "--lengths",
    required=True,
    metavar="CSV|URL",
    help="CSV or JSON lines of requests, or a running server (its key in XGPT_API_KEY).",
)
@click.option("--profile", metavar="FILE", help="The plan's profile. Default: the one kept on this machine.")
@click.option(
    "--horizon",
    "horizon_s",
    type=Decimal(0, min_open=True),
    default=600,
    show_default=True,
    metavar="S",
    help="Time within which a change of placement must make up for its pause.",
)
@click.option(
    "--least-gain",
    type=Decimal(0, 1),
    default=0.05,
    show_default=True,
    metavar="SHARE",
    help="Least share of throughput that a change must gain.",
)
@click.option("-o", "--output", metavar="FILE", help="Where to write the plan to run from now on, changed or not.")
@json_option
def command(plan_path: str, output: str | None, as_json: bool, **asked: Any) -> None:
    """Say what changes under other lengths, what that gains and what the switch costs.

    For a running server, the plan that it runs at the moment is judged, which need not be PLAN.JSON any more.

    \b
    Examples:
      xgpt replan plan.json --lengths today.csv -o new.json
      xgpt replan plan.json --lengths http://127.0.0.1:8000
    """
    from pathlib import Path

    from xgpt import api
    from xgpt.app.report.plan_text import settings_text
    from xgpt.cli import render
    from xgpt.io import dump_json, load_json, write_atomic
    from xgpt.schema import Plan

    given = load_json(Path(plan_path), Plan, "plan")
    with render.at_work("judging what else could run"):
        found = api.replan(given, **asked)
    if output is not None:
        write_atomic(Path(output), dump_json(found.plan))
    if as_json:
        click.echo(dump_json(found.decision), nl=False)
    else:
        notes = render.decision_notes(found.decision, found.observation, output)
        if found.judged != given:
            says = f"{given.policy.kind}: {settings_text(given)}"
            notes.insert(0, f"judged: what the server runs by now, and not {plan_path} ({says})")
        render.show(render.decision_table(found.decision), *notes)
