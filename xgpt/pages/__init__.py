"""Make HTML pages from one stylesheet, one frame, and a template for each page.

A page is a self-contained document: it loads no stylesheet, script or image from a network. All values in it are
escaped.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("xgpt", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, **values: object) -> str:
    """Return a page with escaped values. `template` is the name of a file in this directory that extends
    frame.html.
    """
    style = Markup(files(__name__).joinpath("style.css").read_text(encoding="utf-8"))
    return _environment().get_template(template).render(style=style, **values) + "\n"


def render_live(heading: str, warning: str | None = None) -> str:
    """Return the page of a running server. The page reads /live every two seconds, and can run no script but its own.

    Args:
        warning: text at the top of the page, or None.
    """
    return _render_alive("live", heading=heading, warning=warning)


def render_ui() -> str:
    return _render_alive("ui")


def _render_alive(name: str, **values: object) -> str:
    script = "".join(files(__name__).joinpath(f"{part}.js").read_text(encoding="utf-8") for part in ("draw", name))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return render(f"{name}.html", script=Markup(script), script_hash=f"sha256-{digest}", **values)
