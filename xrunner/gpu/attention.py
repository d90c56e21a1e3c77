"""Compute attention on GPUs in Triton, for prompt chunks and for decodes. A decode's context may be split among
programs.

No data is read back from the device, and every launch depends only on shapes, so a step can be captured in a CUDA
graph. A captured step runs any batch of its shape, so its kernels read the number of decodes from `Batch.counts`.
Position biases, attention in both directions, windows, sinks, soft caps and latent attention run in plain torch. Triton
is imported only when the backend is built, so that no other code needs it.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import NamedTuple

import torch
from torch import Tensor

from xrunner.attention.base import MOST_PROMPTS, PLAIN, AttentionBackend, Batch, Scoring
from xrunner.attention.reference import ReferenceAttention
from xrunner.gpu.fused import power_of_two

MOST_SPLITS = 64
PROGRAMS_A_PROCESSOR = 4
"""Number of programs per multiprocessor in a decode step. Contexts are split until there are so many."""
CAPTURED_SPLITS = 8
"""Largest number of splits per context in a captured step with prompts, where the host does not know the number of
decodes. With many decodes, most of the launched splits are unused.
"""
LEAST_DOT = 16


class Tile(NamedTuple):
    rows: int
    keys: int
    num_warps: int
    num_stages: int


class TritonAttention(AttentionBackend):
    """Attention in float32, float16 and bfloat16 on a GPU. On a CPU it runs in Triton's interpreter, for tests only."""

    capturable = True

    def __init__(self) -> None:
        from xrunner.gpu import kernels

        self._kernels = kernels
        self._reference = ReferenceAttention()

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> bool:
        floats = (torch.float32, torch.float16, torch.bfloat16)
        return device.type == "cuda" and dtype in floats and importlib.util.find_spec("triton") is not None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, batch: Batch, scoring: Scoring = PLAIN) -> Tensor:
        is_plain = len(cache) == 2 and scoring._replace(scale=None) == PLAIN
        if batch.both_ways or batch.first_key is not None or not is_plain:
            return self._reference.forward(q, k, v, cache, batch, scoring)
        if scoring.scale is not None:  # the kernels divide by sqrt(head_dim)
            q = q * (scoring.scale * q.shape[2] ** 0.5)
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        num_kv_heads, block_size, head_dim = cache.shape[2:]
        self._kernels.write_kernel[(len(k),)](
            k,
            v,
            cache,
            batch.cache_slots,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            cache.stride(0),
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            WIDTH=power_of_two(num_kv_heads * head_dim),
        )
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if _most_decodes(batch):
            self._decode(q, cache, batch, out)
        if batch.num_decodes < len(batch.context_len):
            self._encode(q, cache, batch, out)
        return out.flatten(1)

    def _encode(self, q: Tensor, cache: Tensor, batch: Batch, out: Tensor) -> None:
        self._attend(q, cache, batch, out, prompt_tile(q.shape[2], q.dtype, q.shape[1] // cache.shape[2]))

    def _decode(self, q: Tensor, cache: Tensor, batch: Batch, out: Tensor) -> None:
        num_heads, head_dim = q.shape[1:]
        tile = decode_tile(q.shape[2], q.dtype, num_heads // cache.shape[2])
        most_keys, processors = batch.block_tables.shape[1] * cache.shape[3], _num_processors(q.device)
        count = _most_decodes(batch)
        if batch.counts is None:
            splits = num_splits(count * cache.shape[2], most_keys, tile.keys, processors)
        else:
            splits = min(CAPTURED_SPLITS, num_splits(cache.shape[2], most_keys, tile.keys, processors))
        if splits == 1:
            self._attend(q, cache, batch, out, tile, is_decode=True)
            return
        parts = torch.empty(count, num_heads, splits, head_dim, dtype=torch.float32, device=q.device)
        masses = torch.empty(count, num_heads, splits, dtype=torch.float32, device=q.device)
        self._attend(q, cache, batch, out, tile, (parts, masses), is_decode=True)
        self._kernels.combine_kernel[(count * num_heads,)](
            parts,
            masses,
            out,
            batch.query_start,
            q if batch.counts is None else batch.counts,
            splits,
            NUM_KV_HEADS=cache.shape[2],
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim(head_dim),
            MOST_SPLITS=MOST_SPLITS if batch.counts is None else CAPTURED_SPLITS,
            PROGRAMS=PROGRAMS_A_PROCESSOR * processors,
            IS_CAPTURED=batch.counts is not None,
        )

    def _attend(
        self,
        q: Tensor,
        cache: Tensor,
        batch: Batch,
        out: Tensor,
        tile: Tile,
        split: tuple[Tensor, Tensor] | None = None,
        *,
        is_decode: bool = False,
    ) -> None:
        """Compute attention for all prompt chunks, or for all decodes. If several splits are in use, write each one's
        result and the logarithm of its sum of weights into `split`.
        """
        num_kv_heads, block_size, head_dim = cache.shape[2:]
        group = q.shape[1] // num_kv_heads
        first = 0 if is_decode else batch.num_decodes
        num_sequences = len(batch.context_len) - first
        most_prompts = num_sequences if batch.counts is None else min(num_sequences, MOST_PROMPTS)
        num_tiles = _most_decodes(batch) if is_decode else (len(q) - first) // (tile.rows // group) + most_prompts
        parts, masses = split or (out, out)
        splits = masses.shape[2] if split else 1
        self._kernels.attend_kernel[(num_tiles, num_kv_heads, splits)](
            q,
            cache,
            out,
            parts,
            masses,
            batch.query_start,
            batch.context_len,
            batch.block_tables,
            q if batch.counts is None else batch.counts,
            first,
            num_sequences,
            splits,
            math.log2(math.e) / math.sqrt(head_dim),
            q.stride(0),
            q.stride(1),
            cache.stride(0),
            batch.block_tables.stride(0),
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim(head_dim),
            BLOCK_SIZE=block_size,
            ROWS=tile.rows,
            KEYS=tile.keys,
            IS_SPLIT=splits > 1,
            IS_DECODE=is_decode,
            IS_CAPTURED=batch.counts is not None,
            PROGRAMS=PROGRAMS_A_PROCESSOR * _num_processors(q.device),
            DOT=self._kernels.TYPES[dot_dtype(q.device, q.dtype)],
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


def prompt_tile(head_dim: int, dtype: torch.dtype, group: int) -> Tile:
    """Return the tile for prompt chunks: the largest that compiles for a Hopper GPU without spilling registers. Its
    speed has not been measured.
    """
    if dtype == torch.float32:
        tile = Tile(64 if head_dim <= 64 else 32, 32, 8, 2)
    else:
        tile = Tile(128, 64, 8, 3) if head_dim <= 128 else Tile(64, 32, 8, 2)
    return tile._replace(rows=max(tile.rows, power_of_two(group)))


def decode_tile(head_dim: int, dtype: torch.dtype, group: int) -> Tile:
    """Return the tile for decodes. Its rows are a sequence's queries that read one K/V head. Its speed has not been
    measured.
    """
    wide = dtype == torch.float32 or head_dim > 128
    return Tile(max(LEAST_DOT, power_of_two(group)), 32 if wide else 64, 4, 3)


def num_splits(num_tiles: int, most_keys: int, keys: int, num_processors: int) -> int:
    """Return the number of splits of each decode's context that keeps the device busy, a power of two.

    Args:
        num_tiles: number of decodes times K/V heads.
    """
    wanted = PROGRAMS_A_PROCESSOR * num_processors // num_tiles
    return 2 ** (max(1, min(wanted, most_keys // (2 * keys), MOST_SPLITS)).bit_length() - 1)


def dot_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of products: float32 instead of bfloat16 on CPUs and on GPUs without bfloat16 tensor cores
    (before Ampere).
    """
    if dtype == torch.bfloat16 and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        return torch.float32
    return dtype


def _most_decodes(batch: Batch) -> int:
    return batch.num_decodes if batch.counts is None else len(batch.context_len)


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def padded_dim(head_dim: int) -> int:
    return max(LEAST_DOT, power_of_two(head_dim))
