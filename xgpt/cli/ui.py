"""xgpt ui"""

from __future__ import annotations

import click

from xgpt.cli.values import Whole


@click.command("ui")
@click.option("--port", type=Whole(0, 65535), default=8470, help="Port of the page; 0: any free one.")
@click.option("--no-browser", is_flag=True, help="Only print the address.")
def command(port: int, no_browser: bool) -> None:
    """Plan on a local page: choose, drag the bound, and see at once what each policy does.

    \b
    Example:
      xgpt ui
    """
    from xgpt import api

    def show(url: str) -> None:
        click.echo(f"planning at {url} (Ctrl-C ends it)", err=True)
        if not no_browser:
            click.launch(url)

    api.ui(port=port, on_ready=show)
