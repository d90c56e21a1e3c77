"""Limit the event loop's share of the processor, so that a flood of requests leaves the engine its own.

Both are threads of one interpreter. The event loop gives the interpreter's lock up at each read and write and takes it
back before another thread wakes up, so a loop that always has something to do keeps the engine from nearly all of its
time: 40 connections that got nothing but 429 or 401 slowed it down by a factor of thirty.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable

WORK_S = 0.01
"""Least time for which the event loop works without a pause before it rests as long."""


class RestingSelector(selectors.DefaultSelector):
    """Selects what can be read and written; rests first if the loop has worked too long without a pause.

    Time in which the loop has waited for something to do counts as rest, so one that works half of the time or less
    never rests in addition.

    Args:
        is_needed: whether another thread has work to do.
    """

    def __init__(self, is_needed: Callable[[], bool]) -> None:
        super().__init__()
        self._is_needed = is_needed
        self._worked_s = 0.0
        """Seconds of work less seconds of waiting."""
        self._woken_s = time.perf_counter()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready, as any selector."""
        begin_s = time.perf_counter()
        self._worked_s += begin_s - self._woken_s
        if self._worked_s > WORK_S and self._is_needed():
            time.sleep(self._worked_s)
        ready = super().select(timeout)
        self._woken_s = time.perf_counter()
        self._worked_s = max(0.0, self._worked_s - (self._woken_s - begin_s))
        return ready


def event_loop(is_needed: Callable[[], bool]) -> asyncio.AbstractEventLoop:
    """Return a loop that rests while another thread has work to do."""
    return asyncio.SelectorEventLoop(RestingSelector(is_needed))
