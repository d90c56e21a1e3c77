"""Run `xgpt replan`, and print the decision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from xgpt import api
from xgpt.cli import options, render
from xgpt.cli.outputs import output_file, write
from xgpt.core.io import dump_json, load_json
from xgpt.core.schema import Plan
from xgpt.reporting.plan_text import settings_text


def run(plan_path: str, output: str | None, force: bool, as_json: bool, **_: Any) -> None:
    """Run the command. See `xgpt.cli.commands`."""
    file = None if output is None else output_file(output)
    given = load_json(Path(plan_path), Plan, "plan")
    with render.at_work("searching for better plans"):
        found = api.replan(given, **options.given())
    if file is not None:
        write(file, dump_json(found.plan))
    if as_json:
        click.echo(dump_json(found.decision), nl=False)
    else:
        notes = render.decision_notes(found.decision, found.observation)
        if found.judged.model_copy(update={"pinned": given.pinned}) != given:
            says = f"{given.policy.kind}: {settings_text(given)}"
            notes.insert(0, f"judged: the plan that the server runs now, which differs from {plan_path} ({says})")
        render.show(render.decision_table(found.decision), *notes)
