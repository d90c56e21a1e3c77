"""Observe the input and output lengths of a running engine's recent requests, and detect when these lengths change.

No clock and no random numbers are used, so the same requests in the same order give the same result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import ceil, inf, lgamma, log, log2

import numpy as np
import numpy.typing as npt
import scipy as sp

from xgpt.core.schema import Histogram, Observation, Workload
from xgpt.core.workload import binned

Array = npt.NDArray[np.float64]

WINDOW = 2048
HALF_LIFE = 1024
"""A request has half of its weight once this number of later requests have arrived."""
MIN_FINISHED = 100
MIN_CENSORED = 25
"""Smallest number of finished requests if most requests wait or are cancelled before their first token. It is then used
instead of `MIN_FINISHED`.
"""
RATE_REQUESTS = 64
"""The arrival rate is computed from this number of the latest requests. With fewer requests, the rate is unknown."""
LEAST_RATE_S, MOST_RATE_S = 1.0, 60.0
"""Shortest and longest time over which arrivals are counted. A batch of prompts arrives at one moment."""
MOST_ARRIVALS = 4096
FALSE_ALARM = 1e-4
"""Probability of a false alarm in one examination. 10,000 requests lead to hundreds of examinations."""
WINDOWS_A_DOUBLING = 2
"""Number of window sizes that are examined for each doubling of the size."""
LEVELS = (0.05, 0.2, 0.5, 0.8, 0.95)
"""Requests are counted between these quantiles of the planned lengths. The outer ones show changes in the tails."""
MOST_NATS = 500.0
"""If the negative logarithm of a probability is larger than this, its asymptote is used, since the probability would be
0 as a floating-point number.
"""
CERTAIN = 1e5
"""Weight, in requests, of planned lengths that count as certain. It is so high that two requests of an unplanned length
count as a change.
"""


@dataclass(slots=True)
class Seen:
    """A request of the window.

    Attributes:
        has_ended: whether the output is complete. It stays False for a cancelled request: its full output length is
            unknown, but is at least `generated`.
    """

    arrival_s: float
    input_length: int
    max_output: int
    generated: int = 0
    has_ended: bool = False


class LengthWindow:
    def __init__(self) -> None:
        self._seen: deque[Seen] = deque(maxlen=WINDOW)
        self._arrivals_s: deque[float] = deque(maxlen=MOST_ARRIVALS)
        self.num_arrived = 0

    def __len__(self) -> int:
        return len(self._seen)

    def arrive(self, arrival_s: float, input_length: int, max_output: int) -> Seen:
        seen = Seen(arrival_s, input_length, max_output)
        self._seen.append(seen)
        self._arrivals_s.append(arrival_s)
        self.num_arrived += 1
        return seen

    def arrival_rate_per_s(self, now_s: float) -> float:
        """Return the rate of the latest arrivals, in requests per second. The rate falls while no request arrives.

        Arrivals are counted since the `RATE_REQUESTS`-th latest one. The counted time is at least `LEAST_RATE_S` and at
        most `MOST_RATE_S`.
        """
        since_s = now_s - MOST_RATE_S
        if len(self._arrivals_s) >= RATE_REQUESTS:
            since_s = min(max(self._arrivals_s[-RATE_REQUESTS], since_s), now_s - LEAST_RATE_S)
        return sum(arrival_s >= since_s for arrival_s in self._arrivals_s) / (now_s - since_s)

    def forget_before(self, arrival_s: float) -> None:
        while self._seen and self._seen[0].arrival_s < arrival_s:
            self._seen.popleft()

    def requests(self) -> list[Seen]:
        """Return the requests of the window. Their token counts continue to grow."""
        return list(self._seen)


@dataclass(frozen=True, slots=True)
class Sample:
    """Requests of the window as columns. Later requests have more weight."""

    arrival_s: Array
    inputs: npt.NDArray[np.int_]
    outputs: npt.NDArray[np.int_]
    longest: npt.NDArray[np.int_]
    has_ended: npt.NDArray[np.bool_]
    weights: Array

    @classmethod
    def of(cls, requests: Sequence[Seen]) -> Sample:
        """This may run while another thread counts tokens, so `has_ended` is read first. Otherwise a request could
        count as finished with fewer tokens than it generated.
        """
        has_ended = np.array([seen.has_ended for seen in requests])
        return cls(
            arrival_s=np.array([seen.arrival_s for seen in requests]),
            inputs=np.array([seen.input_length for seen in requests]),
            outputs=np.array([seen.generated for seen in requests]),
            longest=np.array([seen.max_output for seen in requests]),
            has_ended=has_ended,
            weights=0.5 ** (np.arange(len(requests) - 1, -1, -1) / HALF_LIFE),
        )

    def __len__(self) -> int:
        return len(self.inputs)

    def tail(self, last: int) -> Sample:
        return Sample(*(getattr(self, field.name)[-last:] for field in fields(self)))

    @property
    def num_finished(self) -> int:
        return int(self.has_ended.sum())

    @property
    def weight(self) -> float:
        """Effective number of ended requests, given their weights, or 0 if no request has ended. Source: Kish, Survey
        Sampling, 1965.
        """
        return _effective(self.weights[self.has_ended])

    def input_histogram(self) -> Histogram:
        lengths, index = np.unique(self.inputs, return_inverse=True)
        return _histogram(lengths, np.asarray(np.bincount(index, self.weights), float))

    def output_histogram(self) -> Histogram:
        """Estimate the distribution of output lengths from finished and running requests.

        Long outputs end last, so mainly short outputs of recent requests have ended. The product-limit estimator also
        uses running requests: it only assumes that their outputs will be longer than at present. The probability of
        lengths above the longest observed one is assigned to the longest observed one. Source: Kaplan and Meier, JASA
        1958; Efron, 5th Berkeley Symposium, 1967 (the tail).
        """
        lengths, index = np.unique(self.outputs, return_inverse=True)
        total = np.bincount(index, self.weights, len(lengths))
        ended = np.bincount(index, self.weights * self.has_ended, len(lengths))
        at_risk = np.cumsum(total[::-1])[::-1]
        survival = np.cumprod(1 - np.minimum(ended / at_risk, 1.0))
        survival[-1] = 0.0
        mass = -np.diff(survival, prepend=1.0)
        return _histogram(lengths[mass > 0], mass[mass > 0])

    @property
    def known_to(self) -> float:
        """Length below which `output_histogram` is known: the longest output if it still runs, else inf."""
        longest = int(self.outputs.max())
        return inf if self.has_ended[self.outputs == longest].all() else longest

    def arrival_rate_per_s(self) -> float | None:
        latest = self.arrival_s[-RATE_REQUESTS:]
        span_s = float(latest[-1] - latest[0])
        return (len(latest) - 1) / span_s if span_s > 0 and len(latest) == RATE_REQUESTS else None


def _effective(weights: Array) -> float:
    return float(weights.sum() ** 2 / (weights**2).sum()) if len(weights) else 0.0


def _histogram(lengths: npt.NDArray[np.int_], mass: Array) -> Histogram:
    return Histogram(lengths=tuple(lengths.tolist()), probabilities=tuple((mass / mass.sum()).tolist()))


class Goodput:
    def __init__(self) -> None:
        self._kept: deque[bool] = deque(maxlen=WINDOW)

    def note(self, *, is_kept: bool) -> None:
        self._kept.append(is_kept)

    @property
    def share(self) -> float | None:
        return sum(self._kept) / len(self._kept) if len(self._kept) >= MIN_FINISHED else None

    def is_below(self, quantile: float) -> bool:
        count, broken = len(self._kept), len(self._kept) - sum(self._kept)
        expected = (1 - quantile) * count
        return count >= MIN_FINISHED and broken > expected and 1 - sp.special.gammaincc(broken, expected) < FALSE_ALARM


def observe(
    sample: Sample, planned: Workload, step_ratio: float | None = None, slowdown: float | None = None
) -> Observation:
    inputs, outputs = sample.input_histogram(), sample.output_histogram()
    return Observation(
        workload=Workload(name="observed", input=inputs, output=_reaching(outputs, int(sample.longest.max()))),
        num_requests=len(sample),
        num_finished=sample.num_finished,
        weight=sample.weight,
        arrival_rate_per_s=sample.arrival_rate_per_s(),
        input_distance=wasserstein(inputs, planned.input),
        output_distance=wasserstein(outputs, planned.output),
        step_ratio=step_ratio,
        slowdown=slowdown,
    )


def observe_lengths(inputs: npt.ArrayLike, outputs: npt.ArrayLike, planned: Workload) -> Observation:
    observed = Workload(name="observed", input=binned(inputs), output=binned(outputs))
    return Observation(
        workload=observed,
        num_requests=len(np.atleast_1d(inputs)),
        num_finished=len(np.atleast_1d(outputs)),
        weight=float(len(np.atleast_1d(outputs))),
        input_distance=wasserstein(observed.input, planned.input),
        output_distance=wasserstein(observed.output, planned.output),
    )


def _reaching(outputs: Histogram, longest: int) -> Histogram:
    """Return the histogram with the length `longest` added, at probability 0. K/V memory is reserved for it."""
    if longest <= outputs.lengths[-1]:
        return outputs
    return Histogram(lengths=(*outputs.lengths, longest), probabilities=(*outputs.probabilities, 0.0))


def _below(histogram: Histogram, lengths: npt.ArrayLike) -> Array:
    total = np.concatenate([[0.0], np.cumsum(histogram.probabilities)])
    return total[np.searchsorted(histogram.lengths, lengths, side="right")]


def wasserstein(a: Histogram, b: Histogram) -> float:
    lengths = np.union1d(a.lengths, b.lengths)
    return float(np.abs(_below(a, lengths) - _below(b, lengths))[:-1] @ np.diff(lengths.astype(float)))


def surprise(
    observed: Histogram, size: float, planned: Histogram, planned_size: float = CERTAIN, known_to: float = inf
) -> float:
    """Return the significance of the difference between observed and planned lengths.

    Requests are counted in bins between quantiles of the planned lengths, so a change of the spread is detected as
    early as a change of the mean. The test statistic is the log-likelihood ratio of these counts, in nats. If nothing
    has changed, twice its value follows a chi-squared distribution.

    Args:
        planned_size: number of requests from which the planned lengths were computed.
        known_to: length below which the observed histogram is known. Longer requests are counted in a single bin.

    Returns:
        The negative natural logarithm of the p-value: the probability of such a difference if nothing has changed.
            Source: Wilks, Annals of
        Mathematical Statistics, 1938.
    """
    lengths = planned.lengths
    at = np.minimum(np.searchsorted(np.cumsum(planned.probabilities), LEVELS), len(lengths) - 1)
    edges = np.unique([lengths[0] - 1, *(lengths[i] for i in at), lengths[-1]])
    edges = edges[edges < known_to]
    counted, expected = (np.diff(_below(h, edges), prepend=0.0, append=1.0) for h in (observed, planned))
    return surprise_of_shares(counted, expected, size, planned_size)


def shares_up_to(histogram: Histogram, edges: npt.ArrayLike) -> Array:
    """Return the probability of a length up to each edge, beyond the edge before it. # [edges]"""
    found: Array = np.diff(_below(histogram, edges), prepend=0.0)
    return found


def surprise_of_shares(counted: Array, expected: Array, size: float, planned_size: float = CERTAIN) -> float:
    counted, expected = np.maximum(counted, 0.0), np.maximum(expected, 0.0)  # sums may differ from 1 by rounding
    pooled = (size * counted + planned_size * expected) / (size + planned_size)
    nats = max(0.0, size * _divergence(counted, pooled) + planned_size * _divergence(expected, pooled))
    freedom = (np.count_nonzero(pooled > 1e-12) - 1) / 2
    if not freedom:
        return 0.0
    if nats > MOST_NATS:
        return nats - (freedom - 1) * log(nats) + lgamma(freedom)
    return -log(sp.special.gammaincc(freedom, nats))


def _divergence(shares: Array, to: Array) -> float:
    some = shares > 0
    return float(shares[some] @ np.log(shares[some] / to[some]))


class ChangeDetector:
    """Detects whether request lengths differ from a plan's lengths, and from which request on.

    Each examination compares the last 64, 91, 128, 181, ... requests with the planned lengths (`surprise`). The number
    of requests with the most significant difference determines from which request on lengths differ.

    Args:
        weight: number of requests from which the planned lengths were computed. None means that the planned lengths
            count as certain.
    """

    def __init__(self, planned: Workload, weight: float | None = None) -> None:
        self.planned = planned
        self.weight = weight

    def look(self, whole: Sample) -> Sample | None:
        """Return the requests since the lengths changed. Return None if lengths have not changed, or if too few
        requests have ended since the change.

        If the planned lengths come from few requests, all requests are returned once there are twice as many.
        """
        if whole.num_finished < MIN_CENSORED:
            return None
        most = ceil(WINDOWS_A_DOUBLING * log2(max(1.0, len(whole) / 64)))
        sizes = [round(64 * 2 ** (i / WINDOWS_A_DOUBLING)) for i in range(most + 1)]
        score, size = max((self._score(whole.tail(size)), size) for size in sizes)
        if score > log(2 / FALSE_ALARM):
            around = {round(size * 2 ** (i / 8)) for i in range(-8, 9)}
            _, since = max((self._score(whole.tail(size)), size) for size in around)
            sample = whole.tail(since)
            # While requests wait, few finish. Inputs and unfinished outputs then show the change earlier.
            return sample if sample.num_finished >= _enough(sample) else None
        return whole if self.weight is not None and whole.weight >= 2 * self.weight else None

    def _score(self, sample: Sample) -> float:
        inputs, outputs, weight = self.planned.input, self.planned.output, self.weight or CERTAIN
        score = surprise(sample.input_histogram(), _effective(sample.weights), inputs, weight)
        # A running output that is longer than any planned output shows a change as clearly as a finished one.
        known = sample.has_ended | (sample.outputs > outputs.lengths[-1])
        if known.sum() >= MIN_FINISHED // 2:
            size = _effective(sample.weights[known])
            score = max(score, surprise(sample.output_histogram(), size, outputs, weight, sample.known_to))
        return score


def _enough(sample: Sample) -> int:
    """Fewer are enough if most requests have not started."""
    return MIN_CENSORED if np.count_nonzero(sample.outputs == 0) > len(sample) / 2 else MIN_FINISHED
