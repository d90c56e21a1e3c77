"""Read request lengths and arrival times: distributions and traces in, numpy arrays out.

Every package may import this module; of the others it imports only the schema and the errors. Randomness enters as
an explicit numpy Generator.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xgpt.core.errors import InputError, reason_of
from xgpt.core.numbers import decimal, whole
from xgpt.core.prefixes import Prefixes, block_size_of, read_ids, read_output_ids
from xgpt.core.schema.workload import (
    Constant,
    Histogram,
    LengthDistribution,
    TruncatedNormal,
    Uniform,
    Workload,
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BLOCK = 100
"""Requests that a stratified sample draws together."""

LARGEST_LENGTH = 2**31 - 1
LARGEST_CV = 100
"""Above it, nearly all gaps would be too short for a float."""

_HEADERS = (
    ("input", "output", "timestamp"),
    ("contexttokens", "generatedtokens", "timestamp"),  # the Azure LLM inference trace
)
_JSON_KEYS = ("input_length", "output_length", "timestamp")
_HEADER_HELP = "the header must name the columns input,output or ContextTokens,GeneratedTokens"


class Row(NamedTuple):
    """A request as its file says it.

    Attributes:
        where: the place in the file.
        timestamp: None: none.
        fields: what else a line of JSON has.
    """

    where: str
    input: object
    output: object
    timestamp: object
    fields: Mapping[str, object] = MappingProxyType({})


class TraceLengths(NamedTuple):
    """Requests of a trace, in order of time where it has times.

    Attributes:
        input: prompt tokens, [requests].
        output: output tokens, [requests].
        timestamp_s: seconds since the first request, [requests]; None: the trace has no times.
        prefixes: what requests have in common; None: the trace does not say.
    """

    input: Ints
    output: Ints
    timestamp_s: Floats | None
    prefixes: Prefixes | None = None

    def take(self, order: ArrayLike) -> TraceLengths:
        """Return those of these requests, in this order; times stay what they are."""
        places = np.asarray(order, dtype=np.int64)
        times = None if self.timestamp_s is None else self.timestamp_s[places]
        prefixes = None if self.prefixes is None else self.prefixes.take(places)
        return TraceLengths(self.input[places], self.output[places], times, prefixes)


def histogram(distribution: LengthDistribution) -> Histogram:
    """Return the exact probability of every whole length.

    A truncated normal gives length k the mass of its density over [k - 1/2, k + 1/2], over min to max.

    Raises:
        InputError: min lies above max, or a normal leaves nothing between them.
    """
    if isinstance(distribution, Histogram):
        return distribution
    if isinstance(distribution, Constant):
        return Histogram(lengths=(distribution.value,), probabilities=(1.0,))
    if distribution.min > distribution.max:
        raise InputError("min", distribution.min, f"it must be at most max, which is {distribution.max}")
    lengths = range(distribution.min, distribution.max + 1)
    mass = (
        np.ones(len(lengths))
        if isinstance(distribution, Uniform)
        else np.array([_normal_mass(k, distribution) for k in lengths])
    )
    if mass.sum() == 0:
        raise InputError("mean", distribution, "it must lie nearer to min and max: no length has any weight")
    return Histogram(lengths=tuple(lengths), probabilities=tuple((mass / mass.sum()).tolist()))


def _normal_mass(k: int, normal: TruncatedNormal) -> float:
    """Mass of the uncut normal over [k - 1/2, k + 1/2]; erfc on the near side keeps the far tails' digits."""
    scale = normal.sd * math.sqrt(2)
    low, high = (k - 0.5 - normal.mean) / scale, (k + 0.5 - normal.mean) / scale
    if low > 0:
        low, high = -high, -low
    return 0.5 * (math.erfc(-high) - math.erfc(-low))


def histogram_of(values: ArrayLike) -> Histogram:
    """Return the histogram of observed lengths."""
    lengths, counts = np.unique(np.asarray(values, dtype=np.int64), return_counts=True)
    return Histogram(lengths=tuple(lengths.tolist()), probabilities=tuple((counts / counts.sum()).tolist()))


def standard_deviation(histogram: Histogram) -> float:
    """Standard deviation of a distribution."""
    middle = histogram.mean
    squares = sum(p * (x - middle) ** 2 for x, p in zip(histogram.lengths, histogram.probabilities, strict=True))
    return math.sqrt(squares)


def decoding_share(workload: Workload) -> float:
    """Share of the requests with more than one output token: the encode pass emits the first."""
    output = workload.output
    return 1 - output.probabilities[0] if output.lengths[0] == 1 else 1.0


def quantile(histogram: Histogram, q: float) -> int:
    """Return the smallest length with cdf >= q.

    Raises:
        InputError: q lies outside (0, 1].
    """
    if not 0 < q <= 1:
        raise InputError("quantile", q, "it must lie above 0 and at most at 1")
    # The cdf is a sum of rounded terms: without the tolerance 0.99 could miss its own length.
    index = np.searchsorted(np.cumsum(histogram.probabilities), q * (1 - 1e-12))
    return histogram.lengths[min(int(index), len(histogram.lengths) - 1)]


def sample(workload: Workload, n: int, rng: np.random.Generator, *, stratified: bool = True) -> tuple[Ints, Ints]:
    """Draw the lengths of `n` requests, inputs independent of outputs.

    Stratified, each run of 100 requests (and what remains) is a Latin hypercube: its k requests take one
    uniform from each of k strata of equal probability, in random order. Every request still follows the
    histogram, while the mean of a run varies far less than that of independent draws, so that short
    simulations compare fairly.

    Returns:
        Inputs and outputs, each [n].
    """
    return (
        _draw(workload.input, n, rng, stratified=stratified),
        _draw(workload.output, n, rng, stratified=stratified),
    )


def _draw(histogram: Histogram, n: int, rng: np.random.Generator, *, stratified: bool) -> Ints:
    if stratified:
        sizes = [min(BLOCK, n - start) for start in range(0, n, BLOCK)]
        uniforms = np.concatenate([np.empty(0), *((rng.permutation(k) + rng.random(k)) / k for k in sizes)])
    else:
        uniforms = rng.random(n)
    index = np.searchsorted(np.cumsum(histogram.probabilities), uniforms, side="right")
    # A uniform may round to 1, and the cdf may end just below it.
    last = int(np.flatnonzero(histogram.probabilities)[-1])
    return np.asarray(histogram.lengths, dtype=np.int64)[np.minimum(index, last)]


def poisson_arrivals(rate: float, n: int, rng: np.random.Generator) -> Floats:
    """Arrival times in seconds, [n], of a Poisson process of `rate` requests a second.

    Raises:
        InputError: the rate is not positive.
    """
    return gamma_arrivals(rate, n, 1.0, rng)


def gamma_arrivals(rate: float, n: int, cv: float, rng: np.random.Generator) -> Floats:
    """Arrival times in seconds, [n], with gamma-distributed gaps: bursts for `cv` above 1, Poisson at 1.

    Args:
        rate: requests a second in the mean.
        cv: coefficient of variation of the gaps.

    Raises:
        InputError: the rate or the variation is not above 0, or is too large.
    """
    if not (rate > 0 and math.isfinite(rate)):
        raise InputError("arrival_rate_per_s", rate, "it must be a positive number")
    if not 0 < cv <= LARGEST_CV:
        raise InputError("burstiness", cv, f"it must be above 0 and at most {LARGEST_CV}")
    return np.cumsum(rng.gamma(1 / cv**2, cv**2 / rate, n))


def read_lengths(path: Path, field: str = "workload") -> TraceLengths:
    """Read a trace; `field` names it in errors.

    Accepted: CSV with the header `input,output` (and perhaps `timestamp`) or the Azure trace's
    `TIMESTAMP,ContextTokens,GeneratedTokens`; and, in a file that ends in .jsonl, an object a line with
    `input_length`, `output_length` (and perhaps `timestamp`). Times are seconds or ISO 8601. Where lines have
    `hash_ids`, the file is in Mooncake's format, and times are milliseconds (`xgpt.core.prefixes`).

    Raises:
        InputError: naming the line and the value.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(field, str(path), f"it cannot be read: {reason_of(error)}") from None
    rows = _json_rows(path, text) if path.suffix == ".jsonl" else _csv_rows(path, text)
    inputs: list[int] = []
    outputs: list[int] = []
    times: list[float] = []
    prompts: list[tuple[int, ...]] = []
    answers: list[tuple[int, ...]] = []
    sizes: set[int] = set()
    for row in rows:
        inputs.append(_length(row.where, "input", row.input))
        outputs.append(_length(row.where, "output", row.output))
        if row.timestamp is not None:
            times.append(_seconds(row.where, row.timestamp))
        if len(times) not in (0, len(inputs)):
            raise InputError(row.where, row.timestamp, "either every request or none must have a timestamp")
        if "hash_ids" in row.fields:
            of_row = row.where, row.fields, inputs[-1], outputs[-1]
            prompts.append(read_ids(*of_row))
            answers.append(read_output_ids(*of_row))
            sizes.add(block_size_of(row.where, row.fields))
        if len(prompts) not in (0, len(inputs)) or len(sizes) > 1:
            raise InputError(row.where, "hash_ids", "every request or none must have them, of blocks of one size")
    if not inputs:
        raise InputError(field, str(path), "it holds no requests")
    prefixes = Prefixes(sizes.pop(), tuple(prompts), tuple(answers)) if prompts else None
    seconds = np.array(times) / (1000 if prefixes else 1) if times else None
    return _in_order(TraceLengths(np.array(inputs), np.array(outputs), seconds, prefixes))


def _in_order(lengths: TraceLengths) -> TraceLengths:
    if lengths.timestamp_s is None:
        return lengths
    order = np.argsort(lengths.timestamp_s, kind="stable")
    times = lengths.timestamp_s[order]
    prefixes = None if lengths.prefixes is None else lengths.prefixes.take(order)
    return TraceLengths(lengths.input[order], lengths.output[order], times - times[0], prefixes)


def _csv_rows(path: Path, text: str) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(text, newline=""))
    header: list[str] | None = None
    wanted: list[int] = []
    try:
        for cells in reader:
            where = f"{path}, line {reader.line_num}"
            if not any(cell.strip() for cell in cells):
                continue
            if header is None:
                header = [cell.strip().lower() for cell in cells]
                wanted = _columns(where, header, cells)
                continue
            if len(cells) != len(header):
                raise InputError(where, ",".join(cells), f"the header names {len(header)} columns")
            yield Row(where, cells[wanted[0]], cells[wanted[1]], cells[wanted[2]] if wanted[2:] else None)
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}", str(error), "it must be CSV") from None


def _columns(where: str, header: list[str], written: list[str]) -> list[int]:
    """Positions of input, output and, where there is one, timestamp."""
    for names in _HEADERS:
        if set(names[:2]) <= set(header):
            return [header.index(name) for name in names if name in header]
    raise InputError(where, ",".join(written), _HEADER_HELP)


def _json_rows(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(where, line.strip()[:80], f"it must be a JSON object: {error}") from None
        if not isinstance(row, dict):
            raise InputError(where, line.strip()[:80], "it must be a JSON object")
        for key in _JSON_KEYS[:2]:
            if key not in row:
                raise InputError(where, line.strip()[:80], f"{key} is missing")
        input_, output, time = (row.get(key) for key in _JSON_KEYS)
        yield Row(where, input_, output, time, row)


def _length(where: str, name: str, value: object) -> int:
    try:
        number = whole(value.strip()) if isinstance(value, str) else value
    except ValueError:
        number = None
    if isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= LARGEST_LENGTH:
        return number
    raise InputError(f"{where}, {name}", value, "it must be a whole number of tokens, at least 1")


def _seconds(where: str, value: object) -> float:
    """Seconds, as a number or since the epoch of a date and time."""
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            seconds = float(value)
        else:
            seconds = _parse_time(str(value).strip())
    except (ValueError, OverflowError):
        seconds = math.nan
    if not math.isfinite(seconds):
        raise InputError(f"{where}, timestamp", value, "it must be seconds, or a date and time in ISO 8601")
    return seconds


def _parse_time(text: str) -> float:
    try:
        return decimal(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
    # Without an offset, UTC: local time would bring in the jumps of daylight saving.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
