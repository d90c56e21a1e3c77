"""Compute for many candidates the terms that balance waa's two lanes: iterations, residence times and waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from xsimulator.costs.curves import Array

GRID = np.unique(np.concatenate([np.linspace(0, 64, 65), np.geomspace(64, 8192, 64)]))
FINER = np.linspace(0, 1, 17)
LEVELS = 3
PERIODS = 4
"""Number of earlier batches whose remaining requests are counted batch by batch, before an integral counts the rest."""
BEFORE = np.arange(1.0, PERIODS + 1)[:, None, None]


def as_interpolated(batches: Array) -> Array:
    """Return the matrix that replaces times at these sizes by interpolation through the grid. # [batches, batches]"""
    on_grid = [np.interp(GRID, batches, unit) for unit in np.eye(len(batches))]
    return np.stack([np.interp(batches, GRID, row) for row in on_grid])


def at_points(rounds: Array, each: Array) -> Array:
    """Return values at sizes `each`, interpolated from the grid. # [n, grid], [n, points] -> [n, points]"""
    index = np.clip(GRID.searchsorted(each, side="right") - 1, 0, rounds.shape[1] - 2)
    rows = np.arange(len(each))[:, None]
    low, high = rounds[rows, index], rounds[rows, index + 1]
    found: Array = low + (high - low) * (each - GRID[index]) / (GRID[index + 1] - GRID[index])
    return found


def size_for(each: Array) -> int:
    """Return the number of grid points, from the first on, that cover these micro-batch sizes."""
    return min(int(GRID.searchsorted(each.max())) + 2, len(GRID))


def locate(y: Array, level: Array) -> tuple[npt.NDArray[np.intp], Array]:
    """Return the place where each row of `y` last crosses its level: the index of the grid point before the crossing,
    and the fraction of the distance from there to the next point.

    A row usually rises, but it falls over any part of the grid where larger batches take longer per request. If a
    random fluctuation takes a lane past such a part, the lane serves too few requests to come back. It then stays at
    the last crossing. # [n, grid], [n] -> [n], [n]
    """
    below = y <= level[:, None]
    last = y.shape[1] - 1 - below[:, ::-1].argmax(axis=1)
    index = np.where(below.any(axis=1), np.minimum(last, y.shape[1] - 2), 0)
    rows = np.arange(len(level))
    low, high = y[rows, index], y[rows, index + 1]
    return index, np.minimum(np.maximum((level - low) / np.maximum(high - low, 1e-300), 0.0), 1.0)


class LanePair:
    """The times of both lanes, for candidates or for boxes of candidates.

    Args:
        encode_batch, largest_batch: the smallest and the largest number of requests encoded together. # [n]
        through, moving: least seconds in the encode lane, and of the transfer. # [n] each
        rounds: least seconds of an iteration of all micro-batches, at the grid's first points. # [n, grid]
    """

    def __init__(
        self,
        encode_batch: Array,
        largest_batch: Array,
        through: Array,
        moving: Array,
        microbatches: Array,
        rounds: Array,
    ) -> None:
        self.encode_batch, self.largest_batch = encode_batch, largest_batch
        self.through, self.before = through[:, None], (through + moving)[:, None]
        self.microbatches, self.rounds = microbatches, rounds
        self.decoding: Array = microbatches[:, None] * GRID[: rounds.shape[1]]

    def at(self, index: npt.NDArray[np.intp]) -> Array:
        return self.microbatches * GRID[index]

    def step(self, decoding: Array) -> Array:
        return at_points(self.rounds, decoding / self.microbatches[:, None])

    def serving(self, rate: Array, mean_decodes: float) -> Array:
        """Return the least number of decoding requests with which the lane serves more than `rate`. # [n]"""
        index, _ = locate(self.decoding / (mean_decodes * self.rounds), rate)
        rows = np.arange(len(rate))
        start, end = self.decoding[rows, index], self.decoding[rows, index + 1]
        first, last = self.rounds[rows, index], self.rounds[rows, index + 1]
        slope = (last - first) / (end - start)
        # B = r E[S] T(B), with T linear between two points of the grid.
        work = rate * mean_decodes
        found = work * (first - slope * start) / np.where(work * slope < 1, 1 - work * slope, 1.0)
        return np.where((found >= start) & (found <= end), found, end)


class Stays:
    """Computes the residence times of requests in the two lanes.

    Args:
        survival: P(D >= t) for the number D of iterations in the decode lane, t = 1 .. max D.
    """

    def __init__(self, survival: Array) -> None:
        self.transferred = float(survival[0])
        """Share of requests that reach the decode lane. The others end with the encode lane's token."""
        self._share: Array = np.concatenate([survival[:1], survival, [0.0]])
        """Share of requests that are still in the lanes, by the number of iterations since their transfer. This number
        includes the wait to join.
        """
        tail = (self._share[1:] + self._share[:-1]) / 2
        self._rest: Array = np.append(np.cumsum(tail[::-1])[::-1], 0.0)
        """Mean number of remaining iterations over all requests, by iterations since their transfer."""
        self.together = float(survival @ survival / (survival.sum() or 1.0))
        """Mean share of a request's encode batch that still decodes, averaged over the request's iterations."""

    def mean(self, lanes: LanePair, step: Array) -> Array:
        """Return the mean seconds that a request is in the lanes. # [n, points]"""
        return lanes.through + self.transferred * (lanes.before - lanes.through) + step * self._rest[0]

    def least(self, lanes: LanePair, step: Array) -> Array:
        """Return the mean seconds that a request would be in the lanes if it joined without waiting. # [n, points]"""
        return self.mean(lanes, step) - step * self.transferred / 2

    def left(self, lanes: LanePair, period: Array, step: Array) -> Array:
        """Return the number of earlier requests still in the lanes when a batch enters, divided by the batch size. #
        [n, points]
        """
        found: Array = self._inside(lanes, BEFORE * period, step).sum(axis=0)
        return found + self._after(lanes, (PERIODS + 0.5) * period, step) / period

    def _inside(self, lanes: LanePair, age: Array, step: Array) -> Array:
        """Return G(age), the share of requests that are still in the lanes `age` seconds after they entered."""
        return np.where(age < lanes.through, 1.0, between(self._share, (age - lanes.before) / step))

    def _after(self, lanes: LanePair, age: Array, step: Array) -> Array:
        """Return the integral of G from an age to infinity."""
        encoding = np.maximum(lanes.through - age, 0.0)
        moving = np.clip(lanes.before - age, 0.0, lanes.before - lanes.through)
        return encoding + self.transferred * moving + step * between(self._rest, (age - lanes.before) / step)


def between(values: Array, at: Array) -> Array:
    """Return values at the points `at`, interpolated linearly from the values at 0, 1, ..."""
    at = np.minimum(np.maximum(at, 0.0), len(values) - 1)
    index = np.minimum(at.astype(int), len(values) - 2)
    low = values.take(index)
    return low + (at - index) * (values.take(index + 1) - low)


class Waiting:
    """Computes, for each rate in requests a second, the number of slots that stay free because the encode lane is busy.

    The encode lane is modelled as a queue of batches.

    Args:
        arrivals, service: squared coefficients of variation of the time between batches, and of the time of a batch.
        interval: seconds from one batch to the next.
        limit: largest number of requests a second that the encode lane can serve.
        groups: number of groups in the encode lane.

    Source: Kraemer and Langenbach-Belz's form of the G/G/1 queue, and Lee and Longton's of several servers.
    """

    def __init__(self, arrivals: Array, service: Array, interval: Array, limit: Array, groups: int = 1) -> None:
        both = arrivals + service
        self._calm = (-2 / 3 * (1 - arrivals) ** 2 / both)[:, None]
        self._seconds = (interval * both / 2)[:, None]
        self.limit, self._groups = limit, groups

    def __call__(self, rate: Array) -> Array:
        """Return the number of free slots at each rate. # [n, grid] -> [n, grid]"""
        free = np.maximum(self.limit[:, None] / np.maximum(rate, 1e-9) - 1, 1e-9)
        found: Array = rate * self._seconds * np.exp(self._calm * free) / free
        return found if self._groups == 1 else found * share_waiting(self._groups, 1 / (1 + free)) * (1 + free)


def share_waiting(servers: int, load: Array | float) -> Any:
    """Return the share of arrivals that find all servers busy (Erlang C). `load` is the share of time in which a server
    is busy. # [...] -> [...]
    """
    if servers == 1:
        return load
    offered = servers * load
    lost: Any = 1.0
    for number in range(1, servers + 1):
        lost = offered * lost / (number + offered * lost)
    return lost / np.maximum(1 - load * (1 - lost), 1e-300)
