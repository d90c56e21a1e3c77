"""Describe how a page of results was made: machine, commit and date."""

from __future__ import annotations

import platform
import subprocess
from datetime import date
from importlib.metadata import version

from xgpt.core.machine import detect

PACKAGES = ("numpy", "numba", "scipy")


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def page(title: str, text: str, body: str) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    caption = f"{detect().device.name}, Python {platform.python_version()}, {versions}"
    return f"# {title}\n\n{text}\n\n{body.strip()}\n\n{caption}, commit `{commit()}`, {date.today()}.\n"
