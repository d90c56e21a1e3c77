"""Find the request that makes steps fail, and give up if too many steps fail."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

from xgpt.core.errors import XgptError
from xgpt.core.processes import too_often

FAILURES = 3
PERIOD_S = 60.0
"""If more than `FAILURES` steps fail within this time, the engine gives up."""

T = TypeVar("T")


class EngineFailed(XgptError):
    """Steps fail repeatedly, whatever requests they contain."""


class Suspects(Generic[T]):
    """The requests of a step that has failed.

    These requests are encoded again one after the other, each after the previous one has generated the token at which
    the step failed. If a step then fails again, it contains only one of these requests, which is at fault.
    """

    def __init__(self) -> None:
        self._failures: list[float] = []
        self._suspected: set[int] = set()
        self._held: dict[int, T] = {}
        self._tried: int | None = None
        """The suspect that was admitted."""

    def __bool__(self) -> bool:
        return bool(self._held)

    def fail(self, error: Exception, under_way: Collection[int]) -> int | None:
        """Note that a step failed while these requests had unfinished steps. Return the request at fault, if it is
        known.

        Raises:
            EngineFailed: too many steps have failed recently.
        """
        if too_often(self._failures, FAILURES, PERIOD_S):
            last = f"{type(error).__name__}: {error}"
            raise EngineFailed(f"{FAILURES + 1} steps have failed within {PERIOD_S:.0f} s, the last: {last}") from error
        culprit = self._tried if self._tried in under_way else None
        if culprit is None and len(under_way) == 1 and self._suspected.issuperset(under_way):
            (culprit,) = under_way
        if culprit is None:
            self._suspected.update(under_way)
        return culprit

    def hold(self, id_: int, request: T) -> bool:
        """Hold a suspect back. Return False if the request is not a suspect."""
        if id_ in self._suspected:
            self._held[id_] = request
        return id_ in self._suspected

    def recall(self) -> list[T]:
        """Remove and return all requests that are held back, since workers were lost."""
        requests = list(self._held.values())
        self._held.clear()
        self._tried = None
        return requests

    def next(self) -> T | None:
        """Return the next suspect if it may be admitted now, or None."""
        if self._tried is not None or not self._held:
            return None
        self._tried = next(iter(self._held))
        return self._held.pop(self._tried)

    def clear(self, sampled: Collection[int]) -> None:
        """Clear these requests of suspicion, since they have generated a token."""
        if self._tried in sampled:
            self.forget(self._tried)

    def forget(self, id_: int | None) -> bool:
        """Forget a request that has ended or was cleared. Return whether it was held back."""
        if id_ == self._tried:
            self._tried = None
        if id_ is not None:
            self._suspected.discard(id_)
        return self._held.pop(id_, None) is not None  # type: ignore[arg-type]
