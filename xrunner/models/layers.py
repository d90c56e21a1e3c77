"""The blocks that model families consist of. None has code for parallelism.

Each block takes the argument `empty`, a function that allocates a parameter: `torch.empty` with dtype and device bound.
The parameters' values are loaded later (weights.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xgpt.core.errors import InputError
from xgpt.core.schema import DType, LinearRope, ModelSpec, RopeScaling, YarnRope
from xrunner.activations import ACTIVATIONS, GATES
from xrunner.attention.base import PLAIN, PositionBias, Scoring
from xrunner.gpu import fused
from xrunner.packing.base import HighestLinear, PackedLinear
from xrunner.packing.choice import pack, pack_highest

Empty = Callable[..., Tensor]


class Attend(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scoring: Scoring) -> Tensor:
        """Return the attention of each query. # q [tokens, heads, dim], k and v [tokens, kv_heads, dim] -> [tokens,
        heads * dim]
        """


def parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Linear(nn.Module):
    """Computes activation(x W^T + b). Several projections of the same input may be fused into one.

    Args:
        weight: an existing weight to use (a tied head). None means that the block allocates one.
    """

    def __init__(
        self,
        empty: Empty,
        in_features: int,
        *out_features: int,
        bias: bool,
        activation: str = "none",
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.parts = out_features
        self.activation = activation
        total = sum(out_features)
        self.weight: nn.Parameter | None = weight
        if weight is None:
            self.weight = parameter(empty(total, in_features))
        self.bias = parameter(empty(total)) if bias else None
        self._packed: PackedLinear | None = None

    def prepack(self, dtype: DType = "float32", layouts: Mapping[str, str] | None = None) -> None:
        """Pack the weight as the device's kernels need it, if that is faster (see `xrunner.packing.choice.pack`).

        The original weight is then freed, unless it is tied. A tied weight stays in the embedding, so its packed copy
        takes additional memory.
        """
        if self.weight is not None and (packed := pack(self.weight.data, self.activation, dtype, layouts)) is not None:
            self._packed = packed
            self.weight = None

    def forward(self, x: Tensor) -> Tensor:  # [tokens, in] -> [tokens, sum of parts], or half of it if gated
        if self._packed is not None:
            return self._packed(x, self.bias)
        assert self.weight is not None
        return ACTIVATIONS[self.activation](F.linear(x, self.weight, self.bias))


class Head(Linear):
    def __init__(self, empty: Empty, in_features: int, vocab_size: int, *, weight: nn.Parameter | None = None) -> None:
        super().__init__(empty, in_features, vocab_size, bias=False, weight=weight)
        self._highest: HighestLinear | None = None

    def prepack(self, dtype: DType = "float32", layouts: Mapping[str, str] | None = None) -> None:
        weight = self.weight
        super().prepack(dtype, layouts)
        if weight is not None and self._packed is not None and dtype == "float32":
            self._highest = pack_highest(weight.data, self._packed, layouts)

    def forward(self, x: Tensor, *, highest_only: bool = False, added: Tensor | None = None) -> Tensor:
        """Return the logits. # [rows, in] -> [rows, vocab]

        Args:
            highest_only: whether only each row's argmax is needed. Other logits may then be wrong, but are never
                higher.
            added: numbers to add to the logits. # [rows, vocab]
        """
        if highest_only and self._highest is not None:
            return self._highest(x, added)
        logits = super().forward(x)
        return logits if added is None else logits + added


class LayerNorm(nn.Module):
    def __init__(self, empty: Empty, size: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(empty(size))
        self.bias = parameter(empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32 whatever the dtype."""

    def __init__(self, empty: Empty, size: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class OffsetRmsNorm(RmsNorm):
    """x / rms(x) * (1 + weight): stored weights are smaller by one (Gemma)."""

    def forward(self, x: Tensor) -> Tensor:
        # In half precision, 1 + weight would lose up to 0.4% of a channel.
        return F.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


class Embedding(nn.Module):
    """Looks up rows of a table. `offset` is added to each index (OPT's positions start at row 2)."""

    def __init__(self, empty: Empty, num_rows: int, size: int, offset: int = 0) -> None:
        super().__init__()
        self.weight = parameter(empty(num_rows + offset, size))
        self.offset = offset

    def forward(self, index: Tensor) -> Tensor:  # int64 [tokens] -> [tokens, size]
        return F.embedding(index + self.offset if self.offset else index, self.weight)


class Rotary(nn.Module):
    """Rotary position embedding. Dimension d is paired with dimension d + half, as in Hugging Face's checkpoints. If a
    model's spec has a `rotary_dim`, only the first `rotary_dim` dimensions rotate.

    Layers that share one object share a step's angles, since computing angles takes longer than rotating a few rows.

    Source: RoFormer (arXiv 2104.09864).
    """

    frequencies: Tensor  # float32 [dimensions that turn / 2], radians a position

    def __init__(self, empty: Empty, spec: ModelSpec) -> None:
        super().__init__()
        frequencies, self.magnitude = _frequencies(spec)
        device = empty(0).device
        # On "meta", the model has no memory yet, so the frequencies stay on the CPU until they can be moved.
        self.register_buffer(
            "frequencies", frequencies.to("cpu" if device.type == "meta" else device), persistent=False
        )
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def forward(self, positions: Tensor, *heads: Tensor) -> list[Tensor]:
        dim = 2 * len(self.frequencies)
        turns_whole = self.magnitude == 1.0 and all(x.shape[2] == dim for x in heads)
        if turns_whole and fused.runs_on(positions.device.type):
            return [fused.rotate(x, positions, self.frequencies) for x in heads]
        cos, sin = self._turns(positions)
        cos, sin = cos[:, None], sin[:, None]
        turned = []
        for x in heads:
            a, b, rest = x.float().tensor_split((dim // 2, dim), dim=-1)
            turned.append(torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype))
        return turned

    def begin_step(self) -> None:
        """Forget the last step's angles. The same tensor may contain other positions in this step."""
        self._last = None

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the positions' angles. They are computed once per step. # two of [tokens, dim
        / 2]
        """
        if self._last is not None and self._last[0] is positions:
            return self._last[1:]
        angles = positions[:, None] * self.frequencies
        cos, sin = self.magnitude * angles.cos(), self.magnitude * angles.sin()
        self._last = positions, cos, sin
        return cos, sin


def _frequencies(spec: ModelSpec) -> tuple[Tensor, float]:
    """Return each pair's frequency in radians per position, and the factor by which rotated vectors are multiplied. #
    float32 [pairs]

    Linear scaling divides all frequencies by `factor`. Llama 3.1's scaling and YaRN divide only those of pairs that
    rotate about once or less within the trained context. They do not change pairs that rotate many times. In between,
    they interpolate by the number of rotations (Llama 3.1) or by the pair's index (YaRN).

    Raises:
        InputError: this kind of `rope_scaling` is not supported.
    """
    dim = spec.head_dim if spec.rotary_dim is None else spec.rotary_dim
    frequencies = spec.rope_theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    match spec.rope_scaling:
        case None:
            return frequencies, 1.0
        case LinearRope(factor=factor):
            return frequencies / factor, 1.0
        case RopeScaling() as scaling:
            turns = scaling.original_max_position * frequencies / (2 * math.pi)
            kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            return torch.lerp(frequencies / scaling.factor, frequencies, kept.clamp(0.0, 1.0)), 1.0
        case YarnRope() as scaling:
            # The index of the pair that rotates this number of times within the original context.
            per_wave = 2 * math.log(spec.rope_theta) / dim
            low, high = (
                math.log(scaling.original_max_position / (turns * 2 * math.pi)) / per_wave
                for turns in (scaling.beta_fast, scaling.beta_slow)
            )
            if scaling.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, dim - 1)
            waves = torch.arange(len(frequencies), dtype=torch.float32)
            stretched = ((waves - low) / ((high - low) or 0.001)).clamp(0.0, 1.0)
            return torch.lerp(frequencies, frequencies / scaling.factor, stretched), scaling.attention_factor
    raise InputError("model.rope_scaling", spec.rope_scaling.kind, "supported kinds: llama3, linear, yarn")


class RelativeBias(nn.Module):
    """T5's position bias: a number that each head adds to a score. Distances from query to key fall into buckets, and
    each bucket has one number per head.

    Half of the buckets contain one distance each. The others contain increasingly many distances, the last one all
    longer distances. In a bidirectional encoder, each direction has half of the buckets. Source: arXiv 1910.10683 sec.
    2.1.
    """

    def __init__(self, empty: Empty, spec: ModelSpec, *, bidirectional: bool) -> None:
        super().__init__()
        self.weight = parameter(empty(spec.relative_buckets, spec.num_heads))
        self.max_distance = spec.relative_max_distance
        self.bidirectional = bidirectional
        self._buckets: dict[int, Tensor] = {}

    def forward(self, distance: Tensor) -> Tensor:
        """Return the bias of each distance (key position minus query position). # int64 [...] -> [..., heads]"""
        return F.embedding(self.bucket(distance), self.weight)

    def of_places(self, longest: int) -> PositionBias:
        size = 1 << (longest - 1).bit_length()
        center = size - 1 if self.bidirectional else 0
        if size not in self._buckets:
            self._buckets[size] = self.bucket(torch.arange(center, -size, -1, device=self.weight.device))
        values = F.embedding(self._buckets[size], self.weight)  # [places, heads]
        return PositionBias(values.t().float().contiguous(), center)

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the bucket of each distance (key position minus query position). # int64 [...] -> same"""
        num_buckets, first = self.weight.shape[0], torch.zeros_like(distance)
        if self.bidirectional:
            num_buckets //= 2
            first = (distance > 0) * num_buckets
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        num_exact = num_buckets // 2
        # The terms are those of transformers, since the result depends on rounding if a distance is at a bucket's
        # limit.
        ratio = torch.log(distance.clamp(min=num_exact).float() / num_exact) / math.log(self.max_distance / num_exact)
        shared = num_exact + (ratio * (num_buckets - num_exact)).long()
        return first + torch.where(distance < num_exact, distance, shared.clamp(max=num_buckets - 1))


class SelfAttention(nn.Module):
    """Self-attention and its projections. The attention itself is computed by `attend`, an argument of `forward`.

    Args:
        qk_norm: the type of norm on each head's query and key (Qwen3, Gemma 3). None means no norm.
        scoring: the layer's scoring. Its sinks, if the model has any, are a parameter of this block.
    """

    def __init__(
        self,
        empty: Empty,
        spec: ModelSpec,
        *,
        qkv_bias: bool,
        out_bias: bool,
        rotary: Rotary | None = None,
        qk_norm: type[RmsNorm] | None = None,
        scoring: Scoring = PLAIN,
    ) -> None:
        super().__init__()
        self._scoring = scoring
        self.sinks = parameter(empty(spec.num_heads)) if spec.attention_sinks else None
        self.heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self.head_dim = spec.head_dim
        self.qkv = Linear(empty, spec.hidden_size, *(n * spec.head_dim for n in self.heads), bias=qkv_bias)
        self.out = Linear(empty, spec.num_heads * spec.head_dim, spec.hidden_size, bias=out_bias)
        self.q_norm = qk_norm(empty, spec.head_dim, spec.norm_eps) if qk_norm else nn.Identity()
        self.k_norm = qk_norm(empty, spec.head_dim, spec.norm_eps) if qk_norm else nn.Identity()
        self.rotary = rotary

    def forward(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:  # [tokens, hidden] -> same
        qkv = self.qkv(hidden).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split(self.heads, dim=1)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(positions, q, k)
        return self.out(attend(q, k, v, scoring=self.scoring))

    @property
    def scoring(self) -> Scoring:
        return self._scoring if self.sinks is None else self._scoring._replace(sinks=self.sinks)


UNSCALED = Scoring(scale=1.0)


class CrossAttention(nn.Module):
    def __init__(self, empty: Empty, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        size = spec.num_heads * spec.head_dim
        self.q = Linear(empty, spec.hidden_size, size, bias=False)
        self.kv = Linear(empty, spec.hidden_size, size, size, bias=False)
        self.out = Linear(empty, size, spec.hidden_size, bias=False)

    def forward(self, hidden: Tensor, memory: Tensor | None, attend: Attend) -> Tensor:
        """Attend to the encoder's output. `memory` is its part for new prompts. Earlier prompts' keys and values are
        cached.
        # [tokens, hidden], [encoder tokens, hidden] -> [tokens, hidden]
        """
        q = self.q(hidden).unflatten(-1, (-1, self.head_dim))
        k = v = q[:0]
        if memory is not None:
            k, v = self.keys_and_values(memory)
        return self.out(attend(q, k, v, scoring=UNSCALED))

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the encoder's output. # [encoder tokens, hidden] -> two of [encoder tokens,
        heads, dim]
        """
        k, v = self.kv(memory).unflatten(-1, (-1, self.head_dim)).chunk(2, dim=1)
        return k, v


class Mlp(nn.Module):
    def __init__(self, empty: Empty, spec: ModelSpec, *, bias: bool) -> None:
        super().__init__()
        self.up = Linear(empty, spec.hidden_size, spec.ffn_size, bias=bias, activation=spec.activation)
        self.down = Linear(empty, spec.ffn_size, spec.hidden_size, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:  # [tokens, hidden] -> same
        return self.down(self.up(hidden))


class GatedMlp(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up fused. Source: GLU variants (arXiv 2002.05202).

    Attributes:
        takes_turns: whether the outputs of gate and up alternate in the stored weight. The subclass then applies the
            activation function.
    """

    takes_turns: ClassVar[bool] = False

    def __init__(self, empty: Empty, spec: ModelSpec, *, bias: bool = False) -> None:
        super().__init__()
        parts = (2 * spec.ffn_size,) if self.takes_turns else (spec.ffn_size, spec.ffn_size)
        activation = "none" if self.takes_turns else GATES[spec.activation]
        self.gate_up = Linear(empty, spec.hidden_size, *parts, bias=bias, activation=activation)
        self.down = Linear(empty, spec.ffn_size, spec.hidden_size, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:  # [tokens, hidden] -> same
        return self.down(self.gate_up(hidden))
