"""Evaluate piecewise linear functions through a profile's points.

A function is linear between its points, and linear from zero to the first point. Beyond the last point, it continues
the last segment, or stays constant if the last segment falls.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InputError
from xgpt.core.schema import Curve, Profile, Surface
from xsimulator.lengths import Lengths

Array = npt.NDArray[np.float64]
Floats = npt.ArrayLike


MOST_KNOWN = 20_000


class Line:
    """A piecewise linear function through the origin, vectorised."""

    def __init__(self, points: Floats, values: Floats) -> None:
        x, y = np.asarray(points, float), np.asarray(values, float)
        if x[0] > 0:
            x, y = np.concatenate([[0.0], x]), np.concatenate([[0.0], y])
        if y[-1] < y[-2]:
            x, y = np.append(x, 2 * x[-1]), np.append(y, y[-1])
        self.points: Array = x
        self.values: Array = y
        self._slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
        self._known: dict[float, float] = {}

    @classmethod
    def of(cls, curve: Curve) -> Line:
        return cls(curve.points, curve.seconds)

    def __call__(self, x: Floats) -> Array:
        x = np.asarray(x, float)
        inside = np.interp(x, self.points, self.values)
        return inside + self._slope * np.maximum(x - self.points[-1], 0.0)

    def at(self, x: float) -> float:
        value = self._known.get(x)
        if value is None:
            points, values = self._lists
            i = min(max(bisect_right(points, x) - 1, 0), len(points) - 2)
            value = values[i] + (x - points[i]) * (values[i + 1] - values[i]) / (points[i + 1] - points[i])
            if len(self._known) < MOST_KNOWN:
                self._known[x] = value
        return value

    @cached_property
    def _lists(self) -> tuple[list[float], list[float]]:
        return self.points.tolist(), self.values.tolist()

    def __add__(self, other: Line) -> Line:
        points = np.union1d(self.points, other.points)
        return Line(points, self(points) + other(points))

    def scaled(self, factor: float) -> Line:
        return Line(self.points, factor * self.values)

    def least_per_unit(self, up_to: Floats) -> Array:
        """Return the least cost per unit, f(x) / x, over 0 < x <= up_to.

        f(x)/x is monotone on each linear segment, so the minimum lies at a point or at the end.
        """
        up_to = np.asarray(up_to, float)
        x = self.points[1:]
        best = np.minimum.accumulate(self.values[1:] / x)
        index = np.searchsorted(x, up_to, side="right")
        at_points = np.where(index > 0, best[np.maximum(index - 1, 0)], np.inf)
        end = np.maximum(up_to, 1e-9)
        return np.minimum(at_points, self(end) / end)


class Grid:
    """A bilinear function of (batch, length), zero at batch 0, vectorised."""

    def __init__(self, surface: Surface) -> None:
        self.batches: Array = np.concatenate([[0.0], surface.batches])
        self.lengths: Array = np.asarray(surface.lengths, float)
        self.seconds: Array = np.vstack([np.zeros(len(surface.lengths)), np.asarray(surface.seconds)])
        if (self.seconds[:, -1] < self.seconds[:, -2]).any():
            self.seconds = np.hstack([self.seconds, _level(self.lengths, self.seconds.T)[:, None]])
            self.lengths = np.append(self.lengths, 2 * self.lengths[-1])
        if (self.seconds[-1] < self.seconds[-2]).any():
            self.seconds = np.vstack([self.seconds, _level(self.batches, self.seconds)])
            self.batches = np.append(self.batches, 2 * self.batches[-1])

        self._lengths: list[float] = self.lengths.tolist()
        self._rows: dict[float, list[float]] = {}

    def __call__(self, batch: Floats, length: Floats) -> Array:
        b, length = np.asarray(batch, float), np.asarray(length, float)
        # Search only the inner points, since values outside belong to the first or the last segment.
        i = self.batches[1:-1].searchsorted(b, side="right")
        j = self.lengths[1:-1].searchsorted(length, side="right")
        u = (b - self.batches[i]) / (self.batches[i + 1] - self.batches[i])
        v = (length - self.lengths[j]) / (self.lengths[j + 1] - self.lengths[j])
        s = self.seconds
        low = s[i, j] + v * (s[i, j + 1] - s[i, j])
        high = s[i + 1, j] + v * (s[i + 1, j + 1] - s[i + 1, j])
        return np.maximum(low + u * (high - low), 0.0)

    def at(self, batch: float, length: float) -> float:
        row = self._rows.get(batch)
        if row is None:
            row = self._row(batch)
            if len(self._rows) < MOST_KNOWN:
                self._rows[batch] = row
        lengths, last = self._lengths, len(row) - 1
        j = bisect_right(lengths, length, 1, last) - 1
        low, start = row[j], lengths[j]
        value = low + (length - start) / (lengths[j + 1] - start) * (row[j + 1] - low)
        return value if value > 0.0 else 0.0

    def _row(self, batch: float) -> list[float]:
        i = int(self.batches[1:-1].searchsorted(batch, side="right"))
        u = (batch - self.batches[i]) / (self.batches[i + 1] - self.batches[i])
        row: list[float] = (self.seconds[i] + u * (self.seconds[i + 1] - self.seconds[i])).tolist()
        return row


def rising(surface: Surface) -> Surface:
    """Return the surface with times that never fall with the length: the mean of the lowest such surface above it and
    the highest below it.
    """
    seconds = np.asarray(surface.seconds)
    above = np.maximum.accumulate(seconds, axis=1)
    if (above == seconds).all():
        return surface
    below = np.flip(np.minimum.accumulate(np.flip(seconds, 1), axis=1), 1)
    return surface.but(seconds=tuple(map(tuple, ((above + below) / 2).tolist())))


def _level(points: Array, seconds: Array) -> Array:
    slope = (seconds[-1] - seconds[-2]) / (points[-1] - points[-2])
    return seconds[-1] + points[-1] * np.maximum(slope, 0.0)


class Table:
    """Piecewise linear functions over the same points, evaluated in one call. # values [..., points]"""

    def __init__(self, points: npt.ArrayLike, values: npt.ArrayLike) -> None:
        self.points: Array = np.asarray(points, float)
        self.values: Array = np.ascontiguousarray(values, float)
        slopes = (self.values[..., 1:] - self.values[..., :-1]) / (self.points[1:] - self.points[:-1])
        starts = self.values[..., :-1] - slopes * self.points[:-1]  # each segment's value at x = 0
        stretches_first = (-1, *range(slopes.ndim - 1))
        self._slopes, self._starts = slopes.transpose(stretches_first).copy(), starts.transpose(stretches_first).copy()
        """# [segments, ...]: contiguous for each segment"""
        # Only inner points are searched, since values outside belong to the first or the last segment.
        self._inner = self.points[1:-1]

    @classmethod
    def of(cls, lines: Sequence[Line]) -> Table:
        points = np.unique(np.concatenate([line.points for line in lines]))
        return cls(points, [line(points) for line in lines])

    def __call__(self, x: Array) -> Array:
        index = self._inner.searchsorted(x, side="right")
        if self.values.ndim == 1:
            return self._starts[index] + self._slopes[index] * x
        if self.values.ndim == 2:
            return (self._starts[index] + self._slopes[index] * x[:, None]).T
        return (self._starts[index] + self._slopes[index] * x[:, None, None]).transpose(1, 2, 0)

    def __add__(self, other: Table) -> Table:
        points = np.union1d(self.points, other.points)
        return Table(points, self(points) + other(points))

    def beside(self, other: Table) -> Table:
        """Return a table with this table's functions and then those of `other`, all broadcast to the same axes."""
        points = np.union1d(self.points, other.points)
        mine, theirs = self(points), other(points)
        if theirs.ndim < mine.ndim:
            theirs = np.broadcast_to(theirs[:, None], (len(theirs), *mine.shape[1:]))
        return Table(points, np.concatenate([mine, theirs]))


class ContextTable:
    """Bilinear functions of the number of requests and of the context to which each request attends.

    Args:
        points, contexts: numbers of requests, and contexts, both rising. Functions are extrapolated beyond the numbers
            of requests, but not beyond the contexts.
        values: # [functions, contexts, points]
    """

    def __init__(self, points: Array, contexts: Array, values: Array) -> None:
        self._inner, self._contexts = points[1:-1], contexts
        slopes = np.diff(values, axis=-1) / np.diff(points)
        starts = values[..., :-1] - slopes * points[:-1]
        at = np.stack([starts, slopes]).transpose(3, 2, 0, 1)  # [segments, contexts, 2, functions]
        self._corners = np.stack([at[:, :-1], at[:, 1:]], axis=3).copy()
        """# [segments, contexts - 1, 2, 2, functions]: contiguous for each place"""

    def locate(self, contexts: Array) -> tuple[npt.NDArray[np.intp], Array]:
        """Return the positions of contexts: the index of the point before, and the fraction to the next one."""
        index = self._contexts[1:-1].searchsorted(contexts, side="right")
        before = self._contexts[index]
        return index, (contexts - before) / (self._contexts[index + 1] - before)

    def __call__(self, x: Array, place: tuple[npt.NDArray[np.intp], Array]) -> Array:
        """Evaluate all functions at `x` requests and at the contexts whose positions `locate` returned. # x [n, i],
        place [n, i] or [i] -> [functions, n, i]
        """
        index, share = place
        corners = self._corners[self._inner.searchsorted(x, side="right"), index]  # [n, i, 2, 2, functions]
        ends = corners[..., 0, :, :] + corners[..., 1, :, :] * x[..., None, None]
        low = ends[..., 0, :]
        return (low + (ends[..., 1, :] - low) * share[..., None]).transpose(2, 0, 1)


Group = tuple[int, int]
"""(tensor-parallel degree, expert-parallel degree within the tensor-parallel group)"""


class GroupTables:
    """The curves for one kind of tensor-parallel group."""

    def __init__(self, profile: Profile, group: Group) -> None:
        degree, ep = group
        subject = f"the profile of {profile.model.name} on {profile.device} covers"
        if degree not in profile.tp_degrees:
            raise InputError("tp_degree", degree, f"{subject} {profile.tp_degrees}")
        if group not in profile.groups:
            degrees = tuple(other for tp, other in profile.groups if tp == degree)
            raise InputError("ep_degree", ep, f"{subject} {degrees} for tp_degree {degree}")
        layer = profile.layer(*group)
        self.rest = Line.of(layer.rest)
        self.last = self.rest if layer.last is None else Line.of(layer.last)
        self.encode = Grid(rising(layer.encode_attention))
        self.decode = Grid(layer.decode_attention)
        self.head = Line.of(profile.head_of(degree))
        self.cross = None if layer.cross is None else Grid(layer.cross.attention)
        self.cross_kv = None if layer.cross is None else Line.of(layer.cross.keys_values)
        if profile.encoder_layers:
            encoder = profile.encoder_layer(degree)
            self.encoder_rest = Line.of(encoder.rest)
            self.encoder = Grid(rising(encoder.attention))
        self._of_prompts: dict[Lengths, Table] = {}

    def layers(self, number: int, *, with_last: bool) -> Line:
        """Return the seconds of a stage's `number` layers without attention, by number of tokens."""
        is_cut = with_last and self.last is not self.rest
        return self.rest.scaled(number - 1) + self.last if is_cut else self.rest.scaled(number)

    def of_prompts(self, lengths: Lengths) -> Table:
        """Return the seconds of one layer's attention when prompts are encoded, by number of prompts."""
        if lengths not in self._of_prompts:
            grid = self.encoder if self.cross is not None else self.encode
            points, batches, reused = grid.batches, grid.batches[:, None], lengths.reused
            if reused is None:
                seconds = grid(batches, lengths.inputs) @ lengths.input_probabilities
            else:  # the other tokens also attend to the cached ones
                found = np.where(reused.cached > 0, grid(batches, np.maximum(reused.cached, 1.0)), 0.0)
                line = Line(points, (grid(batches, reused.whole) - found) @ reused.probabilities)
                points, seconds = line.points, line.values
            self._of_prompts[lengths] = Table(points, seconds)
        return self._of_prompts[lengths]


class Degrees(dict[Group, GroupTables]):
    """The tables of a profile's groups, computed on demand.

    Raises:
        InputError: the profile has no tables for a group.
    """

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        self._profile = profile

    def __missing__(self, group: Group) -> GroupTables:
        self[group] = GroupTables(self._profile, group)
        return self[group]
