"""How fast an engine takes up those who wait, measured while it leaves somebody waiting."""

from __future__ import annotations

from math import exp

ENOUGH = 0.25
"""Share of its memory that must be filled before the rate is told."""
FORGOTTEN = 2.0
"""Memories without news after which nothing is told any more: who is turned away brings none."""


class Backlog:
    """The rate at which requests begin, over times in which more would have begun if the engine had let them.

    Such a time lies between two steps that let some in and left others waiting; where a step let all in, it says
    nothing of how many it could have taken.

    Args:
        memory_s: after so many seconds of such times, what was seen before counts a third.
    """

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._begun = self._seconds = 0.0
        self._since_s: float | None = None
        """End of the last step that let some in and left others; None: all have been let in since."""
        self._told_s = 0.0

    def note(self, now_s: float, num_begun: int, *, is_left: bool) -> None:
        """A step has ended that so many requests began with.

        Args:
            is_left: somebody waits on.
        """
        if not is_left:
            self._since_s = None
        elif num_begun:
            if self._since_s is not None:
                span_s = now_s - self._since_s
                kept = exp(-span_s / self._memory_s)
                self._begun = self._begun * kept + num_begun
                self._seconds = self._seconds * kept + span_s
                self._told_s = now_s
            self._since_s = now_s

    def rate_per_s(self, now_s: float) -> float | None:
        """Requests that begin a second; None: too little, or too long ago, tells it."""
        is_told = self._seconds >= ENOUGH * self._memory_s and now_s < self._told_s + FORGOTTEN * self._memory_s
        return self._begun / self._seconds if is_told else None
