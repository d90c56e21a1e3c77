"""Define how long-running work reports its progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""A function of the number of finished parts, the number of all parts, and the name of the current part."""


def silent(done: int, total: int, what: str) -> None:
    """Report nothing."""
