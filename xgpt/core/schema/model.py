"""Define the shape of a model: all sizes that planning and running need."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from xgpt.core.schema.base import Frozen
from xgpt.core.schema.caches import BYTES_PER_ELEMENT, caches_of
from xgpt.core.schema.families import FAMILIES
from xgpt.core.schema.model_blocks import Attention, Block, Sizes
from xgpt.core.schema.model_parts import (
    Experts,
    LatentAttention,
    LinearRope,
    LongRope,
    Part,
    Quantization,
    RopeScaling,
    Tower,
    YarnRope,
)

if TYPE_CHECKING:
    Family = str
else:
    Family = Literal[(*dict.fromkeys(row["family"] for row in FAMILIES.values()), "other")]
"""Families that xgpt runs or whose shapes it reads completely. Models of family "other" are planned from `blocks`."""
StoredDType = Literal["float32", "float16", "bfloat16"]
"""Types in which a checkpoint may store weights."""
RunDType = Literal[StoredDType, "int8"]
"""Types of matrix products. int8, only on CPUs, has one scale for each output channel of the weights and one for each
token.
"""
DType = Literal[RunDType, "float8"]
"""Types for which plans can be made. xgpt's own engine supports float8 neither for weights nor for K/V."""

HEAD = "head"
"""Key in `layouts` for an 8-bit copy of the output head. An engine finds the highest logits with this copy."""


class Precision(NamedTuple):
    """Data types of a model's parts in memory.

    Attributes:
        weights: type of the weights of projections.
        state: type of activations and the embedding table.
        kv: type of K/V.
        packs: whether weights are stored in a layout for the device's kernels. A tied output head is then a separate
            copy of the embedding.
        screens: whether the output head is stored twice: in 8 bits, and as in the checkpoint.
    """

    weights: DType
    state: DType
    kv: DType
    packs: bool
    screens: bool = False

    @classmethod
    def of(
        cls,
        dtype: DType,
        device_type: str,
        engine: str | None = None,
        kv_dtype: DType | None = None,
        layouts: Collection[str] = (),
    ) -> Precision:
        """Return the data types that an engine uses if matrix products have type `dtype`.

        With bfloat16 or int8 on a CPU, xgpt's own engine uses float32 for everything except matrix products and K/V.
        K/V is then bfloat16 by default, since attention for few tokens is bound by reading K/V.

        Args:
            engine: the engine. None means xgpt's own.
            kv_dtype: type of K/V. None means the engine's default.
            layouts: keys of the weights that have a special layout on a CPU (see `Profile.layouts`).
        """
        if device_type != "cpu" or engine not in (None, "xgpt"):
            return cls(dtype, "bfloat16" if dtype == "float8" else dtype, kv_dtype or dtype, packs=False)
        if dtype in ("bfloat16", "int8"):
            return cls(dtype, "float32", kv_dtype or "bfloat16", packs=True)
        return cls(dtype, dtype, kv_dtype or dtype, packs=True, screens=HEAD in layouts)


class ModelShape(Frozen):
    """The sizes on which a model's step times depend. Models that differ only in name share a profile.

    `num_layers` does not count encoder layers. `head_dim` need not be hidden_size / num_heads.
    """

    name: str
    """Name of the model."""
    family: Family
    """Architecture."""
    num_layers: PositiveInt
    """Number of decoder layers."""
    num_encoder_layers: int = Field(default=0, ge=0)
    """Number of encoder layers."""
    hidden_size: PositiveInt
    """Width of hidden states."""
    num_heads: PositiveInt
    """Number of query heads."""
    num_kv_heads: PositiveInt
    """Number of key and value heads."""
    head_dim: PositiveInt
    """Width of a head."""
    ffn_size: PositiveInt
    """Inner width of a feed-forward block, between its two matrix products."""
    gated_ffn: bool = False
    """Whether the feed-forward block has a gate."""
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "relu"
    """Activation of the feed-forward block."""
    vocab_size: PositiveInt
    """Number of tokens in the vocabulary."""
    max_context: PositiveInt
    """Largest number of tokens of prompt and output together."""
    attention_bias: bool = False
    """Whether projections of attention have biases."""
    experts: Experts | None = None
    """Experts, which replace the feed-forward block of a layer. None means no experts."""
    latent: LatentAttention | None = None
    """Latent attention, which stores one vector per token. None means that keys and values are stored."""
    sliding_window: PositiveInt | None = None
    """Number of most recent tokens, itself included, to which a token attends. None means all."""
    full_attention_layers: tuple[int, ...] = ()
    """Numbers of the layers without a sliding window, if other layers have one."""
    attention_sinks: bool = False
    """Whether each head has an attention sink: a learned score that belongs to no token."""
    quantization: Quantization | None = None
    """Format of quantised weights in the checkpoint. None means that weights are stored in the dtype."""

    layer_embedding_params: NonNegativeInt = 0
    """Number of weights of the embeddings that layers add to their inputs, over all layers."""
    blocks: tuple[Block, ...] = ()
    """The kinds of layers, if they differ in more than window and experts. Empty means that all layers have the sizes
    above.
    """

    @property
    def shape(self) -> ModelShape:
        """The same shape as a plain `ModelShape`."""
        return ModelShape(**{name: getattr(self, name) for name in ModelShape.model_fields})

    def differs_from(self, other: ModelShape) -> str | None:
        """Return a description of the first size in which two shapes differ, or None if they are equal."""
        for name in ModelShape.model_fields:
            ours, theirs = getattr(self, name), getattr(other, name)
            if name != "name" and ours != theirs:
                return f"{name} {ours}, not {theirs}"
        return None


class ModelSpec(ModelShape):
    """A transformer, with all sizes and constants that are needed to run it.

    The decoder of an encoder-decoder (t5) starts with `bos_token_id` (default 0). Its self-attention, and that of the
    encoder, adds a learned bias for each of `relative_buckets` ranges of the distance between tokens.
    """

    tie_embeddings: bool = True
    """Whether embedding and output head share their weights."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Epsilon of norms."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of rotary embeddings."""
    rope_scaling: RopeScaling | LinearRope | YarnRope | LongRope | None = None
    """Scaling of rotary embeddings."""
    rotary_dim: PositiveInt | None = None
    """Number of leading dimensions of a head that are rotated by position. None means all."""
    sliding_rope_theta: PositiveFloat | None = None
    """Base of rotary embeddings, without scaling, in layers with a sliding window. None means the same embeddings as in
    other layers.
    """
    score_scale: PositiveFloat | None = None
    """Factor on attention scores. None means 1 over the square root of head_dim."""
    score_softcap: PositiveFloat | None = None
    """Largest magnitude of attention scores, which tanh limits. None means no limit."""
    logit_softcap: PositiveFloat | None = None
    """Largest magnitude of logits, which tanh limits. None means no limit."""
    relative_buckets: int = Field(default=32, ge=4)
    """Number of buckets of relative positions (t5)."""
    relative_max_distance: PositiveInt = 128
    """Number of tokens from which on all distances are in the last bucket (t5)."""
    head_scale: float = Field(default=1.0, gt=0)
    """Factor on the hidden states that enter the output head."""
    bos_token_id: int | None = None
    """Id of the decoder's first token."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids of the tokens that end an output."""
    mtp_layers: NonNegativeInt = Field(default=0, exclude_if=lambda number: not number)
    """Number of layers for multi-token prediction. Only speculative decoding uses them."""
    default_dtype: DType = "float16"
    """Data type that plans use by default."""
    unsupported: tuple[str, ...] = Field(default=(), exclude_if=lambda names: not names)
    """Fields of config.json, each as "field: value", that xgpt does not know or whose values its own engine does not
    support. Plans for other engines assume that they change no size.
    """
    tower_params: NonNegativeInt = 0
    """Number of weights of encoders for images and sound. Other engines load them with the language model."""
    tower: Tower | None = Field(default=None, exclude_if=lambda tower: tower is None)
    """Encoder of images, which engines run on the largest image when they measure their use of memory."""

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: {self.num_kv_heads} does not divide num_heads {self.num_heads}")
        if (self.family == "t5") != (self.num_encoder_layers > 0):
            raise ValueError(
                f"num_encoder_layers: {self.num_encoder_layers} does not fit family {self.family!r}; "
                "only encoder-decoder families (t5) have encoder layers"
            )
        if self.experts is not None and self.is_encoder_decoder:
            raise ValueError(f"experts: family {self.family!r} has an encoder; only decoder-only families have experts")
        layers = set(self.full_attention_layers) | set(self.experts.dense_layers if self.experts else ())
        if any(not 0 <= layer < self.num_layers for layer in layers):
            says = f"full_attention_layers, experts.dense_layers: {sorted(layers)} must lie in [0, {self.num_layers})"
            raise ValueError(says)
        if self.full_attention_layers and self.sliding_window is None:
            says = "full_attention_layers: leave it out, since all layers attend to all tokens without a sliding_window"
            raise ValueError(says)
        if self.relative_max_distance <= self.relative_buckets // 2:
            raise ValueError(
                f"relative_max_distance: {self.relative_max_distance} must exceed half of relative_buckets, "
                f"{self.relative_buckets}: each bucket of the first half holds one distance"
            )
        if self.is_encoder_decoder and not 0 <= (self.bos_token_id or 0) < self.vocab_size:
            raise ValueError(f"bos_token_id: {self.bos_token_id} is outside the vocabulary of {self.vocab_size}")
        return self

    @property
    def special_attention(self) -> str | None:
        """Name of the first field that makes attention differ from plain softmax attention over all keys, or None."""
        names = ("sliding_window", "attention_sinks", "score_softcap", "latent")
        return next((name for name in names if getattr(self, name)), None)

    @property
    def is_encoder_decoder(self) -> bool:
        return self.num_encoder_layers > 0

    @property
    def norms_span_heads(self) -> bool:
        """Whether a token's query (and key) is normalised over all heads together, even if the heads are on several
        devices.
        """
        return self.family == "minimax_m2"

    @property
    def run_dtypes(self) -> tuple[RunDType, ...]:
        """Data types in which the model can run. T5's published checkpoints overflow float16."""
        return tuple(dtype for dtype in get_args(RunDType) if dtype != "float16" or self.family != "t5")

    @property
    def kinds(self) -> tuple[Block, ...]:
        """The kinds of decoder layers, each with its layers' numbers."""
        full = self.full_attention_layers if self.sliding_window else ()
        return self.blocks or _kinds(
            self.num_layers,
            Attention(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                window=self.sliding_window,
                latent=self.latent,
            ),
            full,
            self.ffn_size,
            self.experts,
        )

    @property
    def sizes(self) -> Sizes:
        """The model's sizes that, besides a layer's own, determine its number of weights."""
        return Sizes(hidden=self.hidden_size, products=3 if self.gated_ffn else 2)

    @property
    def attention_params(self) -> int:
        """Number of weights of the first layer's attention."""
        return self.sizes.mixer(self.kinds[0])

    @property
    def ffn_params(self) -> int:
        """Number of weights of a dense feed-forward block."""
        return self.sizes.products * self.hidden_size * self.ffn_size

    @property
    def encoder_layer_params(self) -> int:
        return self.attention_params + self.ffn_params

    @property
    def decoder_layer_params(self) -> int:
        """Mean number of weights of a decoder layer, with cross-attention in encoder-decoders."""
        return self.decoder_params // self.num_layers

    @property
    def decoder_params(self) -> int:
        """Number of weights of all decoder layers."""
        cross = self.num_layers * self.attention_params if self.is_encoder_decoder else 0
        return cross + sum(len(kind.layers) * self.sizes.whole(kind) for kind in self.kinds)

    @property
    def embedding_params(self) -> int:
        """Number of weights of the token embedding, the output head (unless tied) and the embeddings of layers."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2) + self.layer_embedding_params

    def kv_bytes_of(self, kind: Block, dtype: DType, group: int = 1) -> float:
        """Return the K/V bytes of a token in one layer of a kind, on one device of a tensor-parallel group of `group`
        devices.
        """
        compressed = kind.attention is not None and kind.attention.compression > 1
        kept = (each for each in caches_of(kind, dtype, group) if not each.is_state)
        return sum(each.entry_bytes / each.tokens for each in kept if each.window is None or not compressed)

    def kv_bytes_per_token(self, dtype: DType) -> int:
        """Return the K/V bytes of a token in all decoder layers. Sliding windows are ignored."""
        return sum(len(kind.layers) * int(self.kv_bytes_of(kind, dtype)) for kind in self.kinds)

    @property
    def unpacked(self) -> ModelSpec:
        """The same model without quantisation: all weights have the dtype."""
        return self if self.quantization is None else self.but(quantization=None)

    def layer_weight_bytes(self, dtype: DType, first: int = 0, last: int | None = None) -> float:
        """Return the bytes of the weights of decoder layers [first, last). The default is all layers."""
        last, sizes = self.num_layers if last is None else last, self.sizes
        cross = (last - first) * self.attention_params if self.is_encoder_decoder else 0
        total = float(cross * self.bytes_per_weight(dtype, "attention"))
        for kind in self.kinds:
            number = 0 if kind.experts is None else kind.experts.number
            of_layer = sizes.mixer(kind) * self.bytes_per_weight(dtype, "attention")
            of_layer += sizes.dense(kind) * self.bytes_per_weight(dtype, "dense")
            of_layer += sizes.beside_experts(kind) * self.bytes_per_weight(dtype, "shared")
            of_layer += number * sizes.expert(kind) * self.bytes_per_weight(dtype, "experts")
            total += kind.count(first, last) * of_layer
        return total

    def expert_bytes(self, dtype: DType, first: int = 0, last: int | None = None) -> float:
        """Return the bytes of the routed experts of decoder layers [first, last). The default is all layers."""
        last, total = self.num_layers if last is None else last, 0
        for kind in self.kinds:
            if kind.experts is not None:
                total += kind.count(first, last) * kind.experts.number * self.sizes.expert(kind)
        return total * self.bytes_per_weight(dtype, "experts")

    def unshared_bytes(self, dtype: DType, first: int = 0, last: int | None = None) -> float:
        """Return the bytes of those weights of decoder layers [first, last) that every device of a tensor-parallel
        group stores in full. The default is all layers.
        """
        last = self.num_layers if last is None else last
        unshared = sum(kind.count(first, last) * self.sizes.unshared(kind) for kind in self.kinds)
        return unshared * self.bytes_per_weight(dtype, "attention")

    def bytes_per_weight(self, dtype: DType, part: Part) -> float:
        """Return the bytes of one weight in a part of a layer."""
        stored = None if self.quantization is None else self.quantization.of(part)
        size = float(BYTES_PER_ELEMENT[dtype])
        return size if stored is None else min(size, stored.bytes_per_weight)

    def dtype_in(self, engine: str | None) -> DType:
        """Return the data type in which an engine runs the model if none is given. vLLM runs float32 as bfloat16."""
        return "bfloat16" if engine == "vllm" and self.default_dtype == "float32" else self.default_dtype

    def weight_bytes(self, dtype: DType) -> int:
        others = self.embedding_params + self.num_encoder_layers * self.encoder_layer_params
        return math.ceil(others * BYTES_PER_ELEMENT[dtype] + self.layer_weight_bytes(dtype))


@lru_cache(maxsize=256)
def _kinds(
    num_layers: int, attention: Attention, full: tuple[int, ...], ffn_size: int, experts: Experts | None
) -> tuple[Block, ...]:
    """Return the kinds of layers, which differ only in whether they have a window and experts."""
    whole, dense = set(full), set(range(num_layers)) if experts is None else set(experts.dense_layers)
    found: dict[tuple[bool, bool], list[int]] = {}
    for layer in range(num_layers):
        found.setdefault((layer in whole, layer in dense), []).append(layer)
    return tuple(
        Block(
            layers=tuple(layers),
            attention=attention.but(window=None) if sees_all else attention,
            ffn_size=ffn_size if is_dense else 0,
            experts=None if is_dense else experts,
        )
        for (sees_all, is_dense), layers in found.items()
    )
