"""Attention on a CPU in float32. Decode is compiled by numba and reads each key and value once, straight from its
block; prompts go through torch's fused kernel, sequence by sequence (benchmarks/attention.py compares them).
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor
from torch.nn import functional as F

from xrunner.attention.base import AttentionBackend, Batch
from xrunner.attention.reference import causal_mask, gather_kv

# Torch computes on OpenMP threads already; numba's own pool would fight them for the cores (twice as slow).
numba.config.THREADING_LAYER = "omp"  # type: ignore[attr-defined]

NEVER = np.float32(-1e30)
"""Below any score. Not -inf, which fastmath may assume away."""


class NumbaAttention(AttentionBackend):
    """Online softmax over paged blocks; float32 on a CPU only. Runs on as many threads as torch does."""

    def __init__(self) -> None:
        # Numba and torch share one OpenMP: starting numba's threads resets the count that torch was given.
        threads = torch.get_num_threads()
        self._most_threads: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        numba.set_num_threads(1)
        torch.set_num_threads(threads)

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cpu" and dtype == torch.float32

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, batch: Batch) -> Tensor:
        numba.set_num_threads(min(torch.get_num_threads(), self._most_threads))
        out = torch.empty(q.shape)
        k, v = k.contiguous(), v.contiguous()
        # Contiguous, all of them: numba compiles anew, for seconds, for each combination of layouts that it meets.
        _write_and_decode(
            q[: batch.num_decodes].contiguous().numpy(),
            k.numpy(),
            v.numpy(),
            cache.numpy(),
            batch.cache_slots.numpy(),
            batch.context_len.numpy(),
            batch.block_tables.numpy(),
            batch.num_decodes,
            out.numpy(),
        )
        starts, contexts = batch.query_start.tolist(), batch.context_len.tolist()
        for i in range(batch.num_decodes, len(contexts)):
            rows = slice(starts[i], starts[i + 1])
            if contexts[i] == starts[i + 1] - starts[i]:
                out[rows] = fused(q[rows], k[rows], v[rows])
            else:
                keys, values = gather_kv(cache, batch.block_tables[i], contexts[i])
                out[rows] = fused(q[rows], keys, values)
        return out.flatten(1)


def fused(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of a sequence's last tokens. # q [n, heads, dim], keys [context, kv_heads, dim] -> like q"""
    whole = q.shape[0] == keys.shape[0]
    mask = None if whole else ~causal_mask(q.shape[0], keys.shape[0], q.device)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=whole,
        enable_gqa=q.shape[1] != keys.shape[1],
    )
    return out[0].transpose(0, 1)


@njit(inline="always")
def _exp(x):
    """e^x for x <= 0, to 1e-7 relative; a polynomial, because the library's is not vectorised."""
    x = max(x, np.float32(-87.0))
    t = x * np.float32(1.4426950408889634)
    whole = np.floor(t + np.float32(0.5))
    f = t - whole
    p = np.float32(1.535336188319500e-4)
    p = p * f + np.float32(1.339887440266574e-3)
    p = p * f + np.float32(9.618437357674640e-3)
    p = p * f + np.float32(5.550332471162809e-2)
    p = p * f + np.float32(2.402264791363012e-1)
    p = p * f + np.float32(6.931472028550421e-1)
    p = p * f + np.float32(1.0)
    return p * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(parallel=True, nogil=True, fastmath=True, cache=True)
def _write_and_decode(q, k, v, cache, slots, context_len, tables, num_decodes, out):
    num_heads, head_dim = q.shape[1], q.shape[2]
    num_kv_heads, block_size = cache.shape[2], cache.shape[3]
    group = num_heads // num_kv_heads
    scale = np.float32(1.0 / np.sqrt(head_dim))

    for i in prange(k.shape[0]):
        block, offset = slots[i] // block_size, slots[i] % block_size
        for h in range(num_kv_heads):
            for d in range(head_dim):
                cache[0, block, h, offset, d] = k[i, h, d]
                cache[1, block, h, offset, d] = v[i, h, d]

    # Head-major: each thread gets every sequence, so ragged contexts share out evenly.
    for task in prange(num_decodes * num_kv_heads):
        h, i = task // num_decodes, task % num_decodes
        queries = np.empty((group, head_dim), dtype=np.float32)
        for g in range(group):
            for d in range(head_dim):
                queries[g, d] = q[i, h * group + g, d] * scale
        acc = out[i, h * group : (h + 1) * group]
        _decode(queries, cache[0], cache[1], h, tables[i], context_len[i], acc)


@njit(nogil=True, fastmath=True)
def _decode(queries, keys, values, h, table, context, acc):
    """Queries of one token over one K/V head: acc = softmax(queries K^T) V, block by block."""
    group, head_dim = queries.shape
    block_size = keys.shape[2]
    scores = np.empty(block_size, dtype=np.float32)
    highest = np.full(group, NEVER, dtype=np.float32)
    total = np.zeros(group, dtype=np.float32)
    acc[:] = np.float32(0.0)
    for b in range((context + block_size - 1) // block_size):
        key, value = keys[table[b], h], values[table[b], h]
        n = min(block_size, context - b * block_size)
        for g in range(group):
            top = highest[g]
            for t in range(n):
                s = np.float32(0.0)
                for d in range(head_dim):
                    s += queries[g, d] * key[t, d]
                scores[t] = s
                top = max(top, s)
            shrink = _exp(highest[g] - top)
            highest[g] = top
            mass = np.float32(0.0)
            for t in range(n):
                scores[t] = _exp(scores[t] - top)
                mass += scores[t]
            total[g] = total[g] * shrink + mass
            for d in range(head_dim):
                acc[g, d] *= shrink
            for t in range(n):
                for d in range(head_dim):
                    acc[g, d] += scores[t] * value[t, d]
    for g in range(group):
        for d in range(head_dim):
            acc[g, d] /= total[g]
