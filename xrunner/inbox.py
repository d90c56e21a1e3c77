"""Define the queue through which other threads hand requests and orders to an engine. The engine's next step takes them
out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from xgpt.core.policies import Schedule
from xrunner.generation import Generation, Token

HandedIn = Generation | int | Schedule | Token
"""A new request, the id of a request to cancel, another plan's schedule, or the end of a request that cannot begin."""


class Inbox:
    """A queue that wakes the engine's thread. `interrupt` wakes it from waiting for its workers."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._queue: SimpleQueue[HandedIn] = SimpleQueue()
        self._wake = threading.Event()

    def put(self, handed_in: HandedIn) -> None:
        """Add an item. Any thread may call this."""
        self._queue.put(handed_in)
        self._wake.set()
        self._interrupt()

    def wait(self, timeout_s: float) -> None:
        """Wait until an item has been added, for at most `timeout_s`."""
        self._wake.wait(timeout_s)

    def drain(self) -> Iterator[HandedIn]:
        """Remove and yield the items, in order."""
        self._wake.clear()
        while not self._queue.empty():
            yield self._queue.get()
