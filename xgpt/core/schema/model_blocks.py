"""Define the kinds of decoder layers and their parts, in one form for all model families."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from xgpt.core.schema.base import Frozen
from xgpt.core.schema.model_parts import Experts, LatentAttention


class Indexer(Frozen):
    """The index of sparse attention. It scores all earlier tokens, and attention reads only those with the best scores.

    Source: DeepSeek-V3.2 (arXiv 2512.02556) sec. 2.1.
    """

    num_heads: PositiveInt
    """Number of heads that score tokens."""
    head_dim: PositiveInt
    """Width of a head of the index, and of the 8-bit key that the index stores for each token."""
    top_k: PositiveInt
    """Largest number of tokens that attention reads for a query."""
    pool: PositiveInt = 1
    """Number of tokens that share one key of the index."""
    is_shared: bool = False
    """Whether the layer has no index of its own and reads the tokens chosen by an earlier layer's index."""


class Attention(Frozen):
    """Softmax attention over all earlier tokens, the most recent ones, or those that an index selects."""

    num_heads: PositiveInt
    """Number of query heads."""
    num_kv_heads: PositiveInt
    """Number of key and value heads."""
    head_dim: PositiveInt
    """Width of a query and a key."""
    value_dim: PositiveInt | None = None
    """Width of a value. None means `head_dim`."""
    window: PositiveInt | None = None
    """Number of most recent tokens, itself included, to which a token attends. None means all."""
    latent: LatentAttention | None = None
    """Latent attention, which stores one vector per token in place of keys and values."""
    indexer: Indexer | None = None
    """The index of sparse attention. None means that attention reads all tokens of its window."""
    is_gated: bool = False
    """Whether the output has a gate, which is computed together with the queries."""
    has_values: bool = True
    """Whether values have a projection. Otherwise the keys are also the values."""
    keeps: bool = True
    """Whether the layer stores keys and values. Otherwise it reads the keys and values of an earlier layer."""
    compression: PositiveInt = 1
    """Number of tokens that share one stored entry. The last `window` tokens each have an entry of their own."""
    eight_bit_entry: PositiveInt | None = Field(default=None, exclude_if=lambda size: size is None)
    """Bytes of an entry if K/V has 8 bits: kernels of sparse attention keep rotated elements in 16 bits and add
    scales. None means one byte for each element.
    """
    weights: PositiveInt | None = None
    """Number of weights of all projections. None means that it follows from the sizes."""
    other_params: NonNegativeInt = 0
    """Number of further weights of the block, which a tensor-parallel group divides."""

    @property
    def values(self) -> int:
        """Width of a value."""
        if self.latent is not None:
            return self.latent.value_head_dim
        return self.value_dim or self.head_dim

    def params(self, hidden: int) -> int:
        """Return the number of weights of the block."""
        if self.weights is not None:
            return self.weights + self.other_params
        if (latent := self.latent) is not None:
            outputs = self.num_heads * (self.head_dim - latent.rope_head_dim + latent.value_head_dim)
            out = hidden * self.num_heads * (latent.value_head_dim * (2 if self.is_gated else 1))
            query = (latent.q_rank or hidden) * self.num_heads * self.head_dim
            return query + self.unshared_params(hidden) + latent.kv_rank * outputs + out + self.other_params
        query = hidden * self.num_heads * self.head_dim
        gate_and_out = hidden * self.num_heads * self.values * (2 if self.is_gated else 1)
        kept = hidden * self.num_kv_heads * (self.head_dim + self.values * self.has_values) if self.keeps else 0
        return query + gate_and_out + kept + self.index_params(hidden) + self.other_params

    def index_params(self, hidden: int) -> int:
        """Return the number of weights of the index."""
        if self.indexer is None or self.indexer.is_shared:
            return 0
        rank = None if self.latent is None else self.latent.q_rank
        width = self.indexer.num_heads * self.indexer.head_dim
        return (rank or hidden) * width + hidden * (self.indexer.head_dim + self.indexer.num_heads)

    def unshared_params(self, hidden: int) -> int:
        """Return the number of weights that every device of a tensor-parallel group stores in full."""
        if self.latent is None:
            return 0
        return hidden * ((self.latent.q_rank or 0) + self.latent.kept_per_token) + self.index_params(hidden)

    def entry_elements(self, group: int = 1) -> float:
        """Return the number of elements of an entry of K/V on one device of a tensor-parallel group of `group` devices,
        without the index.
        """
        if self.latent is not None:
            return self.latent.kept_per_token
        return max(self.num_kv_heads / group, 1.0) * (self.head_dim + self.values)

    @property
    def index_bytes(self) -> int:
        """Bytes that the index stores for a token: an 8-bit key and a scale."""
        if self.indexer is None or self.indexer.is_shared:
            return 0
        return -(-(self.indexer.head_dim + 4) // (self.compression * self.indexer.pool))


class Recurrent(Frozen):
    """A block with a state of constant size per request: linear attention, a state-space layer or a convolution."""

    num_heads: PositiveInt
    """Number of heads, which are divided over a tensor-parallel group."""
    weights: PositiveInt
    """Number of weights in all matrix products of the block."""
    state_elements: PositiveInt
    """Number of elements of a request's state that each token updates."""
    state_bytes: PositiveInt
    """Bytes of a request's state, including the last inputs of convolutions."""
    launches: PositiveInt = Field(default=25, exclude_if=lambda number: number == 25)
    """Number of kernels for the block's prompts, counted in SGLang 0.5: 25 for a gated delta rule (8 of them its scan),
    21 for Mamba-2, 10 for a short convolution.
    """


class Block(Frozen):
    """A kind of layer: layers with equal sizes, each with a token mixer (attention or recurrent) and a feed-forward
    block.
    """

    layers: tuple[int, ...]
    """Numbers of the layers, from 0."""
    attention: Attention | None = None
    """The attention. None means that a recurrent block mixes tokens, or that nothing does."""
    recurrent: Recurrent | None = None
    """The recurrent block, in place of attention or together with it."""
    ffn_size: NonNegativeInt = 0
    """Inner width of the dense feed-forward block. 0 means no such block."""
    experts: Experts | None = None
    """Experts to which tokens are routed."""

    @model_validator(mode="after")
    def _check(self) -> Block:
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise ValueError(f"layers: {self.layers} must contain at least one layer, and each only once")
        return self

    def count(self, first: int, last: int) -> int:
        """Return how many layers of this kind are in [first, last)."""
        ordered = _ordered(self.layers)
        return bisect_left(ordered, last) - bisect_left(ordered, first)


@lru_cache
def _ordered(layers: tuple[int, ...]) -> list[int]:
    return sorted(layers)


class Sizes(Frozen):
    """The model's sizes that, besides a block's own, determine its number of weights."""

    hidden: PositiveInt
    """Width of hidden states."""
    products: PositiveInt
    """Number of matrix products of a feed-forward block: three with a gate, two without."""

    def mixer(self, block: Block) -> int:
        """Return the number of weights of a layer's token mixer."""
        attention = 0 if block.attention is None else block.attention.params(self.hidden)
        return attention + (0 if block.recurrent is None else block.recurrent.weights)

    def unshared(self, block: Block) -> int:
        """Return the number of a token mixer's weights that every device of a tensor-parallel group stores in full."""
        return 0 if block.attention is None else block.attention.unshared_params(self.hidden)

    def dense(self, block: Block) -> int:
        """Return the number of weights of the dense feed-forward block."""
        return self.products * self.hidden * block.ffn_size

    def expert(self, block: Block) -> int:
        """Return the number of weights of one expert."""
        return (
            0 if block.experts is None else self.products * block.experts.width_in(self.hidden) * block.experts.ffn_size
        )

    def beside_experts(self, block: Block) -> int:
        """Return the number of weights of the shared experts, the router, and the projections around the experts."""
        if (experts := block.experts) is None:
            return 0
        shared = self.products * self.hidden * experts.shared_ffn_size
        return shared + self.hidden * (experts.number + 2 * (experts.latent_size or 0))

    def whole(self, block: Block) -> int:
        """Return the number of weights of a layer."""
        number = 0 if block.experts is None else block.experts.number
        return self.mixer(block) + self.dense(block) + number * self.expert(block) + self.beside_experts(block)
