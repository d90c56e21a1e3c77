"""The load of a log: all its requests, as they are or grown, in windows of time.

A verdict on a log is a verdict on its windows: a fleet that keeps its bounds on average may break them every noon.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from xgpt.core.errors import InputError
from xgpt.core.schema.recommendation import LostSpan
from xgpt.core.schema.workload import Histogram, Workload
from xgpt.core.workload import TraceLengths, grown, workload_of_log

WINDOWS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 6 * 3600.0, 86_400.0)
"""Lengths of windows. A log has windows of the shortest length with which there are at most `MOST_WINDOWS`, and
`LEAST_MEAN` requests in the mean window.
"""
MOST_WINDOWS, LEAST_MEAN = 200, 50
LEAST_REQUESTS = 20
"""A window with fewer requests is never the worst or the busiest, since its figures are mostly chance."""
DEVIATIONS = 3.0
APART_S = 60.0
"""A copy of a request, where the load has grown, arrives within this time of it: other users do not come at the same
moment, but at the same time of day.
"""


Numbers = TypeVar("Numbers", float, NDArray[np.float64])


class Growth(NamedTuple):
    """How a load differs from its log.

    Attributes:
        rate: factor on the number of requests. The time of day at which they arrive does not change.
    """

    rate: float = 1.0
    outputs: float = 1.0

    def trace(self, log: TraceLengths, seed: int = 0) -> TraceLengths:
        if self == NO_GROWTH:
            return log
        rng = np.random.default_rng(seed)
        if self.outputs != 1:
            log = log._replace(output=grown(log.output, self.outputs), prefixes=None)
        if self.rate == 1:
            return log
        copies = np.floor(self.rate + rng.random(len(log.output))).astype(np.int64)
        if not copies.any():
            copies[0] = 1
        chosen = np.repeat(np.arange(len(log.output)), copies)
        found = log.take(chosen)
        if found.timestamp_s is None:
            return found
        is_copy = np.concatenate([[False], chosen[1:] == chosen[:-1]])
        times = found.timestamp_s + np.where(is_copy, rng.uniform(-APART_S, APART_S, len(chosen)), 0.0)
        times = np.clip(times, log.timestamp_s[0], log.timestamp_s[-1])  # type: ignore[index]
        order = np.argsort(times, kind="stable")
        return found.take(order)._replace(timestamp_s=times[order] - times[order[0]])

    def workload(self, workload: Workload) -> Workload:
        if self.outputs == 1:
            return workload
        scaled = grown(np.asarray(workload.output.lengths), self.outputs)
        distinct, place = np.unique(scaled, return_inverse=True)
        shares = np.bincount(place, weights=workload.output.probabilities)
        output = Histogram(lengths=tuple(distinct.tolist()), probabilities=tuple((shares / shares.sum()).tolist()))
        return workload.but(output=output)


NO_GROWTH = Growth()


class Window(NamedTuple):
    """A part of a log's time.

    Attributes:
        name: the window in words, such as "12:15 to 12:30" (UTC) or, from its start, "+12:15 to +12:30".
        first, end: the requests that arrive in it, as a half-open range.
    """

    name: str
    start_s: float
    seconds: float
    first: int
    end: int

    @property
    def num_requests(self) -> int:
        return self.end - self.first

    @property
    def rate_per_s(self) -> float:
        return self.num_requests / self.seconds


class KeptByWindow(NamedTuple):
    """Which share of a load's requests keep the bounds.

    Attributes:
        worst: the window with the smallest share. None means that the load has no windows.
    """

    share: float
    worst: Window | None = None
    worst_share: float | None = None
    by_window: tuple[float | None, ...] = ()
    counts: tuple[int, ...] = ()

    def holds(self, quantile: float) -> bool:
        """Return whether the required share of requests keeps the bounds, of all requests and in each window. A window
        may miss it by what chance allows.
        """
        return self.share >= quantile and not any(self.lost(quantile))

    def lost(self, quantile: float) -> list[bool]:
        """Return whether each window misses the required share by more than chance allows."""
        windows = zip(self.by_window, self.counts, strict=True)
        return [share is not None and share < least_kept(quantile, count) for share, count in windows]


def least_kept(quantile: float, count: Numbers) -> Numbers:
    """Return the smallest share that chance explains, of so many requests of which a share `quantile` keeps the bounds:
    less by three standard deviations and one request, without which one late request of five would be no chance.
    """
    return quantile - DEVIATIONS * (quantile * (1 - quantile) / count) ** 0.5 - 1 / count


def kept_in(windows: Sequence[Window], is_kept: NDArray[np.bool_]) -> KeptByWindow:
    """Return the shares of requests that keep the bounds, of a whole load and by window.

    Args:
        is_kept: whether each request keeps the bounds. # [requests]
    """
    shares = {each: float(np.mean(is_kept[each.first : each.end])) for each in windows if each.num_requests}
    counted = [each for each in shares if each.num_requests >= LEAST_REQUESTS] or list(shares)
    worst = min(counted, key=lambda window: (shares[window], -window.num_requests)) if counted else None
    by_window, counts = tuple(map(shares.get, windows)), tuple(each.num_requests for each in windows)
    return KeptByWindow(float(np.mean(is_kept)), worst, None if worst is None else shares[worst], by_window, counts)


def _counted(windows: Sequence[Window]) -> Sequence[Window]:
    length = max((window.seconds for window in windows), default=0.0)
    enough = [each for each in windows if each.num_requests >= LEAST_REQUESTS and each.seconds >= length / 2]
    return enough or windows


def clock(seconds: float, length: float) -> str:
    """Return a time of day at which a window of this length begins or ends, as in 12:15."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}" + (f":{rest:02}" if length < 60 else "")


def _date(at_s: float, *, day: bool, form: str) -> str:
    moment = datetime.datetime.fromtimestamp(at_s, datetime.UTC)
    return f"{f'{moment:%b} {moment.day}, ' if day else ''}{moment:{form}}"


@dataclass(frozen=True, eq=False)
class LogLoad:
    """A log's requests in windows. Without times, there are no windows.

    Attributes:
        requests: the log's requests, as they are or grown.
        log: the whole log's requests before they have grown.
        whole: the load of which this is a part. None means that it is whole.
        since_s: time of the part's first request, from the whole load's first.
    """

    name: str
    requests: TraceLengths
    growth: Growth
    log: TraceLengths
    whole: LogLoad | None = None
    since_s: float = 0.0

    @classmethod
    def of(cls, name: str, log: TraceLengths, growth: Growth = NO_GROWTH) -> LogLoad:
        """Return the load of a log.

        Raises:
            InputError: its rate cannot grow, since the log has no times.
        """
        if growth.rate != 1 and log.timestamp_s is None:
            raise InputError("rate", f"x{growth.rate:g}", f"{name} has no times, so it has no rate: leave it out")
        log = log._replace(sessions=None)
        return cls(name, growth.trace(log), growth, log)

    def part(self, since_s: float = 0.0, count: int | None = None) -> LogLoad:
        """Return the load of at most `count` requests from a time on. It has the windows of the whole load, so that the
        same requests are judged alike however much of a log is replayed.
        """
        requests = self.requests.since(since_s)
        skipped = len(self.requests.input) - len(requests.input)
        if self.requests.timestamp_s is not None:
            since_s = self.since_s + float(self.requests.timestamp_s[skipped])
        requests = requests.take(np.arange(len(requests.input))[:count])
        return replace(self, requests=requests, whole=self.whole or self, since_s=since_s)

    @property
    def seconds(self) -> float:
        times = self.requests.timestamp_s
        return 0.0 if times is None else float(times[-1])

    @property
    def rate_per_s(self) -> float | None:
        return (len(self.requests.input) - 1) / self.seconds if self.seconds > 0 else None

    @property
    def workload(self) -> Workload:
        return workload_of_log(self.name, self.requests)

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        times, edges = self.requests.timestamp_s, self._edges_s
        if times is None or edges is None:
            return ()
        places = np.searchsorted(times, edges[1:-1]).tolist()
        starts, ends = np.maximum(edges[:-1], 0.0), np.minimum(edges[1:], self.seconds)
        parts = zip(starts.tolist(), ends.tolist(), [0, *places], [*places, len(times)], strict=True)
        return tuple(
            Window(self._named(number), start, max(end - start, 1e-9), first, last)
            for number, (start, end, first, last) in enumerate(parts)
        )

    @cached_property
    def _edges_s(self) -> NDArray[np.float64] | None:
        if not self.seconds > 0:
            return None
        length = (self.whole or self)._window_s
        before_s = (self.since_s if self.requests.begin_s is None else self.requests.begin_s) % length
        edges = np.arange(-before_s, self.seconds + length, length) + 0.0
        return edges[:-1] if len(edges) > 2 and edges[-2] >= self.seconds else edges

    @property
    def _window_s(self) -> float:
        mean_s = max(self.seconds / MOST_WINDOWS, LEAST_MEAN * self.seconds / len(self.requests.input))
        return next((each for each in WINDOWS_S if each >= mean_s), WINDOWS_S[-1])

    def _named(self, window: int, count: int = 1) -> str:
        """Return the time of so many windows in words."""
        assert self._edges_s is not None
        length = (self.whole or self)._window_s
        start_s = float(self._edges_s[window])
        end_s = start_s + count * length
        if self.requests.begin_s is None:
            return f"+{clock(self.since_s + start_s, length)} to +{clock(self.since_s + end_s, length)}"
        form = "%H:%M" if length >= 60 else "%H:%M:%S"
        begin_s, end_s = self.requests.begin_s + start_s, self.requests.begin_s + end_s
        return f"{_date(begin_s, day=self._is_long, form=form)} to {_date(end_s, day=False, form=form)}"

    @property
    def _is_long(self) -> bool:
        return (self.whole or self).seconds > 86_400

    @cached_property
    def busiest(self) -> Window | None:
        counted = _counted(self.windows)
        return max(counted, key=lambda window: window.rate_per_s) if counted else None

    @cached_property
    def busiest_minute(self) -> tuple[float, str] | None:
        """The rate of the log's busiest minute times its growth, by which bursts within longer windows show, and when
        it begins. Copies arrive within a minute of what they copy, which would flatten it.
        """
        times, begin_s = self.log.timestamp_s, self.log.begin_s
        if times is None or self.busiest is None or self.busiest.seconds <= 60:
            return None
        before_s = 0.0 if begin_s is None else begin_s % 60
        if self.whole is not None:
            times = times[(self.since_s <= times) & (times <= self.since_s + self.seconds + 1e-6)]
        counts = np.bincount(((times + before_s) // 60).astype(int))
        minute = int(counts.argmax())
        at_s = 60 * minute - before_s
        name = f"+{clock(at_s, 60)}" if begin_s is None else _date(begin_s + at_s, day=self._is_long, form="%H:%M")
        return self.growth.rate * float(counts[minute]) / 60, name

    def longer_in(self, window: Window) -> tuple[float, float]:
        """Return the mean input and output lengths of a window's requests, divided by those of the whole load."""
        part, (own, all_) = slice(window.first, window.end), (self.requests, (self.whole or self).requests)
        return float(own.input[part].mean() / all_.input.mean()), float(own.output[part].mean() / all_.output.mean())

    def kept(self, is_kept: NDArray[np.bool_]) -> KeptByWindow:
        """See `kept_in`."""
        return kept_in(self.windows, is_kept)

    def lost(self, kept: KeptByWindow, quantile: float) -> list[LostSpan]:
        """Return when too few requests keep the bounds, by `kept`."""
        found, place = list[LostSpan](), 0
        for is_lost, group in groupby(kept.lost(quantile)):
            number = len(list(group))
            if is_lost:
                part = slice(place, place + number)
                shares, counts = kept.by_window[part], kept.counts[part]
                late = sum(round((1 - (share or 0.0)) * count) for share, count in zip(shares, counts, strict=True))
                found.append(LostSpan(window=self._named(place, number), num_requests=sum(counts), num_late=late))
            place += number
        return found
