"""Run `xgpt serve`."""

from __future__ import annotations

from typing import Any

import click

from xgpt import api
from xgpt.cli import options


def run(plan_path: str, answer_within_s: tuple[tuple[str, float], ...], dry_run: bool, force: bool, **_: Any) -> None:
    """Run the command. See `xgpt.cli.commands`."""

    def note(line: str) -> None:
        click.echo(line, err=True)

    within = dict(answer_within_s)
    if len(within) < len(answer_within_s):
        raise click.UsageError("--answer-within is given twice for the same requests; give it once")
    asked = options.given() | {"answer_within_s": within.pop("", None), "answer_within_of": within, "force": force}
    api.serve(plan_path, **asked, on_note=note)
    if dry_run:
        note(f"{plan_path} can be served here")
