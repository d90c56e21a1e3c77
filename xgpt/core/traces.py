"""Read traces (lengths and arrival times of requests), and the histograms of traces and metrics pages.

Assumptions about a file, such as the unit of its times, are logged once.
"""

from __future__ import annotations

import logging
import math
from array import array
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

import numpy as np

from xgpt.core.errors import InputError
from xgpt.core.numbers import decimal, duration, whole
from xgpt.core.schema.workload import Workload
from xgpt.core.trace_blocks import TracePrefixes, block_size_of, read_ids, read_output_ids
from xgpt.core.trace_files import TraceFormat, head_of, names
from xgpt.core.trace_metrics import read_metrics
from xgpt.core.trace_rows import Row, TraceRows, is_metrics, plain, read_rows
from xgpt.core.trace_turns import TurnRows
from xgpt.core.turns import FIRST
from xgpt.core.workload import Floats, TraceLengths, fits, grown, workload_of_log

logger = logging.getLogger(__name__)

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".txt", ".log", ".prom")
"""File name suffixes of traces and of pages of metrics. The suffix .gz may follow."""
LARGEST_LENGTH = 2**31 - 1
LATEST = 1e19
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
WORDS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
EPOCHS = {"s": 1e9, "ms": 1e12, "us": 1e15, "ns": 1e18}
"""For each unit, the time from 1970 to 2001 as a number in this unit. A larger number in a trace must be a time since
1970.
"""
FEW_TIMES, LONG_GAP_S, MOST_RATE = 20, 100.0, 500.0
"""A unit that no column's name states is wrong if at least `FEW_TIMES` requests have times, and their mean gap would be
longer than `LONG_GAP_S`, or more than `MOST_RATE` would arrive a second.
"""
MOST_IDS = 10_000_000
NAME_IT = "name the column timestamp_ms or timestamp_s"


def is_trace(path: Path) -> bool:
    """Return whether a file is a trace or a metrics page, by the suffix of its name."""
    return path.with_suffix("").suffix in SUFFIXES if path.suffix == ".gz" else path.suffix in SUFFIXES


def trace_name(path: Path) -> str:
    return Path(path.stem).stem if path.suffix == ".gz" else path.stem


def read_workload(path: Path) -> Workload:
    if is_metrics(head_of(path, "workload")):
        return read_metrics(path, trace_name(path), "workload")
    return workload_of_log(trace_name(path), read_lengths(path))


def has_requests(path: Path) -> bool:
    return is_trace(path) and not is_metrics(head_of(path, "workload"))


def read_lengths(
    path: Path, field: str = "workload", max_context: int | None = None, outputs: float = 1.0
) -> TraceLengths:
    """Return the requests of a trace, in order of time if the trace has times. `trace_rows` describes the file formats.

    Requests that failed, have no input or output tokens, or do not fit (see `fits`) are left out. Times are numbers, or
    dates in ISO 8601 (in UTC if they have no offset). The unit of numbers is taken from the column's name (such as
    `timestamp_ms`). Otherwise, it is taken from their size if they are times since 1970, and otherwise from the file's
    format. Other numbers are taken as seconds.

    Args:
        max_context: the context into which requests must fit with their outputs. None means that any length does.
        outputs: factor by which the outputs will have grown.

    Raises:
        InputError: the file cannot be read or contains no such requests, a value is wrong (the message states its line
            or entry), too many requests do not fit, or the unit is not stated and the guess is implausible: the mean
            gap would exceed `LONG_GAP_S` seconds, or times are fractions in a format of whole milliseconds.
    """
    try:
        status = path.stat()
        return _that_fit(path, field, status.st_mtime_ns, status.st_size, max_context, outputs)
    except OSError:
        return _read.__wrapped__(path, field, 0, 0)


@lru_cache(maxsize=4)
def _that_fit(
    path: Path, field: str, changed_ns: int, size: int, max_context: int | None, outputs: float
) -> TraceLengths:
    log = _read(path, field, changed_ns, size)
    if max_context is None:
        return log
    fit = fits(log.input, grown(log.output, outputs), trace_name(path), max_context, field)
    if fit.all():
        return log
    left = log.take(np.flatnonzero(fit))
    return left if left.timestamp_s is None else left.since(float(left.timestamp_s[0]))


@lru_cache(maxsize=4)
def _read(path: Path, field: str, changed_ns: int, size: int) -> TraceLengths:
    with ExitStack() as opened:
        return _collected(path, field, read_rows(path, field, opened))


def _collected(path: Path, field: str, trace: TraceRows) -> TraceLengths:
    columns = array("q"), array("q"), array("d")
    inputs, outputs, times = columns
    shared, turns = _HashIds(), TurnRows()
    num_rows, num_failed, are_dates, time_name, row = 0, 0, False, "", None
    for row in trace.rows:
        num_rows += 1
        if row.has_failed:
            num_failed += 1
            continue
        input_, output = _length(row.where, "input", row.input), _length(row.where, "output", row.output)
        if not input_ or not output:
            continue
        inputs.append(input_)
        outputs.append(output)
        delay = end = None
        if row.turn:
            delay, end = (
                None if row.turn.get(role) is None else _time(row.where, row.turn[role])[0] for role in ("delay", "end")
            )
        before = turns.add(row, delay, end)
        if row.timestamp is None and delay is not None and before != FIRST and before < len(times):
            times.append(times[before] + delay)
        if row.timestamp is not None:
            time, is_date = _time(row.where, row.timestamp)
            if times and is_date != are_dates:
                accepted = "give a number in every row, or a date in every row"
                raise InputError(f"{row.where}, timestamp", row.timestamp, accepted)
            if times and row.time_name != time_name:
                accepted = "these fields are all times: keep one of them in every row"
                raise InputError(str(path), " and ".join(sorted((row.time_name, time_name))), accepted)
            are_dates, time_name = is_date, row.time_name
            times.append(time)
        if len(times) not in (0, len(inputs)):
            raise InputError(row.where, row.timestamp, "either all requests must have a timestamp, or none")
        shared.add(row, input_, output, len(inputs))
    if row is None:
        raise InputError(field, str(path), "it contains no requests: give at least one row of input and output tokens")
    if not inputs:
        accepted = (
            f"none of its {num_rows} rows is a successful request with input and output tokens: give a log with some"
        )
        raise InputError(field, str(path), accepted)
    notes = list(trace.notes)
    if num_failed:
        notes.append(f"{num_failed} of {num_rows} rows have an HTTP status of 400 or more and are left out")
    if (left_out := num_rows - num_failed - len(inputs)) > 0:
        notes.append(f"{left_out} of {num_rows} rows have no input or no output tokens and are left out")
    if times and plain(time_name).startswith("request_time") and not are_dates and min(times) < EPOCHS["s"]:
        notes.append(f"`{time_name}` is read as a duration, as in nginx's logs: name times of arrival timestamp")
        times = array("d")
    seconds = None
    if times:
        seconds, note = _seconds(path, field, time_name, np.array(times), are_dates, row)
        notes += [note] if note else []
    raw, prompts = np.array(times) if times else None, np.array(inputs)
    unit_s = 1.0 if raw is None or seconds is None or not np.ptp(raw) else float(np.ptp(seconds) / np.ptp(raw))
    sessions = turns.sessions(prompts, np.array(outputs), raw, unit_s, shared.prefixes, notes)
    for note in notes:
        logger.warning("%s: %s", path.name, note)
    prefixes = shared.prefixes if (prompts == np.array(inputs)).all() else None
    lengths = _in_order(TraceLengths(prompts, np.array(outputs), seconds, prefixes, sessions=sessions))
    for of_all in lengths[:3]:
        if of_all is not None:
            of_all.setflags(write=False)  # cached for later calls
    return lengths


class _HashIds:
    def __init__(self) -> None:
        self._prompts: list[tuple[int, ...]] = []
        self._answers: list[tuple[int, ...]] = []
        self._sizes: set[int] = set()
        self._num_ids = 0

    def add(self, row: Row, input_: int, output: int, number: int) -> None:
        if "hash_ids" not in row.fields and not self._prompts:
            return
        if "hash_ids" in row.fields:
            size = block_size_of(row.where, row.fields, _format_of(row))
            self._prompts.append(read_ids(row.where, row.fields, input_, size))
            self._answers.append(read_output_ids(row.where, row.fields, input_, output, size))
            self._sizes.add(size)
            self._num_ids += len(self._prompts[-1]) + len(self._answers[-1])
            if self._num_ids > MOST_IDS:
                raise InputError(row.where, "hash_ids", f"a trace may have at most {MOST_IDS:,} ids: give a part of it")
        if len(self._prompts) not in (0, number) or len(self._sizes) > 1:
            accepted = "all requests must have hash_ids for blocks of the same size, or none may have them"
            raise InputError(row.where, "hash_ids", accepted)

    @property
    def prefixes(self) -> TracePrefixes | None:
        if not self._prompts:
            return None
        return TracePrefixes(next(iter(self._sizes)), tuple(self._prompts), tuple(self._answers))


def _format_of(row: Row) -> TraceFormat | None:
    return next((form for form in names().formats if form.fields <= row.fields.keys()), None)


def _seconds(path: Path, field: str, name: str, times: Floats, are_dates: bool, row: Row) -> tuple[Floats, str]:
    """Return a trace's times in seconds, and a note on their unit if no name states it."""
    form, number = _format_of(row), len(times)
    stated = names().units.get(plain(name).rpartition("_")[2])
    if are_dates or stated is not None:
        return times * SECONDS[stated or "s"] if not are_dates else times, ""
    since_1970 = [unit for unit, least in EPOCHS.items() if times.min() >= least]
    unit = since_1970[-1] if since_1970 else "s" if form is None else form.unit
    if form is not None and form.is_whole and not since_1970 and (times != np.floor(times)).any():
        accepted = (
            f"its unit is not known: times of {form.name}'s format are whole milliseconds; name them timestamp_s if "
            "they are seconds"
        )
        raise InputError(field, f"{path.name}: {name}", accepted)
    seconds = SECONDS[unit] * times
    span_s = float(np.ptp(seconds))
    if number >= FEW_TIMES and not since_1970 and not number / MOST_RATE < span_s <= LONG_GAP_S * number:
        spans = [f"{duration(span_s / SECONDS[unit] * SECONDS[each])} in {WORDS[each]}" for each in SECONDS]
        accepted = f"its unit is not known: the log's {number:,} requests span {', '.join(spans)}; {NAME_IT}"
        raise InputError(field, f"{path.name}: {name}", accepted)
    if form is not None and form.unit == unit and not form.is_whole:
        return seconds, ""
    rate = f", {(number - 1) / span_s:.3g} a second" if span_s > 0 else ""
    says = f"`{name}` is read as {WORDS[unit]}: {number} requests in {duration(span_s)}{rate}"
    return seconds, f"{says}; if that is wrong, state the unit in the name, as in timestamp_ms"


def _in_order(lengths: TraceLengths) -> TraceLengths:
    if lengths.timestamp_s is None:
        return lengths
    order = np.argsort(lengths.timestamp_s, kind="stable")
    times = lengths.timestamp_s[order]
    prefixes = None if lengths.prefixes is None else lengths.prefixes.take(order)
    begin_s = float(times[0]) if times[0] >= EPOCHS["s"] else None
    sessions = None if lengths.sessions is None else lengths.sessions.take(order)
    return TraceLengths(lengths.input[order], lengths.output[order], times - times[0], prefixes, begin_s, sessions)


def _length(where: str, name: str, value: object) -> int:
    if type(value) is str and len(value) < 10 and value.isdecimal() and value.isascii():
        return int(value)
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
    if type(value) is str and len(value) < 19 and value.isascii() and value.replace(".", "", 1).isdecimal():
        return float(value), False
    time, is_date = math.nan, False
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            time = float(value)
        elif isinstance(value, str):
            text = value.strip()
            if not (is_date := ":" in text):
                try:
                    time = decimal(text)
                except ValueError:
                    is_date = True
            if is_date:
                time = _date_s(text)
    except (ValueError, OverflowError):
        pass
    if not abs(time) <= LATEST:
        accepted = f"it must be a number of at most {LATEST:g}, or a date and time in ISO 8601"
        raise InputError(f"{where}, timestamp", value, accepted)
    return time, is_date


def _date_s(text: str) -> float:
    if text.endswith(("UTC", "GMT")):
        text = f"{text[:-3].rstrip()}+00:00"
    moment = datetime.fromisoformat(text)
    # A date without an offset is in UTC, since local time would add the jumps of daylight saving time.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
