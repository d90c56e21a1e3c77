"""The blocks of a decoder: what each of its layers is made of, with sizes, whatever the family is called."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache

from pydantic import NonNegativeInt, PositiveInt, model_validator

from xgpt.core.schema.base import Frozen
from xgpt.core.schema.model_parts import Experts, LatentAttention


class Indexer(Frozen):
    """Sparse attention's index: it scores all earlier tokens cheaply, and attention reads only the best of them.

    Source: DeepSeek-V3.2 (arXiv 2512.02556) sec. 2.1.
    """

    num_heads: PositiveInt
    """Heads that score tokens."""
    head_dim: PositiveInt
    """Width of such a head, and of the one key that the index keeps of a token, in eight bits."""
    top_k: PositiveInt
    """Tokens that attention reads at most."""
    pool: PositiveInt = 1
    """Tokens that one key of the index stands for."""
    is_shared: bool = False
    """Whether the layer takes the choice of an earlier layer's index, and has none of its own."""


class Attention(Frozen):
    """Softmax attention: over all earlier tokens, the last ones, or those that an index picks."""

    num_heads: PositiveInt
    """Query heads."""
    num_kv_heads: PositiveInt
    """Key and value heads."""
    head_dim: PositiveInt
    """Width of a query and a key."""
    value_dim: PositiveInt | None = None
    """Width of a value; None: `head_dim`."""
    window: PositiveInt | None = None
    """Number of last tokens that a token attends to, itself included; None: all."""
    latent: LatentAttention | None = None
    """Latent attention, which keeps one vector in place of keys and values."""
    indexer: Indexer | None = None
    """The index of sparse attention; None: attention reads all tokens in reach."""
    is_gated: bool = False
    """Whether the output has a gate, computed with the queries."""
    has_values: bool = True
    """Whether values have a projection of their own; otherwise they are the keys."""
    keeps: bool = True
    """Whether the layer keeps keys and values; otherwise it reads those of an earlier layer."""
    compression: PositiveInt = 1
    """Tokens that one kept entry stands for, beyond the last ones in `window`, which are kept one by one."""
    weights: PositiveInt | None = None
    """Weights of all projections, if their shapes are none of the usual ones; None: they follow from the sizes."""
    other_params: NonNegativeInt = 0
    """Further weights of the block, which devices share."""

    @property
    def values(self) -> int:
        """Width of a value."""
        if self.latent is not None:
            return self.latent.value_head_dim
        return self.value_dim or self.head_dim

    def params(self, hidden: int) -> int:
        """Return the number of weights of all projections."""
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
        """Return the number of weights that every device of a tensor-parallel group holds whole."""
        if self.latent is None:
            return 0
        return hidden * ((self.latent.q_rank or 0) + self.latent.kept_per_token) + self.index_params(hidden)

    def kept_elements(self, group: int = 1) -> float:
        """Return the elements that a device of a group keeps of a token, the index's key left out."""
        if not self.keeps:
            return 0.0
        if self.latent is not None:
            return self.latent.kept_per_token / self.compression
        return max(self.num_kv_heads / group, 1.0) * (self.head_dim + self.values) / self.compression

    @property
    def index_bytes(self) -> int:
        """Bytes that the index keeps of a token: its key in eight bits, and a scale."""
        if self.indexer is None or self.indexer.is_shared:
            return 0
        return -(-(self.indexer.head_dim + 4) // (self.compression * self.indexer.pool))


class Recurrent(Frozen):
    """Linear attention, a state-space layer or a short convolution: a request has one state of constant size."""

    num_heads: PositiveInt
    """Heads; a tensor-parallel group shares them."""
    weights: PositiveInt
    """Weights of all products of the block."""
    state_elements: PositiveInt
    """Elements of a request's state, which each token updates."""
    state_bytes: PositiveInt
    """Bytes of a request's state, the last inputs of convolutions included."""


class Block(Frozen):
    """Layers that are alike: what mixes tokens in them, and their feed-forward block."""

    layers: tuple[int, ...]
    """Numbers of the layers, from 0."""
    attention: Attention | None = None
    """Attention; None: a recurrent block mixes tokens, or nothing does."""
    recurrent: Recurrent | None = None
    """A block with constant state, in place of attention or together with it."""
    ffn_size: NonNegativeInt = 0
    """Width between the products of a feed-forward block that every token passes; 0: there is none."""
    experts: Experts | None = None
    """Experts that tokens are routed to."""

    @model_validator(mode="after")
    def _check(self) -> Block:
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise ValueError(f"layers: {self.layers} must name each of its layers once")
        return self

    def count(self, first: int, last: int) -> int:
        """Return how many of its layers lie in [first, last)."""
        ordered = _ordered(self.layers)
        return bisect_left(ordered, last) - bisect_left(ordered, first)


@lru_cache
def _ordered(layers: tuple[int, ...]) -> list[int]:
    return sorted(layers)


class Sizes(Frozen):
    """What a block's numbers of weights depend on besides its own sizes."""

    hidden: PositiveInt
    """Width of hidden states."""
    products: PositiveInt
    """Products of a feed-forward block: three with a gate, two without."""

    def mixer(self, block: Block) -> int:
        """Return the weights that mix tokens."""
        attention = 0 if block.attention is None else block.attention.params(self.hidden)
        return attention + (0 if block.recurrent is None else block.recurrent.weights)

    def unshared(self, block: Block) -> int:
        """Return those of them that every device of a group holds whole."""
        return 0 if block.attention is None else block.attention.unshared_params(self.hidden)

    def dense(self, block: Block) -> int:
        """Return the weights of the feed-forward block that every token passes, without shared experts."""
        return self.products * self.hidden * block.ffn_size

    def expert(self, block: Block) -> int:
        """Return the weights of one expert."""
        return (
            0 if block.experts is None else self.products * block.experts.width_in(self.hidden) * block.experts.ffn_size
        )

    def beside_experts(self, block: Block) -> int:
        """Return the weights of shared experts, router, and what surrounds experts."""
        if (experts := block.experts) is None:
            return 0
        shared = self.products * self.hidden * experts.shared_ffn_size
        return shared + self.hidden * (experts.number + 2 * (experts.latent_size or 0))

    def whole(self, block: Block) -> int:
        """Return all weights of a layer."""
        number = 0 if block.experts is None else block.experts.number
        return self.mixer(block) + self.dense(block) + number * self.expert(block) + self.beside_experts(block)
