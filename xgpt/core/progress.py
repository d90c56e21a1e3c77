"""How long work reports its progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called with the number of parts that are done, the number of all parts, and the name of the current one."""
