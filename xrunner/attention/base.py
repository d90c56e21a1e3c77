"""The contract between models, workers and attention backends: a step's batch, and what a backend computes from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

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
        num_unsorted: of a captured step, of which the device alone knows what it holds: how many of the sequences, the
            first ones, are the batch's. They hold any number of tokens, in any order; `num_decodes` is 0. # int32 [1]
        prompt_len: of encoder-decoders alone: how many of the sequence's tokens are the encoder's, the first ones.
            # int32 [sequences]
        first_key: the first token that each sequence attends to; None: of all, the first. # int32 [sequences]
        both_ways: each token attends to all of its sequence, not only up to itself.
        highest_only: of the logits of a token only the highest is wanted, and need be right.
        added: to logits, before the highest is looked for; None: nothing. # float32 [sampled, vocab]
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
    num_unsorted: Tensor | None = None
    prompt_len: Tensor | None = None
    first_key: Tensor | None = None
    both_ways: bool = False
    highest_only: bool = False
    added: Tensor | None = None


class PositionBias(NamedTuple):
    """What each head adds to a score for the query's place less the key's.

    Attributes:
        values: `values[head, center + query - key]`, for all pairs that a batch has. # float32 [heads, places]
        center: of the pair whose places are equal.
    """

    values: Tensor
    center: int


class Scoring(NamedTuple):
    """How a layer scores a query against a key that the batch lets it see, and which keys it leaves out.

    Attributes:
        scale: what products of queries and keys are multiplied with; None: head_dim ** -0.5.
        softcap: products, scaled, stay between this and its negative, by tanh; None: they are not limited.
        bias: added to them then; of models whose heads have keys and values of their own.
        window: last tokens that a token attends to, itself included; None: all that the batch lets it see.
        sinks: a further score of each head, which takes its share and adds no value. # float32 [heads]
    """

    scale: float | None = None
    softcap: float | None = None
    bias: PositionBias | None = None
    window: int | None = None
    sinks: Tensor | None = None

    def scale_of(self, head_dim: int) -> float:
        """Return the factor on products over this many dimensions."""
        return head_dim**-0.5 if self.scale is None else self.scale


PLAIN = Scoring()
"""Of most models: all keys, scaled."""


class Sequences(NamedTuple):
    """What differs between the sequences of a batch.

    Attributes:
        query_len: tokens of each in this step. # int32 [sequences]
        context_len: tokens of each that are in the cache after this step. # int32 [sequences]
        block_tables: may be wider than this step needs. # int32 [sequences, blocks]
        prompt_len: of encoder-decoders alone: tokens of each that are the encoder's. # int32 [sequences]
    """

    query_len: np.ndarray
    context_len: np.ndarray
    block_tables: np.ndarray
    prompt_len: np.ndarray | None = None


def make_batch(
    token_ids: np.ndarray,
    sequences: Sequences,
    *,
    block_size: int,
    num_decodes: int,
    wants_logits: np.ndarray | None = None,
    device: torch.device | None = None,
) -> Batch:
    """Return a batch from what differs between sequences; the rest follows.

    Args:
        token_ids: of all sequences, one after the other. # int64 [tokens]
        wants_logits: whether the sequence's last token is sampled from; None: all are. # bool [sequences]
        device: of the model; None: the CPU.
    """
    query_len, context_len, block_tables, prompt_len = sequences
    query_start = np.zeros(len(query_len) + 1, dtype=np.int32)
    np.cumsum(query_len, out=query_start[1:])
    sequence = np.repeat(np.arange(len(query_len)), query_len)
    positions = np.arange(len(token_ids)) + (context_len - query_start[1:])[sequence]
    tables = np.ascontiguousarray(block_tables[:, : -(-int(context_len.max()) // block_size)])
    blocks = tables[sequence, positions // block_size].astype(np.int64)
    last_rows = query_start[1:].astype(np.int64) - 1

    arrays = {
        "token_ids": token_ids,
        "positions": positions,
        "cache_slots": blocks * block_size + positions % block_size,
        "query_start": query_start,
        "context_len": context_len,
        "block_tables": tables,
        "logit_rows": last_rows if wants_logits is None else last_rows[wants_logits],
    }
    if prompt_len is not None:
        arrays["prompt_len"] = prompt_len
    if device is None or device.type == "cpu":
        tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    else:
        tensors = unpack(to_device(pack(arrays), device), arrays)
    return Batch(**tensors, num_decodes=num_decodes, max_query_len=int(query_len.max()))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Without waiting for what the device computes."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def pack(arrays: dict[str, np.ndarray]) -> Tensor:
    """All of them in one piece of memory, which goes to a device in one copy. # uint8 [bytes]"""
    packed = np.empty(sum(_padded_bytes(array) for array in arrays.values()), dtype=np.uint8)
    begin = 0
    for array in arrays.values():
        packed[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        begin += _padded_bytes(array)
    return torch.from_numpy(packed)


def unpack(packed: Tensor, arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Return the tensors that `pack` put together, as views of the received buffer."""
    tensors, begin = {}, 0
    for name, array in arrays.items():
        dtype = torch.from_numpy(array[:0]).dtype
        tensors[name] = packed[begin : begin + array.nbytes].view(dtype).view(array.shape)
        begin += _padded_bytes(array)
    return tensors


def _padded_bytes(array: np.ndarray) -> int:
    """Return where the next piece may begin: kernels read 16 bytes at a time."""
    return -(-array.nbytes // 16) * 16


class AttentionBackend(ABC):
    """Attention over a paged cache. Stateless: one object serves all layers.

    Attributes:
        capturable: whether a batch of decodes can be captured in a CUDA graph: nothing is read back from the device,
            and launches depend on shapes alone.
    """

    capturable: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether it runs there."""

    @abstractmethod
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        batch: Batch,
        scoring: Scoring = PLAIN,
    ) -> Tensor:
        """Write `k` and `v` into the cache, then let each token attend to what the batch lets it see.

        Query head h reads key head h // (heads / kv_heads).

        Args:
            q: queries; need not be contiguous. # [tokens, heads, head_dim]
            k, v: keys and values of the tokens of `batch.cache_slots`: in self-attention those of the queries, in
                cross-attention those that the encoder has just read. # [tokens, kv_heads, head_dim]
            cache: one layer's, see `KvCache.layers`; earlier tokens of each sequence are in it. May be of fewer bits
                than the queries. Where keys are the values, `v` is not read.
            scoring: the layer's.

        Returns:
            # [tokens, heads * head_dim]
        """
