"""Define the contract between models, workers and attention backends: a step's batch, and what a backend computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

MOST_PROMPTS = 64
"""Largest number of prompt chunks in a captured step. Its kernels are launched for this many, even if the batch has
fewer.
"""


@dataclass(slots=True)
class Batch:
    """The input of one step: the tokens of all sequences, concatenated (ORCA's selective batching).

    Decoding sequences come first, with one token each. Prompt chunks follow. All tensors are on the model's device.

    Attributes:
        token_ids: # int64 [tokens]
        positions: position of each token in its sequence. # int64 [tokens]
        cache_slots: cache slot of each token's key and value: block * block_size + offset. # int64 [tokens]
        query_start: sequence i holds tokens [query_start[i], query_start[i + 1]). # int32 [sequences + 1]
        context_len: number of tokens to which each sequence's last token attends, including itself. # int32 [sequences]
        block_tables: blocks of each sequence, in order. Padding is arbitrary. # int32 [sequences, max blocks]
        logit_rows: indices of the tokens whose logits are computed. # int64 [sampled]
        max_query_len: length of the longest prompt chunk, or 1 if there are no prompts.
        counts: number of decoding sequences, and of all sequences. Set only in steps captured as a CUDA graph, where
            the host does not know these numbers. `num_decodes` is then 0. # int32 [2]
        prompt_len: number of leading tokens of each sequence that the encoder reads. None in decoder-only models. #
            int32 [sequences]
        first_key: index of the first key that each sequence's queries see. None means 0 for all. # int32 [sequences]
        both_ways: whether each token attends to its whole sequence, and not only to earlier tokens.
        added: numbers to add to the logits. None means that nothing is added. # float32 [sampled, vocab]
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
    counts: Tensor | None = None
    prompt_len: Tensor | None = None
    first_key: Tensor | None = None
    both_ways: bool = False
    highest_only: bool = False
    added: Tensor | None = None


class PositionBias(NamedTuple):
    """The numbers that each head adds to scores, indexed by the distance between query and key.

    Attributes:
        values: `values[head, center + query - key]`, for all distances in a batch. # float32 [heads, places]
    """

    values: Tensor
    center: int


class Scoring(NamedTuple):
    """How a layer's attention computes scores, and which keys its window excludes.

    Attributes:
        scale: factor for the product of query and key. None means head_dim ** -0.5.
        softcap: soft cap c. A scaled product x becomes c tanh(x / c). None means no cap.
        bias: position bias, added after the soft cap. Only for models whose heads do not share keys and values.
        window: number of last tokens to which a token attends, including itself. None means all visible tokens.
        sinks: attention sinks: one additional score per head. It takes part in the softmax but has no value. # float32
            [heads]
    """

    scale: float | None = None
    softcap: float | None = None
    bias: PositionBias | None = None
    window: int | None = None
    sinks: Tensor | None = None

    def scale_of(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale


PLAIN = Scoring()


class Sequences(NamedTuple):
    """The lengths and the blocks of each sequence in a batch.

    Attributes:
        query_len: number of the sequence's tokens in this step. # int32 [sequences]
        context_len: number of the sequence's tokens in the cache after this step. # int32 [sequences]
        block_tables: blocks of each sequence, in order. There may be more than this step needs. # int32 [sequences,
            blocks]
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
    """Return the batch of these tokens and sequences.

    Args:
        token_ids: tokens of all sequences, one after the other. # int64 [tokens]
        wants_logits: whether to compute the logits of each sequence's last token. None means to compute them for all.
            # bool [sequences]
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
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def pack(arrays: dict[str, np.ndarray]) -> Tensor:
    """Join arrays in one buffer, so that a single copy moves all of them to a device. # uint8 [bytes]"""
    packed = np.empty(sum(_padded_bytes(array) for array in arrays.values()), dtype=np.uint8)
    begin = 0
    for array in arrays.values():
        packed[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        begin += _padded_bytes(array)
    return torch.from_numpy(packed)


def unpack(packed: Tensor, arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Undo `pack`: return views of the buffer. Only the names, shapes and dtypes of `arrays` are used."""
    tensors, begin = {}, 0
    for name, array in arrays.items():
        dtype = torch.from_numpy(array[:0]).dtype
        tensors[name] = packed[begin : begin + array.nbytes].view(dtype).view(array.shape)
        begin += _padded_bytes(array)
    return tensors


def _padded_bytes(array: np.ndarray) -> int:
    """Return the array's size in bytes, rounded up to a multiple of 16, so that the next array is aligned."""
    return -(-array.nbytes // 16) * 16


class AttentionBackend(ABC):
    """Computes attention over a paged cache. A backend has no state, so one object serves all layers.

    Attributes:
        capturable: whether a decode batch can be captured in a CUDA graph. Such a backend reads no data back from the
            device, and its launches depend only on shapes.
    """

    capturable: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether the backend runs on a device with this dtype."""

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, batch: Batch, scoring: Scoring = PLAIN) -> Tensor:
        """Write `k` and `v` into the cache. Then return the attention of each query over the keys visible to it.

        Query head h reads key head h // (heads / kv_heads).

        Args:
            q: queries, which need not be contiguous. # [tokens, heads, head_dim]
            k, v: keys and values to write to `batch.cache_slots`. In self-attention, their tokens are those of the
                queries. In cross-attention, they are the tokens of new prompts. # [tokens, kv_heads, head_dim]
            cache: one element of `KvCache.layers`, with the K/V of earlier tokens. They may have fewer bits than the
                queries. In latent attention, where keys are also the values, `v` is not read.

        Returns:
            # [tokens, heads * head_dim]
        """
