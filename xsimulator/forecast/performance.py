"""Define the predictions of the closed forms."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from xsimulator.costs.curves import Array


@dataclass(frozen=True, slots=True)
class Performance:
    """Predictions for a vector of candidates, one entry each.

    Attributes:
        throughput: requests a second.
        latency: time from admission to the last token of a request whose output has the quantile's length, s.
        ttft: time from admission to the first token, s.
        tpot: mean gap between that request's tokens, s.
        itl_p99: 99th percentile of all gaps between tokens, s.
        encode_batch: mean requests in a step that encodes.
        encode_tokens: mean prompt tokens in a step that encodes.
        decode_batch: requests in decode (rra, static: at a phase's start).
        peak_requests: largest number of requests that hold K/V at once.
        peak_tokens: tokens of the largest step.
        cycle: time from one encode step to the next, s.
        bubble: share of the devices' time in which their stage is idle.
        filling: part of a cycle, s, that the last decode steps before an encode phase spend on stages other than the
            slowest (rra). It falls as more iterations a phase make steps smaller.
    """

    throughput: Array
    latency: Array
    ttft: Array
    tpot: Array
    itl_p99: Array
    encode_batch: Array
    encode_tokens: Array
    decode_batch: Array
    peak_requests: Array
    peak_tokens: Array
    cycle: Array
    bubble: Array
    filling: Array

    def at(self, index: int) -> dict[str, float]:
        return {name: float(getattr(self, name)[index]) for name in self.__slots__}

    def take(self, indices: npt.NDArray[np.int_] | slice) -> Performance:
        """Return the predictions for some of the candidates, in this order."""
        return Performance(*(getattr(self, name)[indices] for name in self.__slots__))


def stack(size: int, parts: list[tuple[Any, Performance]]) -> Performance:
    columns = {}
    for field in fields(Performance):
        column = np.empty(size)
        for where, part in parts:
            column[where] = getattr(part, field.name)
        columns[field.name] = column
    return Performance(**columns)


def upper_deviate(share: npt.ArrayLike) -> Array:
    """Return the standard normal deviate that the 99th percentile of all gaps has among the longest `share` of them. It
    is at most 2.33.
    """
    return ndtri(np.minimum(np.maximum(1 - 0.01 / np.maximum(share, 1e-9), 0.02), 0.99))
