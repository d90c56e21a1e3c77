"""The queue of requests and orders that other threads submit to an engine. The engine's next step takes them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue

from xgpt.core.policies import Schedule
from xrunner.generation import Generation, Token

HandedIn = Generation | int | Schedule | Token
"""A new request, the id of a request to cancel, another plan's schedule, or the end of a request that cannot begin."""


class Inbox:
    """A queue that wakes the engine's thread."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[HandedIn] = SimpleQueue()
        self._wake = threading.Event()

    def put(self, handed_in: HandedIn) -> None:
        """Add an item; any thread may call this."""
        self._queue.put(handed_in)
        self._wake.set()

    def wait(self, timeout_s: float) -> None:
        """Wait until something is submitted, or the time is over."""
        self._wake.wait(timeout_s)

    def drain(self) -> Iterator[HandedIn]:
        """Yield the submitted items, in order."""
        self._wake.clear()
        while not self._queue.empty():
            yield self._queue.get()
