"""Seconds of a step, from a profile's tables.

One step costs, with n tokens of which k are sampled and r requests:

    layers * (rest(n) + encode attention + decode attention) + embedding(n) + head(k) + overhead(r)

Attention of a ragged batch is the sum of its requests' terms; a prompt piece [start, end) costs what the causal
attention of `end` tokens costs more than that of `start`. Tables are linear between their points, through zero
below the first and along the last segment beyond the last. Source: ExeGPT sec. 3, 6.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from xgpt.errors import InputError
from xgpt.schema import Curve, ModelSpec, Profile, Surface

Array = npt.NDArray[np.float64]
Floats = npt.ArrayLike


MOST_KNOWN = 20_000
"""Values of a line that are remembered."""


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
        """The value at one point, without numpy's overhead; steps come in few sizes."""
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
        """The sum, exact: both functions are linear between the union of their points."""
        points = np.union1d(self.points, other.points)
        return Line(points, self(points) + other(points))

    def scaled(self, factor: float) -> Line:
        return Line(self.points, factor * self.values)

    def least_per_unit(self, up_to: Floats) -> Array:
        """min of f(x) / x over 0 < x <= up_to: the cheapest that one unit can be.

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
        # Among the inner points alone: what lies outside belongs to the first or the last stretch.
        i = self.batches[1:-1].searchsorted(b, side="right")
        j = self.lengths[1:-1].searchsorted(length, side="right")
        u = (b - self.batches[i]) / (self.batches[i + 1] - self.batches[i])
        v = (length - self.lengths[j]) / (self.lengths[j + 1] - self.lengths[j])
        s = self.seconds
        low = s[i, j] + v * (s[i, j + 1] - s[i, j])
        high = s[i + 1, j] + v * (s[i + 1, j + 1] - s[i + 1, j])
        return np.maximum(low + u * (high - low), 0.0)

    def at(self, batch: float, length: float) -> float:
        """The value at one point, without numpy's overhead; steps come in few batches."""
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
        """Against the length, for one batch."""
        i = int(self.batches[1:-1].searchsorted(batch, side="right"))
        u = (batch - self.batches[i]) / (self.batches[i + 1] - self.batches[i])
        row: list[float] = (self.seconds[i] + u * (self.seconds[i + 1] - self.seconds[i])).tolist()
        return row

    def per_request(self, batch: float) -> Line:
        """Seconds of one request against its length, within a batch of that many."""
        batch = max(batch, 1.0)
        return Line(self.lengths, self(np.full_like(self.lengths, batch), self.lengths) / batch)


def _level(points: Array, seconds: Array) -> Array:
    """Times at twice the last point, along the last segment where that rises and level where it falls."""
    slope = (seconds[-1] - seconds[-2]) / (points[-1] - points[-2])
    return seconds[-1] + points[-1] * np.maximum(slope, 0.0)


class CostModel:
    """Step times of a model on one device group.

    Attributes:
        tokens: seconds of a step's token-wise work (all layers, embedding) against tokens.
        head: seconds of output head and sampling against sampled tokens.
        overhead: seconds of the loop against requests in the step.

    Raises:
        InputError: the model has an encoder.
    """

    def __init__(self, spec: ModelSpec, profile: Profile, tp_degree: int = 1) -> None:
        if spec.is_encoder_decoder:
            raise InputError(
                "model", spec.name, "encoder-decoder models cannot be planned yet; take a decoder-only one"
            )
        layer = profile.layer(tp_degree)
        self.spec, self.profile, self.tp_degree = spec, profile, tp_degree
        self.num_layers = spec.num_layers
        self.tokens = Line.of(layer.rest).scaled(spec.num_layers) + Line.of(profile.embedding)
        self.head = Line.of(profile.head_of(tp_degree))
        self.overhead = Line.of(profile.overhead)
        self._encode = Grid(layer.encode_attention)
        self._decode = Grid(layer.decode_attention)
        self._encode_lines: dict[int, Line] = {}

    def step(self, encode: Sequence[tuple[int, int, int]], decode_contexts: Sequence[int], sampled: int) -> float:
        """Seconds of one concrete step.

        Args:
            encode: (start, end, 1 or 0 for sampled) of each prompt piece.
            decode_contexts: tokens that each decoding request attends to.
            sampled: rows that go through the head.
        """
        num_decode = len(decode_contexts)
        num_tokens = num_decode + sum(end - start for start, end, _ in encode)
        seconds = float(self.tokens(num_tokens) + self.head(sampled))
        seconds += float(self.overhead(num_decode + len(encode)))
        if num_decode:
            seconds += float(self.decode_attention(num_decode, sum(decode_contexts) / num_decode))
        if encode:
            line = self.encode_line(len(encode))
            ends = line([end for _, end, _ in encode])
            starts = line([start for start, _, _ in encode])
            seconds += float(ends.sum() - starts.sum())
        return seconds

    def decode_attention(self, batch: Floats, context: Floats) -> Array:
        """All layers' attention of a decode batch with that mean context."""
        return self.num_layers * self._decode(batch, context)

    def encode_line(self, batch: int) -> Line:
        """All layers' attention of one prompt against its length, in a step that encodes `batch` prompts."""
        if batch not in self._encode_lines:
            self._encode_lines[batch] = self._encode.per_request(batch).scaled(self.num_layers)
        return self._encode_lines[batch]

    def encode_attention(self, lengths: Array, probabilities: Array) -> Line:
        """Expected attention of one prompt's encoding, all layers, against the number encoded together."""
        batches = self._encode.batches[1:]
        means = [float(probabilities @ self.encode_line(int(batch))(lengths)) for batch in batches]
        # Constant before the first and after the last measured batch: per prompt, not per batch.
        return Line([0.0, *batches, 2 * batches[-1]], [means[0], *means, means[-1]])

    def beyond_profile(self, tokens: float, decode_batch: float, context: float) -> list[str]:
        """Warnings for a step that lies outside what was measured."""
        warnings = []
        layer = self.profile.layer(self.tp_degree)
        for name, value, last in (
            ("tokens a step", tokens, layer.rest.points[-1]),
            ("decode batch", decode_batch, layer.decode_attention.batches[-1]),
            ("context", context, layer.decode_attention.lengths[-1]),
        ):
            if value > last:
                warnings.append(f"{name} {value:.0f} lies beyond the profile's {last:.0f}: extrapolated")
        return warnings
