"""xgpt replan"""

from __future__ import annotations

from typing import Any

import click

from xgpt.cli import options
from xgpt.cli.options import json_option
from xgpt.cli.outputs import output_file, output_option, write


@options.command("replan")
@click.argument("plan_path", metavar="PLAN.JSON")
@output_option("Where to write the plan to run from now on, changed or not.")
@json_option
def command(plan_path: str, output: str | None, force: bool, as_json: bool, **_: Any) -> None:
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
        found = api.replan(given, **options.given())
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
