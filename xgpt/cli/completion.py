"""Run `xgpt completion`: print a shell's completion script."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from xgpt.cli import cli


def completion(shell: str) -> None:
    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(cli, {}, "xgpt", "_XGPT_COMPLETE").source())
