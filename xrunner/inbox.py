"""What other threads hand to an engine, until its next step takes it in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue

from xgpt.core.policies import Schedule
from xrunner.generation import Generation

HandedIn = Generation | int | Schedule
"""A new request, the id of one to cancel, or another plan's schedule."""


class Inbox:
    """A queue that wakes the engine's thread."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[HandedIn] = SimpleQueue()
        self._wake = threading.Event()

    def put(self, handed_in: HandedIn) -> None:
        """Hand something in, from any thread."""
        self._queue.put(handed_in)
        self._wake.set()

    def wait(self, timeout_s: float) -> None:
        """Block until something is handed in, or the time is over."""
        self._wake.wait(timeout_s)

    def drain(self) -> Iterator[HandedIn]:
        """Yield what has been handed in, in that order."""
        self._wake.clear()
        while not self._queue.empty():
            yield self._queue.get()
