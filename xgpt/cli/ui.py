"""Run `xgpt ui`, and print the page's address."""

from __future__ import annotations

import html
import tempfile

import click

from xgpt import api


def run(port: int, no_browser: bool) -> None:
    """Run the command. See `xgpt.cli.commands`."""
    # A file that only its owner can read, since all users can see a browser's arguments, with the token.
    with tempfile.NamedTemporaryFile("w", prefix="xgpt-ui-", suffix=".html") as opening:

        def show(url: str) -> None:
            click.echo(f"planning at {url} (Ctrl-C ends it)", err=True)
            if not no_browser:
                opening.write(f'<meta http-equiv="refresh" content="0; url={html.escape(url)}">\n')
                opening.flush()
                click.launch(opening.name)

        api.ui(port=port, on_ready=show)
