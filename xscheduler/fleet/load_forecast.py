"""Forecast the arrival rate from the planned day, scaled to today's level, and from today's trend. The smaller a
forecast's error, the larger its weight.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import exp, log, sqrt

import numpy as np
import numpy.typing as npt

from xgpt.core.schema.fleet import FleetPlan

Array = npt.NDArray[np.float64]

MEMORY_S = 600.0
"""Observations older than this are dropped."""
SHORTEST_S = 30.0
"""Shortest time span of observations from which the level is computed."""
UNLIKE = 3.0
"""Two rates count as different if they differ by more than this number of standard deviations."""
LEAST_REQUESTS = 0.5
"""This number is added to counts of requests before they are divided, since a count may be zero."""
SEASON_ERROR, TREND_ERROR = 0.02, 0.1
"""Smallest relative errors assumed for forecasts from the season and from the trend. The trend's is larger, since a
trend cannot predict sudden changes.
"""
FIRST_ERROR = 0.1
"""Relative error that is assumed before any forecast has been compared with an observation."""
MEMORY_OF_ERRORS = 0.05
"""Weight of the newest error in the moving average."""


@dataclass
class _Predictor:
    """The predictions of one method, and the mean square of their relative errors.

    Attributes:
        least: lower limit of the mean square error.
        slight: rate that is added to the predicted and the observed rate before they are compared, requests/s.
    """

    least: float
    slight: float
    square: float = FIRST_ERROR**2
    pending: deque[tuple[float, float]] = field(default_factory=deque)
    """(time, rate) of the predictions for future times."""

    def judge(self, now_s: float, rate: float, noise: float) -> None:
        """The variance due to chance is subtracted."""
        while self.pending and self.pending[0][0] <= now_s:
            predicted = self.pending.popleft()[1]
            came = rate + self.slight
            error = log(came / (predicted + self.slight)) ** 2 - (noise * rate / came) ** 2
            self.square += MEMORY_OF_ERRORS * (max(error, self.least) - self.square)


class LoadForecast:
    """Forecasts the arrival rate, in requests a second.

    The planned day is the season. Today's level is the present rate relative to the season. The level is computed from
    all recent observations that agree with the newest one, so noise is averaged out, but a sudden change counts
    immediately. The weights of season and trend follow from their errors at the lead time, so the trend prevails on a
    day that differs from the planned day.

    Args:
        lead_s: time from ordering a replica until the replica serves.
    """

    def __init__(self, fleet: FleetPlan, lead_s: float) -> None:
        self._fleet, self._lead_s = fleet, lead_s
        self._rates = np.asarray([interval.rate_per_s for interval in fleet.intervals])
        self._rises = _rises(self._rates)
        self._looks: deque[tuple[float, float, float]] = deque()
        """(end in s, duration in s, number of requests) of each observation."""
        # A difference that the smallest replica can serve does not count as an error. Otherwise, after a night without
        # requests, any load in the morning would be an enormous relative error.
        slight = min(max(kind.rates_per_s) for kind in fleet.kinds)
        self._season, self._trend = (_Predictor(error**2, slight) for error in (SEASON_ERROR, TREND_ERROR))
        self.level = 1.0
        """Today's rate relative to the season's."""
        self.rate = float(self._rates[0])
        """The present rate, requests/s."""
        self._slope = 0.0

    def season(self, time_s: float) -> float:
        i, part = self._fleet.place(time_s)
        return float(self._rates[i] + self._rises[i] * (part - 0.5))

    def look(self, now_s: float, seconds: float, num_requests: float) -> None:
        self._looks.append((now_s, seconds, num_requests))
        while self._looks[0][0] < now_s - MEMORY_S:
            self._looks.popleft()
        arrived, expected = self._agreeing()
        self.level = (arrived + LEAST_REQUESTS) / (expected + LEAST_REQUESTS)
        self.rate = self.level * self.season(now_s)
        noise = 1 / sqrt(arrived + 1)
        for predictor in (self._season, self._trend):
            predictor.judge(now_s, self.rate, noise)
        self._slope = self._recent_slope()
        at_s = now_s + self._lead_s
        self._season.pending.append((at_s, self.level * self.season(at_s)))
        self._trend.pending.append((at_s, self._by_trend(self._lead_s)))

    def _agreeing(self) -> tuple[float, float]:
        """The time span of these observations is doubled until its earlier half differs from its later half."""
        ends = np.asarray([look[0] for look in self._looks])
        counts = np.cumsum([0.0, *(look[2] for look in self._looks)])
        due = np.cumsum([0.0, *(self.season(end - span / 2) * span for end, span, _ in self._looks)])
        span_s, last = SHORTEST_S, len(ends)
        first = int(np.searchsorted(ends, ends[-1] - span_s, side="right"))
        while first:
            before = int(np.searchsorted(ends, ends[-1] - 2 * span_s, side="right"))
            newer, older = (
                (counts[last] - counts[first], due[last] - due[first]),
                (
                    counts[first] - counts[before],
                    due[first] - due[before],
                ),
            )
            if _are_unlike(newer, older):
                break
            first, span_s = before, 2 * span_s
        return float(counts[last] - counts[first]), float(due[last] - due[first])

    def _recent_slope(self) -> float:
        since_s = self._looks[-1][0] - 2 * max(self._lead_s, SHORTEST_S)
        looks = [look for look in self._looks if look[0] > since_s]
        half = len(looks) // 2
        if not half:
            return 0.0
        older, newer = looks[:half], looks[half:]
        spans, counts = ([sum(look[i] for look in part) for part in (older, newer)] for i in (1, 2))
        change = counts[1] / spans[1] - counts[0] / spans[0]
        chance = sqrt((counts[0] + 1) / spans[0] ** 2 + (counts[1] + 1) / spans[1] ** 2)
        return change / (sum(spans) / 2) if abs(change) > UNLIKE * chance else 0.0

    def _by_trend(self, ahead_s: float) -> float:
        return max(0.0, self.rate + self._slope * min(ahead_s, 2 * self._lead_s))

    def at(self, ahead_s: float) -> float:
        now_s = self._looks[-1][0] if self._looks else 0.0
        season, trend = self.level * self.season(now_s + ahead_s), self._by_trend(ahead_s)
        return self._weight * season + (1 - self._weight) * trend

    @property
    def _weight(self) -> float:
        season, trend = self._season.square**2, self._trend.square**2
        return trend / (season + trend)

    @property
    def error(self) -> float:
        return sqrt(self._weight * self._season.square + (1 - self._weight) * self._trend.square)

    def most(self, from_s: float, to_s: float, deviations: float, factor: float) -> float:
        """Return the highest rate that the fleet must be able to serve between two future times. It includes a reserve
        for the forecast's error and one for chance. The two are independent, so the squares of their logarithms are
        added.

        Args:
            deviations: number of standard errors of the forecast to reserve.
            factor: the plan's load factor. It is the reserve for chance.
        """
        points = np.linspace(from_s, to_s, 5)
        grown = np.sqrt(np.clip(points / max(self._lead_s, 1.0), 0.25, 2.0))
        chance = log(factor)
        reserves = np.hypot(max(chance, 0.0), deviations * self.error * grown) + min(chance, 0.0)
        return max(self.at(ahead) * exp(reserve) for ahead, reserve in zip(points, reserves, strict=True))


def _rises(rates: Array) -> Array:
    """Return the rise of the rate within each interval, given the mean rates of all intervals.

    Source: the monotonised central limiter of finite volumes (van Leer, 1977). # [intervals]
    """
    before, after = rates - np.roll(rates, 1), np.roll(rates, -1) - rates
    most = np.minimum(abs(before + after) / 2, 2 * np.minimum(abs(before), abs(after)))
    return np.where(before * after > 0, np.sign(after) * most, 0.0)


def _are_unlike(newer: tuple[float, float], older: tuple[float, float]) -> bool:
    (n, due_n), (m, due_m) = newer, older
    if due_n <= 0 or due_m <= 0:
        return (due_n > 0) != (due_m > 0)
    ratio = (n + m) / (due_n + due_m)
    deviation = sqrt(max(ratio, 1e-9) * due_m * (1 + due_m / due_n) + LEAST_REQUESTS)
    return abs(m - n / due_n * due_m) > UNLIKE * deviation
