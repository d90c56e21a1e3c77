"""Step times of one model on one kind of device: what every prediction rests on."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from xgpt.schema.base import Frozen
from xgpt.schema.model import DType


class Curve(Frozen):
    """Seconds against one size: `seconds[i]` at `points[i]`; linear between points."""

    points: tuple[int, ...] = Field(min_length=2)
    seconds: tuple[float, ...]

    @model_validator(mode="after")
    def _check(self) -> Curve:
        if len(self.points) != len(self.seconds):
            raise ValueError(f"{len(self.points)} points but {len(self.seconds)} times")
        if any(b <= a for a, b in pairwise(self.points)):
            raise ValueError("points must rise")
        if min(self.seconds) < 0:
            raise ValueError(f"a time is negative: {min(self.seconds)}")
        return self


class Surface(Frozen):
    """Seconds against (batch, length): `seconds[i][j]` at `batches[i]`, `lengths[j]`; bilinear between."""

    batches: tuple[int, ...] = Field(min_length=1)
    lengths: tuple[int, ...] = Field(min_length=2)
    seconds: tuple[tuple[float, ...], ...]

    @model_validator(mode="after")
    def _check(self) -> Surface:
        for name, points in (("batches", self.batches), ("lengths", self.lengths)):
            if any(b <= a for a, b in pairwise(points)):
                raise ValueError(f"{name} must rise")
        if len(self.seconds) != len(self.batches) or any(len(r) != len(self.lengths) for r in self.seconds):
            raise ValueError("seconds must have a row for each batch and a column for each length")
        if min(map(min, self.seconds)) < 0:
            raise ValueError("a time is negative")
        return self


class LayerTimes(Frozen):
    """One layer at one tensor-parallel degree. Source: ExeGPT sec. 3 (XProfiler)."""

    tp_degree: PositiveInt = 1
    rest: Curve
    """Everything but attention, against tokens."""
    encode_attention: Surface
    """Causal attention of whole prompts, against (batch, prompt length)."""
    decode_attention: Surface
    """One token a request over its K/V, against (batch, context)."""


class Profile(Frozen):
    """All measured, computed or imported times of a model on a device kind.

    `spread` is by how much the 90th percentile of a whole step, measured again and again, exceeds its median: what a
    prediction from this profile can be wrong by although it is right. The planner keeps it as headroom.
    """

    schema_version: Literal[1] = 1
    source: Literal["measured", "analytic", "imported"]
    model: str
    dtype: DType
    device: str
    num_threads: PositiveInt | None = None
    layers: tuple[LayerTimes, ...] = Field(min_length=1)
    embedding: Curve
    """Embedding of a step's tokens."""
    head: Curve
    """Final norm, output head and sampling, against sampled tokens."""
    overhead: Curve
    """The loop's own cost (scheduling, batch assembly, bookkeeping) a step, against requests in the step."""
    spread: float = Field(default=0.0, ge=0)
    environment: dict[str, str] = Field(default_factory=dict)

    def layer(self, tp_degree: int) -> LayerTimes:
        """The table of one tensor-parallel degree.

        Raises:
            KeyError: the profile holds no such degree.
        """
        for layer in self.layers:
            if layer.tp_degree == tp_degree:
                return layer
        raise KeyError(tp_degree)
