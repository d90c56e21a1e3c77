"""Run `xgpt report`, and write its page."""

from __future__ import annotations

from typing import Any

from xgpt import api
from xgpt.cli import options, render
from xgpt.cli.outputs import output_file, write


def run(plan_path: str, output: str, force: bool, **_: Any) -> None:
    """Run the command. See `xgpt.cli.commands`."""
    file = output_file(output)
    with render.at_work("simulating, and drawing"):
        page = api.report(plan_path, **options.given())
    write(file, page)
