"""The contract between models, workers and attention backends: a step's batch, and what a backend does with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Batch:
    """One step, flattened: all tokens of all sequences, one after the other (ORCA's selective batching).

    Sequences that decode come first, one token each; pieces of prompts follow. All tensors lie on the model's
    device.

    Attributes:
        token_ids: # int64 [tokens]
        positions: each token's place in its sequence. # int64 [tokens]
        cache_slots: where its key and value go: block * block_size + offset. # int64 [tokens]
        query_start: sequence i holds tokens [query_start[i], query_start[i + 1]). # int32 [sequences + 1]
        context_len: tokens that the sequence's last token attends to, its own included. # int32 [sequences]
        block_tables: blocks of each sequence, in order; padding is arbitrary. # int32 [sequences, max blocks]
        logit_rows: tokens whose logits are wanted. # int64 [sampled]
        num_decodes: sequences that hold one token and come first.
        max_query_len: longest piece of a prompt; 1 where there is none.
    """

    token_ids: Tensor
    positions: Tensor
    cache_slots: Tensor
    query_start: Tensor
    context_len: Tensor
    block_tables: Tensor
    logit_rows: Tensor
    num_decodes: int
    max_query_len: int


class AttentionBackend(ABC):
    """Self-attention over a paged cache. Stateless: one object serves all layers."""

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, batch: Batch) -> Tensor:
        """Write `k` and `v` into the cache, then let each token attend to its sequence up to itself.

        Query head h reads key head h // (heads / kv_heads).

        Args:
            q: queries; need not be contiguous. # [tokens, heads, head_dim]
            k, v: keys and values of the same tokens. # [tokens, kv_heads, head_dim]
            cache: one layer's, see `KvCache.layers`; earlier tokens of each sequence are in it.

        Returns:
            # [tokens, heads * head_dim]
        """
