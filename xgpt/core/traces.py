"""Read traces (lengths and arrival times of requests) and Prometheus metrics pages (histograms of lengths).

Assumptions about a file, such as the unit of its times, are logged once.
"""

from __future__ import annotations

import logging
import math
import re
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

import numpy as np

from xgpt.core.errors import InputError
from xgpt.core.numbers import decimal, duration, whole
from xgpt.core.schema.workload import Histogram, Workload
from xgpt.core.trace_blocks import TracePrefixes, block_size_of, read_ids, read_output_ids
from xgpt.core.trace_rows import Row, is_metrics, plain, read_rows, read_text
from xgpt.core.workload import TraceLengths, histogram_of

logger = logging.getLogger(__name__)

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".txt", ".log", ".prom")
"""File name suffixes of traces and of pages of metrics. The suffix .gz may follow."""
LARGEST_LENGTH = 2**31 - 1
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
SPELLINGS = {"sec": "s", "seconds": "s", "millis": "ms", "milliseconds": "ms", "nano": "ns", "starttimeunixnano": "ns"}
WORDS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
EPOCHS = {"s": 1e9, "ms": 1e12, "us": 1e15, "ns": 1e18}
"""For each unit, the time from 1970 to 2001 as a number in this unit. A larger number in a trace must be a time since
1970.
"""
SECONDS_BY_FORMAT = ("arrived_at", "start_times", "created")
"""Names of times that Vidur, vLLM and OpenAI give in seconds."""
FEW_TIMES, LONG_GAP_S = 20, 100.0
"""The times of a trace are not in seconds if at least `FEW_TIMES` requests have times and their mean gap is longer than
`LONG_GAP_S`.
"""
NAME_IT = "name the column timestamp_ms or timestamp_s"
POINTS = 8
"""Number of lengths that represent a histogram's bucket."""
METRICS = {
    "input": ("request_prompt_tokens", "prompt_tokens_histogram", "tgi_request_input_length"),
    "output": ("request_generation_tokens", "generation_tokens_histogram", "tgi_request_generated_tokens"),
}
"""Names of length histograms in the metrics of vLLM, SGLang and TGI, without the engine's prefix."""


def is_trace(path: Path) -> bool:
    """Return whether a file is a trace or a metrics page, by the suffix of its name."""
    return path.with_suffix("").suffix in SUFFIXES if path.suffix == ".gz" else path.suffix in SUFFIXES


def trace_name(path: Path) -> str:
    """Return the name of a trace's workload: the file's name without suffixes."""
    return Path(path.stem).stem if path.suffix == ".gz" else path.stem


def read_workload(path: Path, field: str = "workload") -> Workload:
    """Return the length histograms of a trace or a metrics page.

    Raises:
        InputError: see `read_lengths`.
    """
    text = "" if path.suffix in (".csv", ".jsonl") else read_text(path, field)
    if is_metrics(text):
        return _read_metrics(path, text, field)
    lengths = read_lengths(path, field)
    return Workload(name=trace_name(path), input=histogram_of(lengths.input), output=histogram_of(lengths.output))


def has_requests(path: Path, field: str = "workload") -> bool:
    """Return whether a file is a trace, not a metrics page."""
    return is_trace(path) and (path.suffix in (".csv", ".jsonl") or not is_metrics(read_text(path, field)))


def read_lengths(path: Path, field: str = "workload") -> TraceLengths:
    """Return the requests of a trace, in order of time if the trace has times. `trace_rows` describes the file formats.

    Requests that failed, or have no input or output tokens, are left out. Times are numbers, or dates in ISO 8601 (in
    UTC if they have no offset). The unit of numbers is taken from the column's name (such as `timestamp_ms`).
    Otherwise, it is taken from their size if they are times since 1970, and otherwise from the file's format. Other
    numbers are taken as seconds.

    Args:
        field: name of the input in error messages.

    Raises:
        InputError: the file cannot be read or contains no such requests, a value is wrong (the message states its line
            or entry), or the unit is not stated and the guess is implausible. It is implausible if the mean gap would
            exceed `LONG_GAP_S` seconds, or if times are fractions in a format of whole milliseconds.
    """
    try:
        status = path.stat()
        return _read(path, field, status.st_mtime_ns, status.st_size)
    except OSError:
        return _read.__wrapped__(path, field, 0, 0)


@lru_cache(maxsize=4)
def _read(path: Path, field: str, changed_ns: int, size: int) -> TraceLengths:
    trace = read_rows(path, field)
    inputs: list[int] = []
    outputs: list[int] = []
    times: list[float] = []
    prompts: list[tuple[int, ...]] = []
    answers: list[tuple[int, ...]] = []
    sizes: set[int] = set()
    num_rows, num_failed, are_dates = 0, 0, False
    for row in trace.rows:
        num_rows += 1
        if row.has_failed:
            num_failed += 1
            continue
        tokens = [_length(row.where, name, value) for name, value in (("input", row.input), ("output", row.output))]
        if 0 in tokens:
            continue
        inputs.append(tokens[0])
        outputs.append(tokens[1])
        if row.timestamp is not None:
            time, is_date = _time(row.where, row.timestamp)
            if times and is_date != are_dates:
                raise InputError(
                    f"{row.where}, timestamp", row.timestamp, "give a number in every row, or a date in every row"
                )
            are_dates = is_date
            times.append(time)
        if len(times) not in (0, len(inputs)):
            raise InputError(row.where, row.timestamp, "either all requests must have a timestamp, or none")
        if "hash_ids" in row.fields:
            of_row = row.where, row.fields, inputs[-1], outputs[-1]
            prompts.append(read_ids(*of_row))
            answers.append(read_output_ids(*of_row))
            sizes.add(block_size_of(row.where, row.fields))
        if len(prompts) not in (0, len(inputs)) or len(sizes) > 1:
            raise InputError(
                row.where,
                "hash_ids",
                "all requests must have hash_ids for blocks of the same size, or none may have them",
            )
    if not inputs:
        if not num_rows:
            accepted = "it contains no requests: give at least one row of input and output tokens"
            raise InputError(field, str(path), accepted)
        accepted = (
            f"none of its {num_rows} rows is a successful request with input and output tokens: give a log with some"
        )
        raise InputError(field, str(path), accepted)
    notes = list(trace.notes)
    if num_failed:
        notes.append(f"{num_failed} of {num_rows} rows have an HTTP status of 400 or more and are left out")
    if (left_out := num_rows - num_failed - len(inputs)) > 0:
        notes.append(f"{left_out} of {num_rows} rows have no input or no output tokens and are left out")
    if times and plain(trace.time_name).startswith("request_time") and not are_dates and min(times) < EPOCHS["s"]:
        notes.append(f"`{trace.time_name}` is read as a duration, as in nginx's logs: name times of arrival timestamp")
        times = []
    prefixes = TracePrefixes(sizes.pop(), tuple(prompts), tuple(answers)) if prompts else None
    seconds = None
    if times:
        unit, is_known = ("s", True) if are_dates else _unit(path, field, trace.time_name, times, row, prefixes)
        seconds = UNITS[unit] * np.array(times)
        if not is_known:
            span_s = float(seconds.max() - seconds.min())
            rate = f", {(len(times) - 1) / span_s:.3g} a second" if span_s > 0 else ""
            if unit == "s" and len(times) >= FEW_TIMES and span_s > LONG_GAP_S * len(times):
                accepted = (
                    f"its unit is not known: the log would span {duration(span_s)} if the times are seconds, "
                    f"{duration(span_s / 1e3)} if they are milliseconds; {NAME_IT}"
                )
                raise InputError(field, f"{path.name}: {trace.time_name}", accepted)
            says = f"`{trace.time_name}` is read as {WORDS[unit]}: {len(times)} requests in {duration(span_s)}{rate}"
            notes.append(f"{says}; if that is wrong, state the unit in the name, as in timestamp_ms")
    for note in notes:
        logger.warning("%s: %s", path.name, note)
    lengths = _in_order(TraceLengths(np.array(inputs), np.array(outputs), seconds, prefixes))
    for of_all in lengths[:3]:
        if of_all is not None:
            of_all.setflags(write=False)  # cached for later calls
    return lengths


def _in_order(lengths: TraceLengths) -> TraceLengths:
    if lengths.timestamp_s is None:
        return lengths
    order = np.argsort(lengths.timestamp_s, kind="stable")
    times = lengths.timestamp_s[order]
    prefixes = None if lengths.prefixes is None else lengths.prefixes.take(order)
    return TraceLengths(lengths.input[order], lengths.output[order], times - times[0], prefixes)


def _unit(
    path: Path, field: str, name: str, times: list[float], row: Row, prefixes: TracePrefixes | None
) -> tuple[str, bool]:
    """Return the unit of a trace's times, and whether the column's name or the file's format states it."""
    written = plain(name)
    last = written.rpartition("_")[2]
    stated = SPELLINGS.get(last, last)
    if stated in UNITS:
        return stated, True
    earliest = min(times)
    if since_1970 := [unit for unit, least in EPOCHS.items() if earliest >= least]:
        return since_1970[-1], since_1970 == ["s"] and written in SECONDS_BY_FORMAT
    if prefixes is not None:
        return "ms", False
    if {"input_length", "output_length", "timestamp"} <= set(row.fields):  # Mooncake's names, in whole milliseconds
        if all(time == int(time) for time in times):
            return "ms", False
        accepted = (
            "its unit is not known: times of this format are whole milliseconds; name them timestamp_s if they are "
            "seconds"
        )
        raise InputError(field, f"{path.name}: {name}", accepted)
    return "s", written in SECONDS_BY_FORMAT


def _length(where: str, name: str, value: object) -> int:
    """Return a value as a number of tokens, or 0 if the value is empty."""
    if value is None or value == "":
        return 0
    number: object = value
    if isinstance(value, str):
        try:
            number = whole(value)
        except ValueError:
            try:
                number = decimal(value)
            except ValueError:
                number = None
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= LARGEST_LENGTH:
        return number
    raise InputError(f"{where}, {name}", value, f"it must be a whole number of tokens from 0 to {LARGEST_LENGTH:,}")


def _time(where: str, value: object) -> tuple[float, bool]:
    """Return a time as a number, and whether the time was a date. Dates become seconds since 1970."""
    time, is_date = math.nan, False
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            time = float(value)
        elif isinstance(value, str):
            try:
                time = decimal(value.strip())
            except ValueError:
                time, is_date = _date_s(value.strip()), True
    except (ValueError, OverflowError):
        pass
    if not math.isfinite(time):
        raise InputError(f"{where}, timestamp", value, "it must be a number, or a date and time in ISO 8601")
    return time, is_date


def _date_s(text: str) -> float:
    moment = datetime.fromisoformat(re.sub(r"\s*(UTC|GMT)$", "+00:00", text))
    # A date without an offset is in UTC, since local time would add the jumps of daylight saving time.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _read_metrics(path: Path, text: str, field: str) -> Workload:
    """Return the length histograms of a metrics page, with lengths spread evenly over each bucket."""
    histograms = {role: _buckets(text, names) for role, names in METRICS.items()}
    for role, (buckets, _) in histograms.items():
        if not buckets or not max(buckets.values()):
            accepted = (
                f"no request is counted in a histogram of {role} lengths, such as vllm:{METRICS[role][0]}: give the "
                "metrics page of a server that has answered requests"
            )
            raise InputError(field, str(path), accepted)
    spread = {role: _spread(buckets) for role, (buckets, _) in histograms.items()}
    for role, histogram in spread.items():
        mean = histograms[role][1]
        logger.warning(
            "%s: %s lengths are spread evenly over each bucket, which gives a mean of %.0f tokens%s; the correlation "
            "of inputs and outputs is not known",
            path.name, role, histogram.mean, "" if mean is None else f" (the page's own sum gives {mean:.0f})",
        )  # fmt: skip
    return Workload(name=trace_name(path), input=spread["input"], output=spread["output"])


def _buckets(text: str, names: tuple[str, ...]) -> tuple[dict[float, float], float | None]:
    """Return a Prometheus histogram's cumulative counts by upper limit, summed over labels, and its mean or None."""
    counts: dict[float, float] = {}
    totals = {"sum": 0.0, "count": 0.0}
    for name, kind, labels, value in re.findall(
        r"^(?:\w+:)?(\w+?)_(bucket|sum|count)(?:\{(.*?)\})?\s+([-+.\w]+)", text, flags=re.MULTILINE
    ):
        if name not in names:
            continue
        if kind in totals:
            totals[kind] += float(value)
        elif (limit := re.search(r'le="([^"]+)"', labels)) is not None:
            counts[float(limit[1])] = counts.get(float(limit[1]), 0.0) + float(value)
    return counts, totals["sum"] / totals["count"] if totals["count"] else None


def _spread(buckets: dict[float, float]) -> Histogram:
    """Return lengths spread evenly over these buckets (cumulative counts by upper limit). Lengths above the last finite
    limit count as this limit.
    """
    below, low = 0.0, 0
    weights: dict[int, float] = {}
    for limit, count in sorted(buckets.items()):
        high = int(limit) if math.isfinite(limit) else low
        if count > below and high:
            points = np.unique(np.linspace(min(low + 1, high), high, POINTS).round().astype(int)).tolist()
            for point in points:
                weights[point] = weights.get(point, 0.0) + (count - below) / len(points)
        below, low = max(below, count), high
    lengths = sorted(weights)
    total = sum(weights.values())
    return Histogram(lengths=tuple(lengths), probabilities=tuple(weights[length] / total for length in lengths))
