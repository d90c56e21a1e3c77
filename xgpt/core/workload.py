"""Compute histograms and samples of request lengths, and arrival times. Arrivals have one rate or several stages, and
are Poisson or bursty.

Random numbers come from an explicit numpy Generator.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xgpt.core.errors import InputError
from xgpt.core.schema.model import ModelSpec
from xgpt.core.schema.workload import (
    Constant,
    Histogram,
    LengthDistribution,
    LogNormal,
    TruncatedNormal,
    Uniform,
    Workload,
)
from xgpt.core.trace_blocks import TracePrefixes
from xgpt.core.turns import TraceSessions

logger = logging.getLogger(__name__)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BLOCK = 100

LARGEST_CV = 100
"""Largest coefficient of variation. Above it, nearly all gaps would be too short for a float."""

MAX_LENGTHS = 1 << 20
"""Largest number of lengths in a distribution, since a plan contains the probability of each."""

MOST_LEFT_OUT = 0.01
"""Largest share of a log's requests that may be left out since they do not fit into a model's context."""


class TraceLengths(NamedTuple):
    """The requests of a trace, in order of time if the trace has times.

    Attributes:
        input: numbers of prompt tokens. # [requests]
        output: numbers of output tokens. # [requests]
        timestamp_s: seconds since the first request, or None if the trace has no times. # [requests]
        begin_s: time of the first request in seconds since 1970, or None if not known.
        sessions: the sessions whose turns the requests are, or None if not known.
    """

    input: Ints
    output: Ints
    timestamp_s: Floats | None
    prefixes: TracePrefixes | None = None
    begin_s: float | None = None
    sessions: TraceSessions | None = None

    @property
    def turns(self) -> TraceSessions:
        """The sessions of a trace that has them."""
        assert self.sessions is not None
        return self.sessions

    def take(self, order: ArrayLike) -> TraceLengths:
        """Return the requests with these indices, in this order, with unchanged times."""
        places = np.asarray(order, dtype=np.int64)
        times = None if self.timestamp_s is None else self.timestamp_s[places]
        prefixes = None if self.prefixes is None else self.prefixes.take(places)
        sessions = None if self.sessions is None else self.sessions.take(places)
        return TraceLengths(self.input[places], self.output[places], times, prefixes, self.begin_s, sessions)

    def since(self, seconds: float) -> TraceLengths:
        """Return the requests from time `seconds` on. Their times count from the first of them."""
        if not seconds:
            return self
        if self.timestamp_s is None:
            raise InputError("since_s", seconds, "it needs a trace with times")
        first = int(np.searchsorted(self.timestamp_s, seconds))
        if first == len(self.input):
            raise InputError("since_s", seconds, f"its last request comes after {self.timestamp_s[-1]:.1f} s")
        found = self.take(np.arange(first, len(self.input)))
        assert found.timestamp_s is not None
        start_s = float(found.timestamp_s[0])
        begin_s = None if self.begin_s is None else self.begin_s + start_s
        return found._replace(timestamp_s=found.timestamp_s - start_s, begin_s=begin_s)


def workload_of_log(name: str, log: TraceLengths) -> Workload:
    return Workload(name=name, input=binned(log.input), output=binned(log.output))


def fits(inputs: Ints, outputs: Ints, name: str, max_context: int, field: str = "workload") -> NDArray[np.bool_]:
    """Return which requests of a log fit into a context with their outputs. The others are logged as left out, since a
    server refuses them. # each [requests]

    Raises:
        InputError: more than `MOST_LEFT_OUT` of the requests do not fit.
    """
    lengths = inputs + outputs
    fit: NDArray[np.bool_] = lengths <= max_context
    if beyond := len(fit) - int(fit.sum()):
        says = f"tokens with their outputs exceed the model's context of {max_context} ({beyond:,} of {len(fit):,})"
        says = f"requests of up to {lengths.max()} {says}"
        if beyond > MOST_LEFT_OUT * len(fit):
            raise InputError(field, name, f"{says}: leave them out, or give another model")
        logger.warning("%s: %s: they are left out", name, says)
    return fit


def grown(output: Ints, factor: float) -> Ints:
    return output if factor == 1 else np.maximum(1, np.round(factor * output)).astype(np.int64)


def within_context(workload: Workload, max_context: int) -> Workload:
    """Return the workload. Its longest outputs and inputs are shortened so that any input and output fit together.

    Each request fitted into the context, but the longest input and the longest output can be from different
    requests. A chat without a limit may use the whole context, so an output length that was allowed but never generated
    is cut first.
    """
    workload = workload.but(output=_without_idle_tail(workload, max_context))
    room = max_context - workload.output.lengths[-1]
    if workload.input.lengths[-1] <= room:
        return workload
    kept = [(n, p) for n, p in zip(workload.input.lengths, workload.input.probabilities, strict=True) if n < room]
    rest = 1 - sum(p for _, p in kept)
    lengths, probabilities = zip(*kept, (max(1, room), rest), strict=True)
    return workload.but(input=Histogram(lengths=lengths, probabilities=probabilities))


def fitting(workload: Workload, model: ModelSpec) -> Workload:
    """Return the workload `within_context` of a model, unchanged for an encoder-decoder, which holds them apart."""
    return workload if model.is_encoder_decoder else within_context(workload, model.max_context)


def _without_idle_tail(workload: Workload, max_context: int) -> Histogram:
    output = workload.output
    room = max_context - workload.input.lengths[-1]
    if output.probabilities[-1] or output.lengths[-1] <= room or len(output.lengths) == 1:
        return output
    lengths, probabilities = output.lengths[:-1], output.probabilities[:-1]
    if room > lengths[-1]:
        lengths, probabilities = (*lengths, room), (*probabilities, 0.0)
    return Histogram(lengths=lengths, probabilities=probabilities)


def histogram(distribution: LengthDistribution) -> Histogram:
    """Return the exact probability of every integer length.

    In a truncated normal distribution, the probability of length k is the mass over [k - 1/2, k + 1/2], divided by the
    mass from min - 1/2 to max + 1/2.

    Raises:
        InputError: min is above max, there are more than `MAX_LENGTHS` lengths, or a normal distribution has no mass
            between min and max.
    """
    if isinstance(distribution, Histogram):
        return distribution
    if isinstance(distribution, Constant):
        return Histogram(lengths=(distribution.value,), probabilities=(1.0,))
    if distribution.min > distribution.max:
        raise InputError("min", distribution.min, f"it must be at most max, which is {distribution.max}")
    lengths = range(distribution.min, distribution.max + 1)
    if len(lengths) > MAX_LENGTHS:
        says = f"a distribution may have at most {MAX_LENGTHS} lengths, starting at min {distribution.min}"
        raise InputError("max", distribution.max, says)
    if isinstance(distribution, Uniform):
        mass = np.ones(len(lengths))
    elif isinstance(distribution, LogNormal):
        edges = np.log(np.arange(distribution.min - 0.5, distribution.max + 1) / distribution.median)
        scaled = edges / (math.sqrt(2) * spread_of(distribution.median, distribution.p90))
        mass = np.diff([0.5 * math.erf(edge) for edge in scaled.tolist()])
    else:
        mass = np.array([_normal_mass(k, distribution) for k in lengths])
    if mass.sum() == 0:
        says = "it is too far from min and max: no length between them has any probability"
        raise InputError("mean", distribution, says)
    return Histogram(lengths=tuple(lengths), probabilities=tuple((mass / mass.sum()).tolist()))


P90 = NormalDist().inv_cdf(0.9)


def spread_of(median: float, p90: float) -> float:
    return math.log(p90 / median) / P90


def _normal_mass(k: int, normal: TruncatedNormal) -> float:
    scale = normal.sd * math.sqrt(2)
    low, high = (k - 0.5 - normal.mean) / scale, (k + 0.5 - normal.mean) / scale
    if low > 0:  # erfc of the smaller tail keeps its digits
        low, high = -high, -low
    return 0.5 * (math.erfc(-high) - math.erfc(-low))


def histogram_of(values: ArrayLike) -> Histogram:
    lengths, counts = np.unique(np.asarray(values, dtype=np.int64), return_counts=True)
    return Histogram(lengths=tuple(lengths.tolist()), probabilities=tuple((counts / counts.sum()).tolist()))


LEVELS = np.concatenate([0.0125 * np.arange(72), 0.9 + 0.01 * np.arange(8), 0.98 + 0.001 * np.arange(20)])
"""Lower edges of the bins of `binned`, as values of the cdf. Bins are narrower in the tail, on which bounds depend."""


def binned(values: ArrayLike) -> Histogram:
    """Return the histogram of observed lengths in at most a hundred bins, each at its mean length, and one for the
    longest. The mean of all lengths is kept. Few different lengths are not binned.
    """
    whole = histogram_of(values)
    if len(whole.lengths) <= len(LEVELS):
        return whole
    lengths, probabilities = np.array(whole.lengths), np.array(whole.probabilities)
    bins = np.searchsorted(LEVELS, np.cumsum(probabilities) - probabilities + 1e-12, side="right")
    bins[-1] = len(LEVELS) + 1
    mass, total = np.bincount(bins, probabilities), np.bincount(bins, probabilities * lengths)
    shares, rest = dict[int, float](), 0.0  # the tokens that rounding has left out so far
    for share, tokens in zip(mass.tolist(), total.tolist(), strict=True):
        if share > 0:
            length = max(round((tokens + rest) / share), max(shares, default=1))
            rest += tokens - share * length
            shares[length] = shares.get(length, 0.0) + share
    *body, last = shares  # the longest keeps its length
    shares[int(lengths[-1])] = shares.pop(last)
    assert not body or body[-1] < lengths[-1]
    return Histogram(lengths=tuple(shares), probabilities=tuple(shares.values()))


def decoding_share(workload: Workload) -> float:
    """Return the share of requests with more than one output token. Only these decode."""
    output = workload.output
    return 1 - output.probabilities[0] if output.lengths[0] == 1 else 1.0


def quantile(histogram: Histogram, q: float) -> int:
    """Return the smallest length that at least a share `q` of requests does not exceed."""
    if not 0 < q <= 1:
        raise InputError("quantile", q, "it must be above 0 and at most 1")
    # The cdf is a sum of rounded terms, so without the tolerance the next length could be found.
    index = np.searchsorted(np.cumsum(histogram.probabilities), q * (1 - 1e-12))
    return histogram.lengths[min(int(index), len(histogram.lengths) - 1)]


def sample(workload: Workload, n: int, rng: np.random.Generator, *, stratified: bool = True) -> tuple[Ints, Ints]:
    """Draw the input and output lengths of `n` requests independently.

    A stratified sample is drawn in blocks of 100 requests (the last block may be shorter). Each block is a Latin
    hypercube: its k requests take one uniform number from each of k strata of equal probability, in random order. Every
    request still follows the histogram, but the mean of a block varies far less than that of independent draws. So
    short simulations can be compared.

    Returns:
        Input and output lengths, each [n].
    """
    return (draw(workload.input, n, rng, stratified=stratified), draw(workload.output, n, rng, stratified=stratified))


def draw(histogram: Histogram, n: int, rng: np.random.Generator, *, stratified: bool = True) -> Ints:
    """Draw `n` lengths. See `sample` for stratified ones. # [n]"""
    if stratified:
        uniforms, sizes = np.empty(n), np.full(n, float(BLOCK))
        sizes[n - n % BLOCK :] = n % BLOCK
        strata = np.empty(n, np.int64)
        for start in range(0, n, BLOCK):
            end = min(start + BLOCK, n)
            strata[start:end] = rng.permutation(end - start)
            rng.random(out=uniforms[start:end])
        uniforms = (strata + uniforms) / sizes
    else:
        uniforms = rng.random(n)
    index = np.searchsorted(np.cumsum(histogram.probabilities), uniforms, side="right")
    # A uniform number may round to 1, while the cdf may end just below 1.
    last = int(np.flatnonzero(histogram.probabilities)[-1])
    return np.asarray(histogram.lengths, dtype=np.int64)[np.minimum(index, last)]


def gamma_arrivals(rate: float, n: int, cv: float, rng: np.random.Generator) -> Floats:
    """Return arrival times in seconds, with gamma-distributed gaps. # [n]

    Args:
        rate: mean requests a second.
        cv: coefficient of variation of the gaps.

    Raises:
        InputError: `rate` is not above 0 and finite, or `cv` is not above 0 and at most `LARGEST_CV`.
    """
    if not (rate > 0 and math.isfinite(rate)):
        raise InputError("arrival_rate_per_s", rate, "it must be a positive number")
    if not 0 < cv <= LARGEST_CV:
        raise InputError("burstiness", cv, f"it must be above 0 and at most {LARGEST_CV}")
    return np.cumsum(rng.gamma(1 / cv**2, cv**2 / rate, n))


class RateStage(NamedTuple):
    """A period with one arrival rate.

    Attributes:
        rate_per_s: mean requests a second.
        seconds: duration of the period. None means that it never ends.
    """

    rate_per_s: float
    seconds: float | None = None


@dataclass(frozen=True)
class ArrivalProcess:
    """A random process of arrivals at one rate, or at several rates in turn.

    Attributes:
        stages: one or several stages, in order. The rate of the last stage continues for ever.
        burstiness: coefficient of variation of the gaps between arrivals, which is 1 for Poisson arrivals and above 1
            for bursts.
    """

    stages: tuple[RateStage, ...]
    burstiness: float = 1.0

    @classmethod
    def at(cls, rate: float | Sequence[tuple[float, float | None]], burstiness: float = 1.0) -> ArrivalProcess:
        """Return the process with one rate, or with stages of (rate, seconds).

        Raises:
            InputError: a rate or a duration is not positive and finite, or a stage other than the last has no end.
        """
        given = [(rate, None)] if isinstance(rate, int | float) else list(rate)
        stages = tuple(RateStage(*rate_stage) for rate_stage in given)
        for stage in stages:
            for value in stage:
                if value is not None and not (value > 0 and math.isfinite(value)):
                    raise InputError("arrival_rate_per_s", value, "it must be a positive number")
        if not stages or any(stage.seconds is None for stage in stages[:-1]):
            raise InputError("arrival_rate_per_s", rate, "every stage except the last needs seconds: RATE:SECONDS,RATE")
        return cls(stages, burstiness)

    @property
    def num_requests(self) -> int | None:
        """Expected number of requests in all stages, or None if the last stage has no end."""
        total = sum(stage.rate_per_s * (stage.seconds or math.inf) for stage in self.stages)
        return max(1, round(total)) if math.isfinite(total) else None

    def mean_rate(self, n: int) -> float:
        seconds = 0.0
        left = float(n)
        for stage in self.stages:
            inside = left if stage.seconds is None else min(left, stage.rate_per_s * stage.seconds)
            seconds, left = seconds + inside / stage.rate_per_s, left - inside
        return n / (seconds + left / self.stages[-1].rate_per_s)

    def times(self, n: int, rng: np.random.Generator, share: float = 1.0) -> Floats:
        """Return the arrival times, in seconds, of the first n requests at a server that gets a share of all requests.
        # [n]
        """
        work = gamma_arrivals(1.0, n, self.burstiness, rng)
        rates = np.asarray([share * stage.rate_per_s for stage in self.stages])
        seconds = np.asarray([stage.seconds or 0.0 for stage in self.stages[:-1]])
        starts_s = np.concatenate([[0.0], np.cumsum(seconds)])
        reached = np.concatenate([[0.0], np.cumsum(rates[:-1] * seconds)])
        stage = np.searchsorted(reached, work, side="right") - 1
        times: Floats = starts_s[stage] + (work - reached[stage]) / rates[stage]
        return times
