"""How fast an engine takes up those who wait, measured while somebody does."""

from __future__ import annotations

from math import exp

ENOUGH = 0.25
"""Share of its memory that must be filled before the rate is told."""


class Backlog:
    """Requests that began over the time in which others waited behind them: the rate at which a queue gets shorter.

    Args:
        memory_s: after so many seconds in which somebody waited, what was seen before counts a third.
    """

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._begun = self._seconds = 0.0
        self._last_s: float | None = None
        """End of the last step that left somebody waiting; None: the last step left nobody."""

    def note(self, now_s: float, num_begun: int, *, is_left: bool) -> None:
        """A step has ended that so many requests began with.

        Args:
            is_left: somebody waits on.
        """
        if self._last_s is not None:
            span_s = now_s - self._last_s
            kept = exp(-span_s / self._memory_s)
            self._begun = self._begun * kept + num_begun
            self._seconds = self._seconds * kept + span_s
        self._last_s = now_s if is_left else None

    @property
    def rate_per_s(self) -> float | None:
        """Requests that begin a second; None: too little time, or nobody, tells it."""
        return self._begun / self._seconds if self._begun and self._seconds >= ENOUGH * self._memory_s else None
