"""Define parts that only some models have: experts, latent attention, quantised weights, scaled rotary embeddings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from xgpt.core.schema.base import Frozen


class Experts(Frozen):
    """A mixture of experts: feed-forward blocks, of which a router chooses some for each token.

    Each token is routed to `active` of a layer's `number` experts. It also goes to the shared experts, which together
    are one block of width `shared_ffn_size`.
    """

    number: PositiveInt
    """Number of routed experts in a layer."""
    active: PositiveInt
    """Number of experts to which each token is routed."""
    ffn_size: PositiveInt
    """Inner width of a routed expert."""
    shared_ffn_size: int = Field(default=0, ge=0)
    """Inner width of all shared experts together."""
    dense_layers: tuple[int, ...] = ()
    """Numbers of the layers without experts. They have a dense block of the model's `ffn_size`."""
    skew: float = Field(default=0.0, ge=0)
    """Exponent of the power law by which tokens are spread over experts. 0 means evenly."""
    normalised: bool = True
    """Whether the weights of a token's experts add up to one."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Function from router logits to scores. With sigmoid, each expert has a bias that affects only the choice."""
    num_groups: PositiveInt = 1
    """Number of groups of experts."""
    active_groups: PositiveInt = 1
    """Number of groups from which experts are chosen for a token. Groups are ranked by their highest score or, with
    sigmoid, by the sum of their two highest scores.
    """
    weight_scale: PositiveFloat = 1.0
    """Factor on the weights of a token's experts."""
    bias: bool = Field(default=False, exclude_if=lambda bias: not bias)
    """Whether the matrix products of an expert have biases."""
    latent_size: PositiveInt | None = None
    """Width to which tokens are projected before the routed experts. Outputs are projected back. None means no
    projections.
    """

    @model_validator(mode="after")
    def _check(self) -> Experts:
        if self.active > self.number:
            raise ValueError(f"active: {self.active} exceeds the number of experts, {self.number}")
        if self.number % self.num_groups or self.active_groups > self.num_groups:
            chosen = f"{self.active_groups} of {self.num_groups} groups"
            raise ValueError(f"num_groups: {chosen} do not fit {self.number} experts")
        if self.active > self.active_groups * self.number // self.num_groups:
            raise ValueError(f"active: {self.active} exceeds the number of experts in {self.active_groups} groups")
        return self

    def width_in(self, hidden: int) -> int:
        """Return the width of a routed expert's input."""
        return self.latent_size or hidden


class LatentAttention(Frozen):
    """Multi-head latent attention: the keys and values of all heads are computed from one small vector per token.

    The cache stores this vector and a rotated key that all heads share. Source: DeepSeek-V2 (arXiv 2405.04434) sec.
    2.1.
    """

    kv_rank: PositiveInt
    """Width of the vector from which keys and values are computed."""
    q_rank: PositiveInt | None = None
    """Width of the vector from which queries are computed. None means that they are computed from the hidden state."""
    rope_head_dim: NonNegativeInt
    """Width of the part of a head's query and key that is rotated by position. 0 means that no part is rotated."""
    value_head_dim: PositiveInt
    """Width of a head's value."""
    rope_interleaved: bool = True
    """Whether dimensions 2 i and 2 i + 1 are rotated together, not i and i + half."""

    @property
    def kept_per_token(self) -> int:
        """Number of elements that a layer caches for a token."""
        return self.kv_rank + self.rope_head_dim


class Tower(Frozen):
    """The encoder of images, as far as its run on the largest input takes memory."""

    hidden_size: PositiveInt
    """Width of a patch."""
    ffn_size: PositiveInt
    """Inner width of a feed-forward block."""
    patches: PositiveInt
    """Number of patches that become one token."""
    item_tokens: PositiveInt = 1
    """Largest number of tokens of an image."""
    outputs: PositiveInt = 1
    """Number of vectors of the model's width for each token."""


Part = Literal["attention", "dense", "shared", "experts"]
"""Parts of a layer whose weights may have different formats: token mixer, dense feed-forward block, shared experts and
routed experts.
"""
EIGHT_BITS = ("fp8", "fp8_block", "int8", "mxfp8")
_BITS = {"fp8": 8.0, "fp8_block": 8.0, "int8": 8.0, "mxfp8": 8.25, "mxfp4": 4.25, "nvfp4": 4.5}


class Quantization(Frozen):
    """The format of quantised weights in a checkpoint.

    - fp8: 8-bit products, one scale for each matrix or row;
    - fp8_block: 8-bit products, one scale for each 128 x 128 weights and each 128 activations;
    - mxfp8: 8-bit products, an 8-bit scale for each 32 weights;
    - mxfp4: 4-bit weights, an 8-bit scale for each 32 weights, unpacked for products in the dtype;
    - nvfp4: 4-bit weights, an 8-bit scale for each 16 weights, unpacked for products in the dtype;
    - int4: 4-bit weights, a 16-bit scale for each `group_size` weights, unpacked for products in the dtype;
    - int8: 8-bit products, with one scale for each output channel of the weights and one for each token.

    Embedding, output head, norms and routers stay in the dtype.
    """

    kind: Literal["fp8", "fp8_block", "mxfp8", "mxfp4", "nvfp4", "int4", "int8"]
    """Format of the weights."""
    experts_only: bool = False
    """Whether all parts except routed experts stay in the dtype."""
    kept: tuple[Part, ...] = ()
    """Further parts whose weights stay in the dtype."""
    eight_bit_parts: tuple[Part, ...] = ()
    """Parts with fp8 weights, if `kind` has 4-bit weights."""
    finds_scales: bool = False
    """Whether activation scales are computed in each step (fp8). Otherwise the checkpoint has one for each matrix."""
    group_size: PositiveInt = 128
    """Number of weights that share a scale (int4), or number of rows and of columns of a block that shares a scale
    (fp8_block).
    """
    has_zero_points: bool = False
    """Whether each group also has a 4-bit zero point (int4)."""
    kv_float8: bool = False
    """Whether the checkpoint requests 8-bit keys and values."""

    @property
    def computes_in_eight_bits(self) -> bool:
        """Whether matrix products run in 8 bits. Otherwise weights are unpacked for products in the dtype."""
        return self.kind in EIGHT_BITS

    @property
    def bytes_per_weight(self) -> float:
        """Mean bytes of a weight, including its share of scales."""
        if self.kind == "int4":
            return (4 + (16 + 4 * self.has_zero_points) / self.group_size) / 8
        return _BITS[self.kind] / 8

    def of(self, part: Part) -> Quantization | None:
        """Return the format of a part's weights, or None if they stay in the dtype."""
        if part in self.kept or (self.experts_only and part != "experts"):
            return None
        if part in self.eight_bit_parts:
            return Quantization(kind="fp8", finds_scales=self.finds_scales)
        return self


class RopeScaling(Frozen):
    """Llama 3.1's frequency scaling of rotary embeddings."""

    kind: Literal["llama3"] = "llama3"
    """Kind of scaling."""
    factor: float = Field(gt=0)
    """Factor by which long wavelengths are multiplied."""
    low_freq_factor: float = Field(gt=0)
    """Wavelengths above `original_max_position` divided by this factor are scaled fully."""
    high_freq_factor: float = Field(gt=0)
    """Wavelengths below `original_max_position` divided by this factor are not scaled."""
    original_max_position: PositiveInt
    """Context length, in tokens, before scaling."""


class LinearRope(Frozen):
    """Linear scaling, which multiplies all wavelengths by a factor."""

    kind: Literal["linear"] = "linear"
    """Kind of scaling."""
    factor: PositiveFloat
    """Factor on wavelengths."""


class YarnRope(Frozen):
    """YaRN scaling: long wavelengths are multiplied by a factor, short ones are kept, and queries and keys are scaled.

    Source: arXiv 2309.00071.
    """

    kind: Literal["yarn"] = "yarn"
    """Kind of scaling."""
    factor: PositiveFloat
    """Factor by which long wavelengths are multiplied."""
    original_max_position: PositiveInt
    """Context length, in tokens, before scaling."""
    beta_fast: PositiveFloat = 32.0
    """Dimensions that rotate more than this number of times within the original context are not scaled."""
    beta_slow: PositiveFloat = 1.0
    """Dimensions that rotate less than this number of times within the original context are scaled fully."""
    truncate: bool = True
    """Whether the two limits are rounded to whole dimensions."""
    attention_factor: PositiveFloat
    """Factor on rotated queries and keys."""


class LongRope(Frozen):
    """LongRoPE scaling: each wavelength has one factor for contexts up to the original length, and one for longer
    contexts.

    Source: arXiv 2402.13753.
    """

    kind: Literal["longrope"] = "longrope"
    """Kind of scaling."""
    short_factor: tuple[PositiveFloat, ...]
    """Factors for contexts up to the original length."""
    long_factor: tuple[PositiveFloat, ...]
    """Factors for contexts beyond the original length."""
    original_max_position: PositiveInt
    """Context length, in tokens, before scaling."""
    attention_factor: PositiveFloat
    """Factor on rotated queries and keys."""
