"""Run `xgpt export`, and write its files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from xgpt import api
from xgpt.cli.outputs import unchecked_file, write
from xgpt.exporting.export import start_command

if TYPE_CHECKING:
    from xgpt.exporting.export import Target


def run(plan_path: str, target: Target, output: str, force: bool) -> None:
    """Run the command. See `xgpt.cli.commands`."""
    files = api.export(plan_path, target)
    written = {name: unchecked_file(Path(output) / name) for name in files}
    for name, file in written.items():
        file.check(files[name])  # all files are checked before the first is written
    for name, file in written.items():
        write(file, files[name])
    click.echo(f"next: run `{start_command(target)}` in {output}")
