"""xgpt completion"""

from __future__ import annotations

import click


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the script by which a shell completes commands, options and names.

    \b
    Examples:
      eval "$(xgpt completion bash)"
      xgpt completion fish > ~/.config/fish/completions/xgpt.fish
    """
    from click.shell_completion import get_completion_class

    from xgpt.cli import cli

    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(cli, {}, "xgpt", "_XGPT_COMPLETE").source())
