"""The contract between models, workers and attention backends: a step's batch, and what a backend does with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
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
        prompt_len: of encoder-decoders alone: how many of the sequence's tokens are the encoder's, the first ones.
            # int32 [sequences]
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
    prompt_len: Tensor | None = None


def make_batch(
    token_ids: np.ndarray,
    query_len: np.ndarray,
    context_len: np.ndarray,
    block_tables: np.ndarray,
    *,
    block_size: int,
    num_decodes: int,
    wants_logits: np.ndarray | None = None,
    prompt_len: np.ndarray | None = None,
    device: torch.device | None = None,
) -> Batch:
    """A batch from what differs between sequences; the rest follows.

    Args:
        token_ids: of all sequences, one after the other. # int64 [tokens]
        query_len: tokens of each sequence in this step. # int32 [sequences]
        context_len: tokens of each sequence that are in the cache after this step. # int32 [sequences]
        block_tables: may be wider than this step needs. # int32 [sequences, blocks]
        wants_logits: whether the sequence's last token is sampled from; None: all are. # bool [sequences]
        prompt_len: of encoder-decoders alone: tokens of each sequence that are the encoder's. # int32 [sequences]
        device: of the model; None: the CPU.
    """
    query_start = np.zeros(len(query_len) + 1, dtype=np.int32)
    np.cumsum(query_len, out=query_start[1:])
    sequence = np.repeat(np.arange(len(query_len)), query_len)
    positions = np.arange(len(token_ids)) + (context_len - query_start[1:])[sequence]
    tables = np.ascontiguousarray(block_tables[:, : -(-int(context_len.max()) // block_size)])
    blocks = tables[sequence, positions // block_size].astype(np.int64)
    last_rows = query_start[1:].astype(np.int64) - 1

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return Batch(
        token_ids=on_device(token_ids),
        positions=on_device(positions),
        cache_slots=on_device(blocks * block_size + positions % block_size),
        query_start=on_device(query_start),
        context_len=on_device(context_len),
        block_tables=on_device(tables),
        logit_rows=on_device(last_rows if wants_logits is None else last_rows[wants_logits]),
        num_decodes=num_decodes,
        max_query_len=int(query_len.max()),
        prompt_len=None if prompt_len is None else on_device(prompt_len),
    )


class AttentionBackend(ABC):
    """Self-attention over a paged cache. Stateless: one object serves all layers."""

    @classmethod
    @abstractmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether it runs there."""

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, batch: Batch) -> Tensor:
        """Write `k` and `v` into the cache, then let each token attend to its sequence up to itself.

        Query head h reads key head h // (heads / kv_heads).

        Args:
            q: queries; need not be contiguous. # [tokens, heads, head_dim]
            k, v: keys and values of the tokens of `batch.cache_slots`: in self-attention those of the queries, in
                cross-attention those that the encoder has just read. # [tokens, kv_heads, head_dim]
            cache: one layer's, see `KvCache.layers`; earlier tokens of each sequence are in it.

        Returns:
            # [tokens, heads * head_dim]
        """
