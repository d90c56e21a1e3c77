"""Define the contract between models, workers and attention backends: the batch of a step, and the result that a
backend computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

MOST_PROMPTS = 64
"""Largest number of pieces of prompts in a captured step. The step's kernels are launched for this many pieces, even if
the batch has fewer.
"""


@dataclass(slots=True)
class Batch:
    """The input of one step: the tokens of all sequences, concatenated (ORCA's selective batching).

    Sequences that decode come first, one token each. Pieces of prompts follow. All tensors lie on the model's device.

    Attributes:
        token_ids: # int64 [tokens]
        positions: position of each token in its sequence. # int64 [tokens]
        cache_slots: cache slot of each token's key and value: block * block_size + offset. # int64 [tokens]
        query_start: sequence i holds tokens [query_start[i], query_start[i + 1]). # int32 [sequences + 1]
        context_len: number of tokens to which each sequence's last token attends, including itself. # int32 [sequences]
        block_tables: blocks of each sequence, in order. Padding is arbitrary. # int32 [sequences, max blocks]
        logit_rows: indices of the tokens whose logits are computed. # int64 [sampled]
        num_decodes: number of sequences with one token. They come first.
        max_query_len: length of the longest piece of a prompt, or 1 if there are no prompts.
        counts: number of decodes, and number of all sequences. It is set only in captured steps, in which the host does
            not know these numbers and `num_decodes` is 0. # int32 [2]
        prompt_len: only for encoder-decoders: how many of each sequence's first tokens the encoder reads. # int32
            [sequences]
        first_key: index of the first token to which each sequence attends. None means 0 for all. # int32 [sequences]
        both_ways: whether each token attends to its whole sequence, and not only to earlier tokens.
        highest_only: whether only the highest logit of each row must be right.
        added: numbers to add to the logits before the highest is chosen. None means no numbers. # float32 [sampled,
            vocab]
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
    """The numbers that each head adds to scores, by the distance between query and key.

    Attributes:
        values: `values[head, center + query - key]`, for all distances in a batch. # float32 [heads, places]
        center: index of distance zero.
    """

    values: Tensor
    center: int


class Scoring(NamedTuple):
    """How a layer scores a query against a key, and which of the visible keys it leaves out.

    Attributes:
        scale: factor for the product of query and key. None means head_dim ** -0.5.
        softcap: limit c of scaled products, which become c tanh(product / c). None means no limit.
        bias: position bias, added after the soft cap, in models whose heads do not share keys and values.
        window: number of last tokens to which a token attends, including itself. None means all visible tokens.
        sinks: one more score for each head, which is in the softmax but adds no value. # float32 [heads]
    """

    scale: float | None = None
    softcap: float | None = None
    bias: PositionBias | None = None
    window: int | None = None
    sinks: Tensor | None = None

    def scale_of(self, head_dim: int) -> float:
        """Return the factor for products of queries and keys with this many dimensions."""
        return head_dim**-0.5 if self.scale is None else self.scale


PLAIN = Scoring()
"""The scoring of most models: all visible keys, scaled."""


class Sequences(NamedTuple):
    """The properties in which the sequences of a batch differ.

    Attributes:
        query_len: number of the sequence's tokens in this step. # int32 [sequences]
        context_len: number of the sequence's tokens in the cache after this step. # int32 [sequences]
        block_tables: blocks of each sequence, perhaps more than this step needs. # int32 [sequences, blocks]
        prompt_len: only for encoder-decoders: number of the sequence's tokens that the encoder reads. # int32
            [sequences]
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
    """Return a batch from the properties in which sequences differ. The batch's other fields follow from these.

    Args:
        token_ids: tokens of all sequences, one after the other. # int64 [tokens]
        wants_logits: whether the logits of each sequence's last token are computed. None means that all are.
            # bool [sequences]
        device: the model's device. None means the CPU.
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
    """Copy a tensor to a device without waiting until the device has finished earlier work."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def pack(arrays: dict[str, np.ndarray]) -> Tensor:
    """Return all arrays in one buffer, so that a single copy moves them to a device. # uint8 [bytes]"""
    packed = np.empty(sum(_padded_bytes(array) for array in arrays.values()), dtype=np.uint8)
    begin = 0
    for array in arrays.values():
        packed[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        begin += _padded_bytes(array)
    return torch.from_numpy(packed)


def unpack(packed: Tensor, arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Return the tensors that `pack` joined, as views of the received buffer."""
    tensors, begin = {}, 0
    for name, array in arrays.items():
        dtype = torch.from_numpy(array[:0]).dtype
        tensors[name] = packed[begin : begin + array.nbytes].view(dtype).view(array.shape)
        begin += _padded_bytes(array)
    return tensors


def _padded_bytes(array: np.ndarray) -> int:
    """Return the size rounded up to 16 bytes, the unit in which kernels read."""
    return -(-array.nbytes // 16) * 16


class AttentionBackend(ABC):
    """Computes attention over a paged cache. A backend has no state, so one object serves all layers.

    Attributes:
        capturable: whether a decode batch can be captured in a CUDA graph, because no data is read back from the
            device, and launches depend only on shapes.
    """

    capturable: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether the backend runs on a device with this dtype."""

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
        """Write `k` and `v` into the cache, then return each token's attention over the keys that are visible to it.

        Query head h reads key head h // (heads / kv_heads).

        Args:
            q: queries, which need not be contiguous. # [tokens, heads, head_dim]
            k, v: keys and values of the tokens in `batch.cache_slots`. In self-attention these are the query tokens. In
                cross-attention they are the tokens of the encoder's new output. # [tokens, kv_heads, head_dim]
            cache: one layer of `KvCache.layers`. It already contains the sequences' earlier tokens, perhaps in fewer
                bits than the queries. If keys are also the values, `v` is not read.
            scoring: the layer's scoring.

        Returns:
            # [tokens, heads * head_dim]
        """
