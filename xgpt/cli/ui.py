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
    import html
    import tempfile

    from xgpt import api

    # A file that only its owner reads: a browser's arguments, with the token among them, are shown to all users.
    with tempfile.NamedTemporaryFile("w", prefix="xgpt-ui-", suffix=".html") as opening:

        def show(url: str) -> None:
            click.echo(f"planning at {url} (Ctrl-C ends it)", err=True)
            if not no_browser:
                opening.write(f'<meta http-equiv="refresh" content="0; url={html.escape(url)}">\n')
                opening.flush()
                click.launch(opening.name)

        api.ui(port=port, on_ready=show)
