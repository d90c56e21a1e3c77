"""Compare an engine's metrics with the assumptions of its plan. Times are arguments, and nothing is read here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import log
from typing import Literal, NamedTuple

import numpy as np

from xgpt.core.schema import Histogram, Plan, Workload
from xgpt.core.schema.plan import rate_of
from xgpt.core.schema.tuning import WatchAlarm
from xgpt.observation.observer import RISE
from xgpt.observation.windows import CERTAIN, shares_up_to, surprise_of_shares
from xgpt.tuning.metrics import Buckets, Page

FALSE_ALARM = 1e-8
"""Probability of a false alarm in one examination. An hour has 720 of them, each of several windows."""
LEAST_REQUESTS = 100
CONFIRMED = 8
"""Number of examinations in a row in which lengths must differ. Most of the latest requests then have the new ones."""
MOST_READINGS = 720
STEADY_READINGS, RECENT_READINGS = 12, 6
"""Numbers of readings from which usual step times are known, and over which a change must last."""
SLOWER = 1.2
"""Step times changed if the gap between tokens is longer by this factor in each of the recent readings."""
SAME_RATE = 1.25
"""Gaps are compared only between rates that differ by at most this factor, since they grow with the load."""
REUSED = 0.1
"""The share of reused tokens changed if it differs by this much in both halves of the recent readings, which agree."""


class Reading(NamedTuple):
    seconds: float
    page: Page


def _reuse_of(readings: Sequence[Reading]) -> list[float]:
    return [sum(each.page.counters.get(name, 0.0) for each in readings) for name in ("queries", "hits", "finished")]


class Watcher:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.workload = plan, plan.workload
        self._before: tuple[float, Page] | None = None
        self._readings: deque[Reading] = deque(maxlen=MOST_READINGS)
        self._reuse = 0.0 if plan.estimate.reuse is None else plan.estimate.reuse.share
        self._rate = rate_of(plan) if plan.constraint.maximises_arrivals else float("inf")
        self._suspected: dict[str, int] = {}
        self._usual: list[tuple[float, float]] = []

    def note(self, now_s: float, page: Page) -> WatchAlarm | None:
        """Add a page, and return an alarm if an assumption no longer holds. The same change alarms once."""
        before, self._before = self._before, (now_s, page)
        if before is None or now_s <= before[0]:
            return None
        self._readings.append(Reading(now_s - before[0], page.since(before[1])))
        for alarm in (self._lengths("input"), self._lengths("output"), self._rates(), self._reused(), self._slower()):
            if alarm is not None:
                return alarm
        return None

    def observed(self) -> Workload:
        return Workload(name="observed", input=self._histogram("input"), output=self._histogram("output"))

    def _windows(self, name: str) -> Iterator[tuple[Buckets, int]]:
        total: Buckets | None = None
        following = 1
        for count, reading in enumerate(reversed(self._readings), 1):
            each = reading.page.histograms.get(name)
            if each is not None:
                total = each if total is None or len(total.edges) != len(each.edges) else total.plus(each)
            if count == following and total is not None:
                following *= 2
                if total.size >= LEAST_REQUESTS:
                    yield total, count

    def _lengths(self, name: Literal["input", "output"]) -> WatchAlarm | None:
        planned: Histogram = getattr(self.workload, name)
        for found, count in self._windows(name):
            shares = found.counts / found.size
            score = surprise_of_shares(shares, shares_up_to(planned, found.edges), found.size, CERTAIN)
            if score > -log(FALSE_ALARM):
                self._suspected[name] = self._suspected.get(name, 0) + 1
                if self._suspected[name] < CONFIRMED:
                    return None
                self._suspected[name] = 0
                while len(self._readings) > count:
                    self._readings.popleft()
                self.workload = self.workload.but(**{name: self._histogram(name)})
                words = "prompts have" if name == "input" else "outputs have"
                return self._alarm(f"{name} lengths", planned.mean, found.mean or 0.0, found.size, words, "tokens")
        self._suspected[name] = 0
        return None

    def _rates(self) -> WatchAlarm | None:
        recent = list(self._readings)[-RECENT_READINGS:]
        ended = sum(reading.page.counters.get("finished", 0.0) for reading in recent)
        rate = ended / sum(reading.seconds for reading in recent)
        if ended < LEAST_REQUESTS or rate <= RISE * self._rate:
            return None
        planned, self._rate = self._rate, rate
        return self._alarm("rate", planned, rate, ended, "the engine answers", "requests/s")

    def _reused(self) -> WatchAlarm | None:
        recent = list(self._readings)[-2 * RECENT_READINGS :]
        halves = recent[:RECENT_READINGS], recent[RECENT_READINGS:]
        (queries, hits, ended), latest = map(_reuse_of, halves)
        if not queries or not latest[0] or ended + latest[2] < LEAST_REQUESTS:
            return None
        earlier, share = hits / queries, latest[1] / latest[0]
        if min(abs(earlier - self._reuse), abs(share - self._reuse)) < REUSED or abs(share - earlier) >= REUSED:
            return None
        planned, self._reuse = self._reuse, share
        return self._alarm("reuse", planned, share, ended + latest[2], "of prompt tokens, a share is reused:", "")

    def _slower(self) -> WatchAlarm | None:
        reading = self._readings[-1]
        gap = reading.page.histograms.get("gap")
        rate = reading.page.counters.get("finished", 0.0) / reading.seconds
        if gap is None or not gap.size or not rate:
            return None
        if len(self._usual) < STEADY_READINGS:
            self._usual.append((rate, gap.mean or 0.0))
            return None
        usual_rate, usual_s = (float(np.median(values)) for values in zip(*self._usual, strict=True))
        recent = list(self._readings)[-RECENT_READINGS:]
        gaps = [each.page.histograms["gap"].mean or 0.0 for each in recent if "gap" in each.page.histograms]
        rates = [each.page.counters.get("finished", 0.0) / each.seconds for each in recent]
        is_loaded = float(np.mean(rates)) > SAME_RATE * usual_rate
        if len(gaps) < RECENT_READINGS or is_loaded or min(gaps) < SLOWER * usual_s:
            return None
        self._usual = []
        ended = sum(each.page.counters.get("finished", 0.0) for each in recent)
        return self._alarm("step times", usual_s, float(np.mean(gaps)), ended, "a token follows after", "s")

    def _alarm(self, cause: str, planned: float, observed: float, size: float, words: str, unit: str) -> WatchAlarm:
        text = f"{cause}: {words} {observed:.3g} {unit}".rstrip() + f", not {planned:.3g}"
        fields = {"planned": planned, "observed": observed, "num_requests": round(size), "text": text}
        return WatchAlarm.model_validate({"cause": cause, **fields})

    def _histogram(self, name: Literal["input", "output"]) -> Histogram:
        found = next(reversed([each for each, _ in self._windows(name)]), None)
        planned: Histogram = getattr(self.workload, name)
        if found is None:
            return planned
        lows = np.concatenate([[0.0], found.edges[:-1]])
        highs = np.where(np.isfinite(found.edges), found.edges, 2 * lows)
        middles = np.maximum(1, np.rint((lows + highs + 1) / 2)).astype(int)
        shares: dict[int, float] = {}
        for middle, count in zip(middles.tolist(), found.counts.tolist(), strict=True):
            if count:
                shares[middle] = shares.get(middle, 0.0) + count / found.size
        lengths = sorted(shares)
        return Histogram(lengths=tuple(lengths), probabilities=tuple(shares[length] for length in lengths))
