"""Step times of one model on one kind of device: what every prediction rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeVar

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from xgpt.core.schema.base import Frozen
from xgpt.core.schema.model import DType, ModelShape

KNOWN_ERROR = {"measured": 0.05, "imported": 0.10, "analytic": 0.12}
"""Known relative error of step times, by the source of a profile (docs/results/truth.md).

- measured: LEAST_HEADROOM;
- imported: the median error of the time of an output token over 925 measured configurations of served models, 9.5%;
- analytic: that, and the median error of the datasheet's operators against those tables, 6 to 9%: sqrt(9.5^2 + 7^2).

The closed forms' own error against the simulated engine, 0.2% of latency in the median, is small in comparison.
"""

UNSERVED_ERROR = 0.10
"""The same of step times that were measured one by one, and not fitted to steps of a served engine: an endpoint and its
clients on the same cores, and memory that is written to for the first time, make steps up to 12% longer
(docs/results/prediction.md)."""
SERVED = "served"
"""Entry of a profile's provenance that says how it was fitted to steps of a served engine."""
PACES_AT_REST = (0.97, 1.06)
"""How many times as long as a profile as served says steps take on a machine at rest, in nine of ten loads."""

LEAST_HEADROOM = KNOWN_ERROR["measured"]
"""Least headroom of plans from measured profiles, however small their spread: a minute of measuring shows neither slow
drift nor the load of clients on the same machine. A running server ignores smaller deviations, and re-plans at larger
ones."""


RESTLESS = 0.15
"""Spread from which a profile counts as measured on a busy machine: its times include other work."""
MOST_HEADROOM = 0.20
"""Largest headroom that a profile's spread causes; more would waste the machine because its measurement was
disturbed."""


class Curve(Frozen):
    """Seconds against one size: `seconds[i]` at `points[i]`; linear between points."""

    points: tuple[int, ...] = Field(min_length=2)
    """Sizes, rising."""
    seconds: tuple[float, ...]
    """Time at each of them."""

    @model_validator(mode="after")
    def _check(self) -> Curve:
        if len(self.points) != len(self.seconds):
            raise ValueError(f"{len(self.points)} points but {len(self.seconds)} times")
        if any(b <= a for a, b in pairwise(self.points)):
            raise ValueError(f"points must rise, and {self.points} do not")
        if self.points[0] < 0:
            raise ValueError(f"a point is negative: {self.points[0]}")
        if min(self.seconds) < 0:
            raise ValueError(f"a time is negative: {min(self.seconds)}")
        return self

    def times(self, factor: float) -> Curve:
        """Return the curve with all times multiplied."""
        return self.model_copy(update={"seconds": tuple(factor * s for s in self.seconds)})


class Surface(Frozen):
    """Seconds against (batch, length): `seconds[i][j]` at `batches[i]`, `lengths[j]`; bilinear between."""

    batches: tuple[int, ...] = Field(min_length=1)
    """Batch sizes, rising."""
    lengths: tuple[int, ...] = Field(min_length=2)
    """Lengths, rising."""
    seconds: tuple[tuple[float, ...], ...]
    """A row of times for each batch size."""

    @model_validator(mode="after")
    def _check(self) -> Surface:
        for name, points in (("batches", self.batches), ("lengths", self.lengths)):
            if any(b <= a for a, b in pairwise(points)):
                raise ValueError(f"{name} must rise, and {points} do not")
            if points[0] < 0:
                raise ValueError(f"{name}: {points[0]} is negative")
        if len(self.seconds) != len(self.batches) or any(len(r) != len(self.lengths) for r in self.seconds):
            raise ValueError("seconds must have a row for each batch and a column for each length")
        if min(map(min, self.seconds)) < 0:
            raise ValueError("a time is negative")
        return self

    @classmethod
    def filled(
        cls, measured: Mapping[tuple[int, int], float], batches: Sequence[int], lengths: Sequence[int]
    ) -> Surface:
        """Build a surface from seconds by (batch, length); where a batch was too large to measure, they grow."""
        rows: list[list[float]] = []
        for i, batch in enumerate(batches):
            row = [
                measured[batch, length] if (batch, length) in measured else rows[-1][j] * batch / batches[i - 1]
                for j, length in enumerate(lengths)
            ]
            rows.append(row)
        return cls(batches=tuple(batches), lengths=tuple(lengths), seconds=tuple(map(tuple, rows)))

    def times(self, factor: float) -> Surface:
        """Return the surface with all times multiplied."""
        return self.model_copy(update={"seconds": tuple(tuple(factor * s for s in row) for row in self.seconds)})


class CrossTimes(Frozen):
    """Cross-attention of one decoder layer, at one tensor-parallel degree."""

    keys_values: Curve
    """Computing keys and values from the encoder's output, once for each request, against input tokens."""
    attention: Surface
    """One token of each request over its input's keys and values, against (batch, input length)."""


class LayerTimes(Frozen):
    """One decoder layer (any layer, where the model has no encoder) on a group of `tp_degree` devices.

    All-reduces within the group are part of `rest`. Source: ExeGPT sec. 3 (XProfiler).
    """

    tp_degree: PositiveInt = 1
    """Devices of the group."""
    ep_degree: PositiveInt = 1
    """Parts into which a layer's experts are divided; the devices of each part hold slices of its experts. More than
    `tp_degree`: groups share the experts, and each passes as many tokens as this one."""
    rest: Curve
    """Everything but attention, against tokens."""
    last: Curve | None = None
    """The same of the model's last layer, for tokens whose logits are not wanted: keys and values alone. What it does
    for those that are wanted is part of `head` then. None: it is like all others."""
    encode_attention: Surface
    """Causal attention of whole prompts, against (batch, prompt length)."""
    decode_attention: Surface
    """One token of each request over its K/V, against (batch, context)."""
    cross: CrossTimes | None = None
    """For an encoder-decoder only."""
    head: Curve | None = None
    """As the profile's `head`, shared by the group; None: that one, as on one device."""


class EncoderLayerTimes(Frozen):
    """One layer of an encoder-decoder's encoder on a group of `tp_degree` devices, all-reduces included."""

    tp_degree: PositiveInt = 1
    """Devices of the group."""
    rest: Curve
    """Everything but attention, against tokens."""
    attention: Surface
    """Whole prompts, each token over all of its prompt, against (batch, prompt length)."""


class Jitter(Frozen):
    """How single steps differ from their mean although all do the same work: the clock, stalls, other work's turns."""

    seconds: float = Field(gt=0)
    """Mean time of the steps that were measured."""
    ratios: tuple[NonNegativeFloat, ...] = Field(min_length=1)
    """Times of single steps over that mean, at evenly spaced quantiles, rising."""

    @model_validator(mode="after")
    def _check(self) -> Jitter:
        if any(b < a for a, b in pairwise(self.ratios)):
            raise ValueError("ratios must rise")
        if self.ratios[-1] == 0:
            raise ValueError("ratios: all of them are 0")
        return self

    def times(self, factor: float) -> Jitter:
        """Return the jitter of steps that all take `factor` times as long."""
        return self.model_copy(update={"seconds": factor * self.seconds})


class Profile(Frozen):
    """The step times of a model on a kind of device: measured, computed or imported.

    `spread` is the share by which slow stretches of the measurement (their 90th percentile) exceed the mean: the error
    that a prediction can have even from a correct profile.
    """

    schema_version: Literal[2] = 2
    """Version of this format."""
    source: Literal["measured", "analytic", "imported"]
    """Where the times came from."""
    model: ModelShape
    """The shape of the model."""
    dtype: DType
    """Type that products ran in."""
    kv_dtype: DType | None = None
    """Type of keys and values; None: the dtype."""
    device: str
    """Name of the device."""
    devices_per_node: PositiveInt = 1
    """Devices in a node of its cluster; it covers tensor-parallel degrees up to this number."""
    engine: str | None = None
    """The engine whose steps were timed: "native", "vllm", another framework; None: a datasheet's, for any engine."""
    engine_version: str | None = None
    """Version of that engine."""
    num_threads: PositiveInt | None = None
    """Number of threads during the measurement."""
    layouts: dict[str, str] = Field(default_factory=dict)
    """Fastest layout of weights of each shape (OUTxIN) on this CPU, in xgpt's own engine; of `head`, that of a copy in
    eight bits, with which greedy choices are faster; of `prompts` and `decodes`, the keys that attention passes at a
    time."""
    layers: tuple[LayerTimes, ...] = Field(min_length=1)
    """Times of a decoder layer, for each tensor-parallel degree and each expert-parallel degree within it."""
    encoder_layers: tuple[EncoderLayerTimes, ...] = ()
    """For an encoder-decoder only: one entry for each degree of `layers`."""
    embedding: Curve
    """Embedding of a step's tokens."""
    head: Curve
    """Final norm, output head and sampling, against sampled tokens; where layers have a `last`, also the last layer
    behind its attention."""
    overhead: Curve
    """The loop's own time for each step (scheduling, batch assembly, bookkeeping), against requests in the step."""
    hop: Curve | None = None
    """Sending hidden states from one pipeline stage to the next on the same node, against tokens; None: not known."""
    inter_node_hop: Curve | None = None
    """Sending hidden states to a stage on another node, against tokens; None: not known."""
    kv_transfer: Curve | None = None
    """Moving K/V of all layers from one device through host memory to another, against tokens.

    A device that holds a share of the layers or heads moves that share of the tokens.
    """
    load_bytes_per_s: float | None = Field(default=None, gt=0, exclude_if=lambda rate: rate is None)
    """Bytes of weights that a device loads in a second, from a checkpoint in host memory; None: not known."""
    spread: float = Field(default=0.0, ge=0)
    """Share by which slow stretches of the measurement exceed the mean."""
    others: dict[str, float] = Field(default_factory=dict, exclude_if=lambda others: not others)
    """Cores that other processes took on average during the measurement, by name, those of 0.05 and more; "steal": a
    virtual machine's host."""
    is_brief: bool = Field(default=False, exclude_if=lambda is_brief: not is_brief)
    """Whether fewer points were measured, less often, because others used the machine; the rest is interpolated."""
    gflops: float | None = Field(default=None, gt=0, exclude_if=lambda gflops: gflops is None)
    """GFLOP/s of a fixed product of matrices on all cores when the measurement began: it shows the clock."""
    jitter: Jitter | None = Field(default=None, exclude_if=lambda jitter: jitter is None)
    """How single short steps differ from their mean; None: not known, all are taken to last as long as the mean."""
    provenance: dict[str, str] = Field(default_factory=dict)
    """Source of each part's numbers, where `source` does not say enough."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Versions of the software during the measurement."""

    @model_validator(mode="after")
    def _check(self) -> Profile:
        degrees, groups = self.tp_degrees, self.groups
        if len(set(groups)) != len(groups):
            raise ValueError(f"layers: a pair of tp_degree and ep_degree is repeated in {groups}")
        if any(max(tp, ep) % min(tp, ep) for tp, ep in groups):
            raise ValueError(f"layers: an ep_degree neither divides its tp_degree nor is a multiple of it in {groups}")
        encoder_degrees = tuple(layer.tp_degree for layer in self.encoder_layers)
        if encoder_degrees and encoder_degrees != degrees:
            raise ValueError(f"encoder_layers: tp_degrees {encoder_degrees} are not those of layers, {degrees}")
        if any((layer.cross is None) != (not encoder_degrees) for layer in self.layers):
            raise ValueError("layers: cross goes with encoder_layers, on every degree, or not at all")
        return self

    @property
    def tp_degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that the profile covers."""
        return tuple(dict.fromkeys(layer.tp_degree for layer in self.layers))

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Pairs of a tensor-parallel degree and an expert-parallel degree within it that the profile covers."""
        return tuple((layer.tp_degree, layer.ep_degree) for layer in self.layers)

    @property
    def headroom(self) -> float:
        """Default headroom of plans: the known error of the profile's source, or its spread if that is larger.

        At most `MOST_HEADROOM`.
        """
        is_unserved = self.source == "measured" and self.engine == "native" and not self.is_served
        known = UNSERVED_ERROR if is_unserved else KNOWN_ERROR[self.source]
        return round(max(min(self.spread, MOST_HEADROOM), known), 4)

    @property
    def is_served(self) -> bool:
        """Whether its times are fitted to the steps of a served engine."""
        return SERVED in self.provenance

    @property
    def is_restless(self) -> bool:
        """Whether the machine was busy with other work while it was measured."""
        return self.spread > RESTLESS or self.is_brief

    @property
    def unrest(self) -> str:
        """What is known of a restless measurement, in words."""
        slow = f"slow stretches took {100 * self.spread:.0f}% longer than the mean"
        text = f"the profile was measured on a busy machine: {slow}"
        if self.is_brief:
            text += ", few points were measured, and the others are interpolated"
        if not self.others:
            return f"{text}; no process that this one can see took the cores"
        named = ", ".join(f"{name} {cores:.2g}" for name, cores in list(self.others.items())[:3])
        return f"{text}; other processes took {sum(self.others.values()):.2g} cores meanwhile ({named})"

    @property
    def of_means(self) -> Profile:
        """The profile of a machine on which every step takes its mean time."""
        return self if self.jitter is None else self.model_copy(update={"jitter": None})

    def slowed(self, factor: float) -> Profile:
        """Return the profile of a machine on which everything takes `factor` times as long."""
        return self if factor == 1 else _slowed(self, factor)

    def layer(self, tp_degree: int, ep_degree: int = 1) -> LayerTimes:
        """Return the table of one group of devices.

        Raises:
            KeyError: the profile holds no such group.
        """
        if (tp_degree, ep_degree) not in self.groups:
            raise KeyError(tp_degree)
        return self.layers[self.groups.index((tp_degree, ep_degree))]

    def encoder_layer(self, tp_degree: int) -> EncoderLayerTimes:
        """Return the encoder's table of one tensor-parallel degree.

        Raises:
            KeyError: the profile holds no such degree, or no encoder.
        """
        if not self.encoder_layers:
            raise KeyError(tp_degree)
        if tp_degree not in self.tp_degrees:
            raise KeyError(tp_degree)
        return self.encoder_layers[self.tp_degrees.index(tp_degree)]

    def head_of(self, tp_degree: int) -> Curve:
        """Return the times of the output head on a group of `tp_degree` devices.

        Raises:
            KeyError: the profile holds no such degree.
        """
        heads = [layer.head for layer in self.layers if layer.tp_degree == tp_degree]
        if not heads:
            raise KeyError(tp_degree)
        return heads[0] or self.head


Table = TypeVar("Table", bound=Frozen)


def _slowed(table: Table, factor: float) -> Table:
    """Return a copy with all curves and surfaces in it, at any depth, multiplied."""

    def of(value: Any) -> Any:
        if isinstance(value, Curve | Surface | Jitter):
            return value.times(factor)
        if isinstance(value, Frozen):
            return _slowed(value, factor)
        return tuple(map(of, value)) if isinstance(value, tuple) else value

    return table.model_copy(update={name: of(value) for name, value in table})
