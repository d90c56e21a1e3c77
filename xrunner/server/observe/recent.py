"""Figures of the last half minute's requests: rates, times, and the share that kept their bounds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

RECENT_S = 30.0
"""Time over which recent rates and latencies are computed."""


class Ended(NamedTuple):
    """A request whose output was not cut off.

    Attributes:
        latency_s: time from its admission to its last token.
        first_s, whole_s: times from its arrival to its first token, and to its last token.
        is_kept: whether it kept its bounds, or None if it has none.
    """

    num_tokens: int
    latency_s: float
    first_s: float
    whole_s: float
    is_kept: bool | None


class Recent:
    """The requests that ended in the last `RECENT_S` seconds."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, Ended]] = deque(maxlen=8192)

    def end(self, request: Ended) -> None:
        """Note a request that has ended now."""
        self._ended.append((time.perf_counter(), request))

    def rate_per_s(self) -> float | None:
        """Return the requests that end per second, or None if too few have ended."""
        seconds = self._forget()
        return (len(self._ended) - 1) / seconds if len(self._ended) > 1 and seconds > 0 else None

    def figures(self) -> dict[str, float | None]:
        """Return the live page's figures, or None if no request has ended in the last seconds."""
        seconds = self._forget()
        ended = [request for _, request in self._ended]
        kept = [request.is_kept for request in ended if request.is_kept is not None]
        return {
            "throughput_rps": self.rate_per_s(),
            "output_tokens_per_s": sum(request.num_tokens for request in ended) / seconds if seconds else None,
            "latency_p50_s": _quantile((request.latency_s for request in ended), 0.5),
            "latency_p99_s": _quantile((request.latency_s for request in ended), 0.99),
            "first_p99_s": _quantile((request.first_s for request in ended), 0.99),
            "whole_p99_s": _quantile((request.whole_s for request in ended), 0.99),
            "share_kept": sum(kept) / len(kept) if kept else None,
        }

    def _forget(self) -> float:
        """Drop requests that ended more than `RECENT_S` ago; return the seconds that the others span."""
        now_s = time.perf_counter()
        while self._ended and self._ended[0][0] < now_s - RECENT_S:
            self._ended.popleft()
        return min(RECENT_S, now_s - self._ended[0][0]) if self._ended else RECENT_S


def _quantile(seconds: Iterable[float], quantile: float) -> float | None:
    values = list(seconds)
    return float(np.quantile(values, quantile)) if values else None
