"""What clients of the last half minute met: times from arrival, and the share of requests that kept their bounds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from xrunner.server.observe.watch import RECENT_S


class RecentTimes:
    """Times of the requests that ended in the last `RECENT_S` seconds, waiting included."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, float, float, bool | None]] = deque(maxlen=8192)

    def end(self, first_s: float, whole_s: float, *, is_kept: bool | None) -> None:
        """Note a request that has ended.

        Args:
            first_s, whole_s: from its arrival to its first token, and to its last.
            is_kept: whether it kept its bounds; None: it has none.
        """
        self._ended.append((time.perf_counter(), first_s, whole_s, is_kept))

    def figures(self) -> dict[str, float | None]:
        """Return the 99th percentiles of both times, s, and the share of requests that kept their bounds; None if no
        request of the last seconds tells."""
        since_s = time.perf_counter() - RECENT_S
        while self._ended and self._ended[0][0] < since_s:
            self._ended.popleft()
        kept = [is_kept for *_, is_kept in self._ended if is_kept is not None]
        return {
            "first_p99_s": _p99([first_s for _, first_s, _, _ in self._ended]),
            "whole_p99_s": _p99([whole_s for _, _, whole_s, _ in self._ended]),
            "share_kept": sum(kept) / len(kept) if kept else None,
        }


def _p99(seconds: Sequence[float]) -> float | None:
    return float(np.quantile(seconds, 0.99)) if seconds else None
