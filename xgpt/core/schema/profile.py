"""Define profiles: the step times of one model on one kind of device, from which all predictions are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeVar

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from xgpt.core.schema.base import Frozen
from xgpt.core.schema.model import DType, ModelShape

KNOWN_ERROR = {"measured": 0.05, "imported": 0.10, "analytic": 0.12}
"""Known relative error of step times, by the source of a profile (docs/results/truth.md).

- measured: LEAST_HEADROOM;
- imported: the median error of the time per output token over 925 measured configurations of served models, 9.5%;
- analytic: that error combined with the median error of a datasheet's operator times against the imported ones (6 to
  9%): sqrt(9.5^2 + 7^2).

The error of closed forms against the simulated engine (a median of 0.2% of latency) is small in comparison.
"""

UNSERVED_ERROR = {"xgpt": 0.10, "vllm": 0.30}
"""Known relative error of step times that were measured one by one and not fitted to a served engine, by engine.

- xgpt: steps become up to 12% longer if an endpoint and its clients run on the same cores, and because some memory is
  written for the first time (docs/results/prediction.md);
- vllm: with xgpt's scheduler in vLLM, steps that decode and encode took 28% longer (docs/results/gpu.md).
"""
SERVED = "served"
"""Key in a profile's provenance that describes its fit to the steps of a served engine."""
PACES_AT_REST = (0.90, 1.10)
"""Range of the pace on an otherwise idle machine, for a fitted profile. The range contains the pace of 82 of 92 loads,
in three number types (docs/results/prediction.md).
"""

LEAST_HEADROOM = KNOWN_ERROR["measured"]
"""Least headroom of plans from measured profiles, even if the spread is small. A minute of measuring shows neither slow
drift nor the load of clients on the same machine. A running server re-plans only at larger deviations.
"""


RESTLESS = 0.15
"""If the spread exceeds this, the machine counts as busy with other work while the profile was measured."""
MOST_HEADROOM = 0.20
"""Largest headroom that a profile's spread or other processes can cause. Otherwise, a disturbed measurement would lead
to plans that waste more of the machine.
"""


class Curve(Frozen):
    """Seconds as a function of one size: `seconds[i]` at `points[i]`, and linear between points."""

    points: tuple[int, ...] = Field(min_length=2)
    """Sizes, rising."""
    seconds: tuple[float, ...]
    """Seconds at each size."""

    @model_validator(mode="after")
    def _check(self) -> Curve:
        if len(self.points) != len(self.seconds):
            raise ValueError(f"{len(self.points)} points but {len(self.seconds)} times")
        if any(b <= a for a, b in pairwise(self.points)):
            raise ValueError(f"points must rise, but {self.points} do not")
        if self.points[0] < 0:
            raise ValueError(f"a point is negative: {self.points[0]}")
        if min(self.seconds) < 0:
            raise ValueError(f"a time is negative: {min(self.seconds)}")
        return self

    def times(self, factor: float) -> Curve:
        """Return the curve with all times multiplied by `factor`."""
        return self.but(seconds=tuple(factor * s for s in self.seconds))


class Surface(Frozen):
    """Seconds as a function of batch size and length: `seconds[i][j]` at `batches[i]` and `lengths[j]`, and bilinear
    between them.
    """

    batches: tuple[int, ...] = Field(min_length=1)
    """Batch sizes, rising."""
    lengths: tuple[int, ...] = Field(min_length=2)
    """Lengths in tokens, rising."""
    seconds: tuple[tuple[float, ...], ...]
    """For each batch size, a row with the seconds at each length."""

    @model_validator(mode="after")
    def _check(self) -> Surface:
        for name, points in (("batches", self.batches), ("lengths", self.lengths)):
            if any(b <= a for a, b in pairwise(points)):
                raise ValueError(f"{name} must rise, but {points} do not")
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
        """Return a surface from measured seconds by (batch, length). Points that were not measured are extrapolated in
        proportion to the batch.
        """
        rows: list[list[float]] = []
        for i, batch in enumerate(batches):
            row = [
                measured[batch, length] if (batch, length) in measured else rows[-1][j] * batch / batches[i - 1]
                for j, length in enumerate(lengths)
            ]
            rows.append(row)
        return cls(batches=tuple(batches), lengths=tuple(lengths), seconds=tuple(map(tuple, rows)))

    def times(self, factor: float) -> Surface:
        """Return the surface with all times multiplied by `factor`."""
        return self.but(seconds=tuple(tuple(factor * s for s in row) for row in self.seconds))


class CrossTimes(Frozen):
    """Times of cross-attention in one decoder layer, at one tensor-parallel degree."""

    keys_values: Curve
    """Times to compute keys and values from the encoder's output, once for each request, by input tokens."""
    attention: Surface
    """Times of attention of one token of each request to its input, by (batch, input length)."""


class FittedLoads(Frozen):
    """The measured loads to which a profile was fitted."""

    running: tuple[PositiveFloat, PositiveFloat]
    """The smallest and the largest mean number of outstanding requests of a replica."""
    error: NonNegativeFloat
    """The largest relative error of throughput, mean TTFT or mean time between tokens that the fit left."""

    def times_beyond(self, running: float) -> float:
        """Return by what factor, 1 or more, a number of outstanding requests lies outside of the fitted ones."""
        low, high = self.running
        return max(1.0, low / max(running, 1e-9), running / high)


class LayerTimes(Frozen):
    """Times of one decoder layer on a group of `tp_degree` devices.

    All-reduces within the group are part of `rest`. Source: ExeGPT sec. 3 (XProfiler).
    """

    tp_degree: PositiveInt = 1
    """Number of devices of the group."""
    ep_degree: PositiveInt = 1
    """Number of parts into which a layer's experts are divided. The devices of a part store slices of its experts. If
    the number exceeds `tp_degree`, several groups divide the experts, and the times are for the same number of tokens
    in each group.
    """
    rest: Curve
    """Times of everything except attention, by tokens."""
    last: Curve | None = None
    """Times of everything except attention in the model's last layer, by tokens. The layer computes only keys and
    values for all tokens. Its further work, for tokens whose logits are needed, is part of `head`. None means that the
    last layer is like all others.
    """
    encode_attention: Surface
    """Times of causal attention of whole prompts, by (batch, prompt length)."""
    decode_attention: Surface
    """Times of attention of one token of each request to its context, by (batch, context length)."""
    cross: CrossTimes | None = None
    """Times of cross-attention, only in encoder-decoders."""
    head: Curve | None = None
    """The profile's `head` if the group's devices divide the output head. None means the times on one device."""


class EncoderLayerTimes(Frozen):
    """Times of one encoder layer on a group of `tp_degree` devices, including all-reduces."""

    tp_degree: PositiveInt = 1
    """Number of devices of the group."""
    rest: Curve
    """Times of everything except attention, by tokens."""
    attention: Surface
    """Times of attention among all tokens of a prompt, by (batch, prompt length)."""


class Jitter(Frozen):
    """The variation of the times of equal steps, due to the clock rate, stalls and other processes."""

    seconds: float = Field(gt=0)
    """Mean time of the measured steps."""
    ratios: tuple[NonNegativeFloat, ...] = Field(min_length=1)
    """Step times divided by their mean, at evenly spaced quantiles from the lowest to the highest."""

    @model_validator(mode="after")
    def _check(self) -> Jitter:
        if any(b < a for a, b in pairwise(self.ratios)):
            raise ValueError("ratios must rise")
        if self.ratios[-1] == 0:
            raise ValueError("ratios: all of them are 0")
        return self

    def times(self, factor: float) -> Jitter:
        """Return the same jitter for steps that take `factor` times as long."""
        return self.but(seconds=factor * self.seconds)


class Profile(Frozen):
    """The step times of a model on a kind of device: measured, computed from a datasheet, or imported.

    Even if the profile is correct, predictions may have an error as large as `spread`.
    """

    schema_version: Literal[2] = 2
    """Version of this format."""
    source: Literal["measured", "analytic", "imported"]
    """Origin of the times."""
    model: ModelShape
    """The shape of the model."""
    dtype: DType
    """Data type of matrix products."""
    kv_dtype: DType | None = None
    """Data type of keys and values. None means `dtype`."""
    device: str
    """Name of the device."""
    devices_per_node: PositiveInt = 1
    """Number of devices in a node of the cluster. The profile covers tensor-parallel degrees up to this number."""
    engine: str | None = None
    """The engine whose steps were timed: "xgpt", "vllm" or another framework. None means that times are from a
    datasheet, for any engine."""
    engine_version: str | None = None
    """Version of that engine."""
    num_threads: PositiveInt | None = None
    """Number of threads of the engine during the measurement."""
    layouts: dict[str, str] = Field(default_factory=dict)
    """Fastest layout of weights on this CPU in xgpt's own engine, by shape (OUTxIN). Key `head` states the layout of an
    8-bit copy of the output head, which makes greedy sampling faster. Keys `prompts` and `decodes` state how many keys
    attention reads at a time.
    """
    layers: tuple[LayerTimes, ...] = Field(min_length=1)
    """Times of a decoder layer, for each pair of tensor-parallel and expert-parallel degree."""
    encoder_layers: tuple[EncoderLayerTimes, ...] = ()
    """Times of an encoder layer, for each tensor-parallel degree of `layers`. Only encoder-decoders have them."""
    embedding: Curve
    """Times of the embedding, by tokens."""
    head: Curve
    """Times of final norm, output head and sampling, by sampled tokens. If layers have `last`, these times include the
    rest of the last layer.
    """
    overhead: Curve
    """Times of the engine's loop for each step (scheduling, batch assembly, bookkeeping), by requests in the step."""
    hop: Curve | None = None
    """Times to transfer hidden states to a pipeline stage on the same node, by tokens, or None if not known."""
    inter_node_hop: Curve | None = None
    """Times to transfer hidden states to a pipeline stage on another node, by tokens, or None if not known."""
    kv_transfer: Curve | None = None
    """Times to transfer the K/V of all layers from one device through host memory to another, by tokens.

    A device with only a share of the layers or heads takes the time for this share of the tokens.
    """
    load_bytes_per_s: float | None = Field(default=None, gt=0, exclude_if=lambda rate: rate is None)
    """Rate at which a device loads weights from a checkpoint in host memory, or None if not known."""
    spread: float = Field(default=0.0, ge=0)
    """Share by which steps in slow periods of the measurement (the 90th percentile) took longer than the mean."""
    others: dict[str, float] = Field(default_factory=dict, exclude_if=lambda others: not others)
    """Mean number of cores that each other process used during the measurement, by name, if at least 0.05. "steal"
    stands for the other machines on a virtual machine's host.
    """
    is_brief: bool = Field(default=False, exclude_if=lambda is_brief: not is_brief)
    """Whether fewer points were measured, and less often, because other processes used the machine. Other points are
    interpolated.
    """
    gflops: float | None = Field(default=None, gt=0, exclude_if=lambda gflops: gflops is None)
    """GFLOP/s of a fixed matrix product on all cores at the start of the measurement, which shows the clock rate."""
    jitter: Jitter | None = Field(default=None, exclude_if=lambda jitter: jitter is None)
    """The variation of short steps around their mean. None means that it is not known, so all steps take the mean time.
    """
    fitted: FittedLoads | None = Field(default=None, exclude_if=lambda fitted: fitted is None)
    """The measured loads to which these times were fitted."""
    provenance: dict[str, str] = Field(default_factory=dict)
    """By name of a part of the profile, the source of its numbers. Key "served" describes a fit to a served engine."""
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
            raise ValueError(f"encoder_layers: tp_degrees {encoder_degrees} must equal those of layers, {degrees}")
        if any((layer.cross is None) != (not encoder_degrees) for layer in self.layers):
            says = "layers: cross is needed at every degree if there are encoder_layers, and not allowed otherwise"
            raise ValueError(says)
        return self

    @property
    def tp_degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that the profile covers."""
        return tuple(dict.fromkeys(layer.tp_degree for layer in self.layers))

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Pairs of tensor-parallel and expert-parallel degree that the profile covers."""
        return tuple((layer.tp_degree, layer.ep_degree) for layer in self.layers)

    @property
    def largest_batch(self) -> int:
        """The largest number of decoding requests for which the profile has times."""
        return self.layers[0].decode_attention.batches[-1]

    @property
    def headroom(self) -> float:
        """Default headroom of plans from this profile.

        It is the larger of two numbers: the profile's spread, and the known error of the source plus the share of the
        engine's cores that other processes used during the measurement. They may use as many while the plan runs.
        Spread and other processes raise the headroom to at most `MOST_HEADROOM`.
        """
        known = KNOWN_ERROR[self.source]
        if self.source == "measured" and not self.is_served:
            known = UNSERVED_ERROR.get(self.engine or "", known)
        share = sum(self.others.values()) / (self.num_threads or 1)
        return round(max(min(max(self.spread, known + share), MOST_HEADROOM), known), 4)

    @property
    def is_served(self) -> bool:
        """Whether the times are fitted to the steps of a served engine."""
        return SERVED in self.provenance

    @property
    def is_restless(self) -> bool:
        """Whether the measurement was disturbed: its spread exceeds `RESTLESS`, or `is_brief`."""
        return self.spread > RESTLESS or self.is_brief

    @property
    def unrest(self) -> str:
        """A description of the disturbance, for messages."""
        slow = f"steps in slow periods took {100 * self.spread:.0f}% longer than on average"
        text = f"the profile was measured on a busy machine: {slow}"
        if self.is_brief:
            text += ", and most points were interpolated instead of measured"
        if not self.others:
            return f"{text}; none of the visible processes used the cores"
        named = ", ".join(f"{name} {cores:.2g}" for name, cores in list(self.others.items())[:3])
        return f"{text}; meanwhile other processes used {sum(self.others.values()):.2g} cores ({named})"

    @property
    def of_means(self) -> Profile:
        """The same profile without jitter: every step takes its mean time."""
        return self if self.jitter is None else self.but(jitter=None)

    def slowed(self, factor: float) -> Profile:
        """Return the profile with all times multiplied by `factor`."""
        return self if factor == 1 else _slowed(self, factor)

    def layer(self, tp_degree: int, ep_degree: int = 1) -> LayerTimes:
        """Return the times of a decoder layer on a group with these degrees.

        Raises:
            KeyError: the profile has no such group.
        """
        if (tp_degree, ep_degree) not in self.groups:
            raise KeyError(tp_degree)
        return self.layers[self.groups.index((tp_degree, ep_degree))]

    def encoder_layer(self, tp_degree: int) -> EncoderLayerTimes:
        """Return the times of an encoder layer at one tensor-parallel degree.

        Raises:
            KeyError: the profile has no such degree, or no encoder.
        """
        if not self.encoder_layers:
            raise KeyError(tp_degree)
        if tp_degree not in self.tp_degrees:
            raise KeyError(tp_degree)
        return self.encoder_layers[self.tp_degrees.index(tp_degree)]

    def head_of(self, tp_degree: int) -> Curve:
        """Return the times of the output head on a group of `tp_degree` devices.

        Raises:
            KeyError: the profile has no such degree.
        """
        heads = [layer.head for layer in self.layers if layer.tp_degree == tp_degree]
        if not heads:
            raise KeyError(tp_degree)
        return heads[0] or self.head


Table = TypeVar("Table", bound=Frozen)


def _slowed(table: Table, factor: float) -> Table:
    """Return a copy with all times, at any depth, multiplied by `factor`."""

    def of(value: Any) -> Any:
        if isinstance(value, Curve | Surface | Jitter):
            return value.times(factor)
        if isinstance(value, Frozen):
            return _slowed(value, factor)
        return tuple(map(of, value)) if isinstance(value, tuple) else value

    return table.but(**{name: of(value) for name, value in table})
