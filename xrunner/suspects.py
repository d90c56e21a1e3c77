"""Find the request that makes steps fail, and give up if too many steps fail."""

from __future__ import annotations

from collections.abc import Collection

from xgpt.core.errors import XgptError
from xgpt.core.policies import Pool, Request
from xgpt.core.processes import too_often

FAILURES = 3
PERIOD_S = 60.0
"""The engine gives up if more than `FAILURES` steps fail within this number of seconds."""


class EngineFailed(XgptError):
    """Steps fail repeatedly, whatever requests they contain."""


class Suspects:
    """The requests of a step that has failed.

    These requests are encoded again one after the other, each after the previous one has generated the token at which
    the step failed. If a step then fails again, it contains only one of these requests, which is at fault.
    """

    def __init__(self) -> None:
        self._failures: list[float] = []
        self._suspected: set[int] = set()
        self._held: dict[int, Request] = {}
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

    def recall(self, pool: Pool) -> list[Request]:
        """Return the requests of workers that were lost, in the order of their arrival. Hold suspects back."""
        requests = [*self._held.values(), *pool.running.values(), *pool.waiting]
        self._held = {request.id: request for request in requests if request.id in self._suspected}
        self._tried = None
        return [request for request in requests if request.id not in self._suspected]

    def next(self) -> Request | None:
        """Return the next suspect if it may be admitted now, or None."""
        if self._tried is not None or not self._held:
            return None
        self._tried = next(iter(self._held))
        return self._held.pop(self._tried)

    def clear(self, sampled: Collection[int]) -> None:
        """Clear these requests of suspicion, since they have generated a token."""
        if self._tried is not None and self._tried in sampled:
            self.forget(self._tried)

    def forget(self, id_: int) -> bool:
        """Forget a request that has ended or was cleared. Return whether it was held back."""
        if id_ == self._tried:
            self._tried = None
        self._suspected.discard(id_)
        return self._held.pop(id_, None) is not None
