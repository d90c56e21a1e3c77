"""The shape of a model: all that planning and running need to know of it."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from pydantic import Field, PositiveInt, model_validator

from xgpt.schema.base import Frozen

Family = Literal["opt", "gpt2", "llama", "qwen2", "qwen3", "t5"]
StoredDType = Literal["float32", "float16", "bfloat16"]
"""Types in which a checkpoint's weights may be stored."""
RunDType = Literal[StoredDType, "int8"]
"""Types that products run in: int8 on CPUs only, with a scale for each output of the weights and for each token."""
DType = Literal[RunDType, "float8"]
"""Types that models are planned for. float8, for weights and K/V alike, can be planned but not run."""

BYTES_PER_ELEMENT: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8": 1}


class Precision(NamedTuple):
    """Types of a model's parts in memory.

    Attributes:
        weights: type of the projections.
        state: type of K/V, activations and the embedding table.
        packs: whether projections are laid out for the device's kernels: a tied head is then a copy of the embedding.
    """

    weights: DType
    state: DType
    packs: bool

    @classmethod
    def of(cls, dtype: DType, device_type: str, engine: str | None = None) -> Precision:
        """Return what an engine (None: ours) keeps for a dtype: ours keeps float32 on CPUs for all but the products."""
        if device_type != "cpu" or engine not in (None, "native"):
            return cls(dtype, dtype, packs=False)
        return cls(dtype, "float32" if dtype in ("bfloat16", "int8") else dtype, packs=True)


class RopeScaling(Frozen):
    """Llama 3.1's frequency scaling of rotary embeddings."""

    factor: float = Field(gt=0)
    """Factor on long wavelengths."""
    low_freq_factor: float = Field(gt=0)
    """Wavelengths above the context over this are scaled fully."""
    high_freq_factor: float = Field(gt=0)
    """Wavelengths below the context over this are not scaled."""
    original_max_position: PositiveInt
    """Context before scaling."""


class ModelShape(Frozen):
    """What a model's step times depend on: models that differ only in name share a profile.

    `num_layers` counts decoder layers (all layers of a decoder-only model), `num_encoder_layers` those of an
    encoder-decoder's encoder. `head_dim` is stated because it need not be hidden_size / num_heads.
    """

    name: str
    """Name of the model."""
    family: Family
    """Architecture."""
    num_layers: PositiveInt
    """Decoder layers."""
    num_encoder_layers: int = Field(default=0, ge=0)
    """Encoder layers."""
    hidden_size: PositiveInt
    """Width of hidden states."""
    num_heads: PositiveInt
    """Query heads."""
    num_kv_heads: PositiveInt
    """Key and value heads."""
    head_dim: PositiveInt
    """Width of a head."""
    ffn_size: PositiveInt
    """Width between the two products of a feed-forward block."""
    gated_ffn: bool = False
    """Whether the feed-forward block has a gate."""
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "relu"
    """Activation of the feed-forward block."""
    vocab_size: PositiveInt
    """Tokens of the vocabulary."""
    max_context: PositiveInt
    """Longest prompt and output together, in tokens."""
    attention_bias: bool = False
    """Whether projections of attention have biases."""

    @property
    def shape(self) -> ModelShape:
        """The shape alone, without what subclasses add."""
        return ModelShape(**{name: getattr(self, name) for name in ModelShape.model_fields})

    def differs_from(self, other: ModelShape) -> str | None:
        """Return the first size in which two shapes differ, in words; None: they are equal."""
        for name in ModelShape.model_fields:
            ours, theirs = getattr(self, name), getattr(other, name)
            if name != "name" and ours != theirs:
                return f"{name} {ours}, not {theirs}"
        return None


class ModelSpec(ModelShape):
    """A transformer; weights come from a checkpoint or from a seed.

    Encoder-decoders (t5) start their decoder with `bos_token_id` (0 where it is left out). Their positions enter as a
    bias by distance, in `relative_buckets` that reach to `relative_max_distance` tokens. `head_scale` multiplies what
    enters the output head.
    """

    tie_embeddings: bool = True
    """Whether embedding and output head share their weights."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Epsilon of norms."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of rotary embeddings."""
    rope_scaling: RopeScaling | None = None
    """Scaling of rotary embeddings."""
    relative_buckets: int = Field(default=32, ge=4)
    """Buckets of relative positions (t5)."""
    relative_max_distance: PositiveInt = 128
    """Distance that the buckets reach to (t5)."""
    head_scale: float = Field(default=1.0, gt=0)
    """Factor on what enters the output head."""
    bos_token_id: int | None = None
    """First token of a decoder."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an output."""
    default_dtype: DType = "float16"
    """Type to plan for where none is named."""

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: {self.num_kv_heads} does not divide num_heads {self.num_heads}")
        if (self.family == "t5") != (self.num_encoder_layers > 0):
            raise ValueError(
                f"num_encoder_layers: {self.num_encoder_layers} does not fit family {self.family!r}; "
                "only encoder-decoder families (t5) have encoder layers"
            )
        if self.relative_max_distance <= self.relative_buckets // 2:
            raise ValueError(
                f"relative_max_distance: {self.relative_max_distance} must exceed half of relative_buckets, "
                f"{self.relative_buckets}: these hold one distance each"
            )
        if self.is_encoder_decoder and not 0 <= (self.bos_token_id or 0) < self.vocab_size:
            raise ValueError(f"bos_token_id: {self.bos_token_id} is outside the vocabulary of {self.vocab_size}")
        return self

    @property
    def is_encoder_decoder(self) -> bool:
        return self.num_encoder_layers > 0

    @property
    def run_dtypes(self) -> tuple[RunDType, ...]:
        """Types that its activations fit in: T5's published checkpoints overflow float16."""
        return tuple(dtype for dtype in get_args(RunDType) if dtype != "float16" or self.family != "t5")

    @property
    def attention_params(self) -> int:
        """Weights of one attention block: Q, K, V and output projection."""
        q_and_out = 2 * self.hidden_size * self.num_heads * self.head_dim
        k_and_v = 2 * self.hidden_size * self.num_kv_heads * self.head_dim
        return q_and_out + k_and_v

    @property
    def ffn_params(self) -> int:
        return (3 if self.gated_ffn else 2) * self.hidden_size * self.ffn_size

    @property
    def encoder_layer_params(self) -> int:
        return self.attention_params + self.ffn_params

    @property
    def decoder_layer_params(self) -> int:
        """One decoder layer; an encoder-decoder's has cross-attention too."""
        blocks = 2 if self.is_encoder_decoder else 1
        return blocks * self.attention_params + self.ffn_params

    @property
    def embedding_params(self) -> int:
        """Token embedding and output head (one matrix when tied)."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)

    @property
    def num_params(self) -> int:
        """Matrices only: biases, norms and position tables are under 1%."""
        return (
            self.embedding_params
            + self.num_encoder_layers * self.encoder_layer_params
            + self.num_layers * self.decoder_layer_params
        )

    def kv_bytes_per_token(self, dtype: DType) -> int:
        """Keys and values of one token over all decoder layers; cross-attention's where an encoder reads it."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BYTES_PER_ELEMENT[dtype]

    def weight_bytes(self, dtype: DType) -> int:
        return self.num_params * BYTES_PER_ELEMENT[dtype]
