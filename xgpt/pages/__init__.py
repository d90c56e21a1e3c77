"""Pages for a browser: one stylesheet, one frame, and a template for each page.

Values enter; one self-contained HTML document leaves: it loads nothing from a network, and everything that is put
into a template is escaped. May be imported by xgpt, xgpt.cli and xrunner.server.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

if TYPE_CHECKING:
    from jinja2 import Environment


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
    """Return a whole page: `template` (a file of this directory that extends frame.html) with its values, escaped."""
    style = Markup(files(__name__).joinpath("style.css").read_text(encoding="utf-8"))
    return _environment().get_template(template).render(style=style, **values) + "\n"


def render_live(heading: str, warning: str | None = None) -> str:
    """Return the page of a running server: asks its /live every two seconds, and runs no other script than its own.

    Args:
        warning: what stands above everything else.
    """
    return _render_alive("live", heading=heading, warning=warning)


def render_ui() -> str:
    """Return the page on which one plans: asks its own server, and runs no other script than its own."""
    return _render_alive("ui")


def _render_alive(name: str, **values: object) -> str:
    """Return a page with the script of its name, behind what all scripts draw with."""
    script = "".join(files(__name__).joinpath(f"{part}.js").read_text(encoding="utf-8") for part in ("draw", name))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return render(f"{name}.html", script=Markup(script), script_hash=f"sha256-{digest}", **values)
