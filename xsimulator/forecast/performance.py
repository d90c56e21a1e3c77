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
    """Predictions for candidates, with one entry for each candidate.

    Attributes:
        throughput: requests a second.
        latency: time from admission to the last token of a request whose output length is at the quantile, s.
        ttft: time from admission to the first token, s.
        tpot: mean gap between the tokens of this request, s.
        itl_p99: 99th percentile of all gaps between tokens, s.
        encode_batch: mean number of prompts in a step that encodes.
        encode_tokens: mean number of prompt tokens in a step that encodes.
        decode_batch: number of decoding requests (under rra and static, when decoding begins).
        peak_requests: largest number of requests that have K/V at the same time.
        peak_tokens: number of tokens of the largest step.
        cycle: time from one encode step to the next, s.
        bubble: share of the time in which devices are idle.
        filling: under rra, seconds of a cycle in which the last decode steps before an encode phase are on other stages
            than the slowest. With more iterations in a phase, steps are smaller and this time is shorter.
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
        """Return the predictions for the candidates at `indices`, in this order."""
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
    """Return the standard normal deviate of the 99th percentile of all gaps, among the longest `share` of the gaps."""
    return ndtri(np.minimum(np.maximum(1 - 0.01 / np.maximum(share, 1e-9), 0.02), 0.99))
