"""Attention on a CPU in float32, compiled by numba, straight from the blocks of the cache (float32 or bfloat16).

Up to 32 queries that read the same K/V head make a tile: queries of one token's heads, then of the next token's. Tiles
go to whichever thread is free; one costs what its context says, whether its prompt is whole or a later piece. A decode
whose heads share too few K/V heads to fill a tile takes a loop of its own (benchmarks/attention.py compares them).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import literally, njit, prange, types
from numba.extending import overload
from torch import Tensor

from xrunner.attention.base import PLAIN, AttentionBackend, Batch, Scoring
from xrunner.attention.simd import add_rows, add_values, address, dot_keys, fetch, score_keys, soften, take_next, widen

# Torch computes on OpenMP threads already; numba's own pool would fight them for the cores (twice as slow).
numba.config.THREADING_LAYER = "omp"  # type: ignore[attr-defined]

NEVER = np.float32(-1e30)
"""Below any score. Not -inf, which fastmath may assume away."""

LOG2_E = np.float32(1.4426950408889634)

LINE = 16
"""Elements of a cache line, in float32."""
LINE_BYTES = 64

NARROW, WIDE = 16, 32
"""Lanes of a tile: a key that is loaded serves two registers of a wide one."""

LEAST_GROUP = 4
"""Queries of a decode that make a tile; fewer are faster one by one."""


_NO_PLACES = np.zeros(0, dtype=np.int32)
_NO_BIAS = np.zeros((0, 0), dtype=np.float32)
_NO_SINKS = np.zeros(0, dtype=np.float32)


class _Places(NamedTuple):
    """A batch as the kernel takes it; `first_key` is empty where all keys are seen."""

    slots: np.ndarray
    query_start: np.ndarray
    context_len: np.ndarray
    first_key: np.ndarray
    tables: np.ndarray
    num_decodes: int
    both_ways: bool


class _Keys(NamedTuple):
    """Keys of one sequence and K/V head, in blocks: those from `earliest` on are seen, and `context` is behind them."""

    cache: np.ndarray
    head: int
    table: np.ndarray
    earliest: int
    context: int
    both_ways: bool


class _Tile(NamedTuple):
    """Rows from `first` of a sequence's, each (token, head of the group), and where their results go.

    # queries and results [n, group, head_dim]
    """

    queries: np.ndarray
    results: np.ndarray
    first: int


class _Space(NamedTuple):
    """Of one thread: queries, sums, scores and the state of the softmax; how many keys each row sees, int32 [lanes]."""

    floats: np.ndarray
    limits: np.ndarray


class _Scored(NamedTuple):
    """A `Scoring` as the kernel takes it: arrays are empty, cap and window 0, where the layer has none."""

    scale: np.float32
    softcap: np.float32
    bias: np.ndarray
    center: int
    window: int
    sinks: np.ndarray


class NumbaAttention(AttentionBackend):
    """Online softmax over paged blocks, on a CPU only: float32, with keys and values in float32 or bfloat16.

    Runs on as many threads as torch does.
    """

    def __init__(self) -> None:
        # Numba and torch share one OpenMP: starting numba's threads resets the count that torch was given.
        threads = torch.get_num_threads()
        self._most_threads: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        numba.set_num_threads(1)
        torch.set_num_threads(threads)

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cpu" and dtype == torch.float32

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        batch: Batch,
        scoring: Scoring = PLAIN,
    ) -> Tensor:
        num_threads = min(torch.get_num_threads(), self._most_threads)
        numba.set_num_threads(num_threads)
        out = torch.empty(q.shape)
        places = _Places(
            batch.cache_slots.numpy(),
            batch.query_start.numpy(),
            batch.context_len.numpy(),
            _NO_PLACES if batch.first_key is None else batch.first_key.numpy(),
            batch.block_tables.numpy(),
            batch.num_decodes,
            batch.both_ways,
        )
        bias, sinks = scoring.bias, scoring.sinks
        scored = _Scored(
            np.float32(scoring.scale_of(q.shape[2])),
            np.float32(0.0 if scoring.softcap is None else scoring.softcap),
            _NO_BIAS if bias is None else bias.values.contiguous().numpy(),
            0 if bias is None else bias.center,
            0 if scoring.window is None else scoring.window,
            _NO_SINKS if sinks is None else sinks.contiguous().numpy(),
        )
        # Contiguous, all of them: numba compiles anew, for seconds, for each combination of layouts that it meets.
        q, k, v = (x.contiguous() for x in (q, k, v))
        kept = cache.view(torch.uint16) if cache.dtype == torch.bfloat16 else cache
        arrays = q.numpy(), k.numpy(), v.numpy()
        _write_and_attend(arrays, kept.numpy(), places, scored, num_threads, out.numpy())
        return out.flatten(1)


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


def _stored(cache: np.ndarray, x: np.float32) -> Any:
    """An element as the cache keeps it: float32, or bfloat16 rounded to the nearest, even of two."""


@overload(_stored, strict=False)
def _(cache: Any, x: Any) -> Any:
    if cache.dtype == types.float32:
        return lambda cache, x: x

    def rounded(cache, x):
        bits = np.uint32(np.float32(x).view(np.uint32))
        if np.isfinite(x):
            return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
        return np.uint16(0x7FC0) if np.isnan(x) else np.uint16(bits >> np.uint32(16))

    return rounded


def _wide(cache: np.ndarray, scratch: np.ndarray) -> Any:
    """Where elements of the cache are read in float32: in place, or in `scratch`."""


@overload(_wide, strict=False)
def _(cache: Any, scratch: Any) -> Any:
    if cache.dtype == types.float32:
        return lambda cache, scratch: cache
    return lambda cache, scratch: scratch


def _widen(cache: np.ndarray, start: int, count: int, scratch: np.ndarray) -> Any:
    """Put elements of the cache where `_wide` has them; return the place of the first there."""


@overload(_widen, strict=False)
def _(cache: Any, start: Any, count: Any, scratch: Any) -> Any:
    if cache.dtype == types.float32:
        return lambda cache, start, count, scratch: start

    def widened(cache, start, count, scratch):
        vectors = count // LINE
        widen(cache, scratch, start, 0, vectors, LINE)
        widen(cache, scratch, start, vectors * LINE, count - vectors * LINE, 1)
        return 0

    return widened


@njit(nogil=True, fastmath=True, error_model="numpy")
def _limit(scores, count, cap):
    """Keep the first scores between cap and -cap: cap tanh(score / cap)."""
    for i in range(count):
        small = _exp(np.float32(-2.0) * abs(scores[i]) / cap)
        limited = cap * (np.float32(1.0) - small) / (np.float32(1.0) + small)
        scores[i] = limited if scores[i] > 0 else -limited


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _write_and_attend(arrays, cache, places, scored, num_threads, out):
    q, k, v = arrays
    slots, query_start, context_len, first_key, tables, num_decodes, both_ways = places
    num_heads, head_dim = q.shape[1], q.shape[2]
    num_kv_heads, block_size = cache.shape[2], cache.shape[3]
    group, last = num_heads // num_kv_heads, cache.shape[0] - 1  # one half where keys are the values

    for i in prange(k.shape[0]):
        block, offset = slots[i] // block_size, slots[i] % block_size
        for h in range(num_kv_heads):
            for d in range(head_dim):
                cache[last, block, h, offset, d] = _stored(cache, v[i, h, d])
                cache[0, block, h, offset, d] = _stored(cache, k[i, h, d])
            for d in range(head_dim):  # softmax would lose what is not finite, a sum of values does not
                if not np.isfinite(k[i, h, d]):
                    cache[last, block, h, offset] = _stored(cache, np.float32(np.nan))

    sequence, first_row = _tiles(query_start, group)
    num_tiles = len(sequence)
    counter = np.zeros(1, dtype=np.int64)
    for _ in prange(num_threads):
        floats = _aligned((2 * head_dim + block_size + 3) * WIDE + block_size * head_dim)
        space = _Space(floats, np.empty(WIDE, dtype=np.int32))
        task = take_next(counter)
        while task < num_tiles * num_kv_heads:
            # Head by head: a sequence's tiles find its keys and values in the processor's cache.
            h, i, first = task // num_tiles, sequence[task % num_tiles], first_row[task % num_tiles]
            begin, end, context = query_start[i], query_start[i + 1], context_len[i]
            earliest = first_key[i] if len(first_key) else 0
            heads = slice(h * group, (h + 1) * group)
            if i < num_decodes and group < LEAST_GROUP and head_dim % LINE == 0:
                if scored.window:
                    earliest = max(earliest, context - scored.window)
                keys = _Keys(cache, h, tables[i], earliest, context, both_ways)
                _decode(q[begin, heads], keys, scored, out[begin, heads], floats)
            else:
                keys = _Keys(cache, h, tables[i], earliest, context, both_ways)
                tile = _Tile(q[begin:end, heads], out[begin:end, heads], first)
                if (end - begin) * group - first > NARROW:
                    _attend(tile, keys, scored, space, WIDE, 8)
                else:
                    _attend(tile, keys, scored, space, NARROW, 16)
            task = take_next(counter)


@njit(nogil=True)
def _tiles(query_start, group):
    """Of each tile: its sequence, and the first of its rows among the sequence's. # int32 [tiles], int32 [tiles]"""
    num_rows = (query_start[1:] - query_start[:-1]) * group
    num_tiles = np.sum((num_rows + WIDE - 1) // WIDE)
    sequence, first_row = np.empty(num_tiles, dtype=np.int32), np.empty(num_tiles, dtype=np.int32)
    tile = 0
    for i in range(len(num_rows)):
        for first in range(0, num_rows[i], WIDE):
            sequence[tile], first_row[tile] = i, first
            tile += 1
    return sequence, first_row


@njit(nogil=True)
def _aligned(size):
    """Memory that begins where a cache line does. # float32 [size]"""
    memory = np.empty(size + 16, dtype=np.float32)
    first = -address(memory) % 64 // 4
    return memory[first : first + size]


@njit(nogil=True, error_model="numpy")
def _attend(tile, keys, scored, space, lanes, num_sums):
    """One tile over the keys of its head.

    Args:
        num_sums: keys or dimensions at once: as many sums as fit in registers. Like `lanes` a constant.
    """
    literally(lanes)
    literally(num_sums)
    cache, h, table, earliest, context, both_ways = keys
    q, first, floats, limits, window = tile.queries, tile.first, space.floats, space.limits, scored.window
    num_tokens, group, head_dim = q.shape
    num_kv_heads, block_size = cache.shape[2], cache.shape[3]
    num_rows = min(lanes, num_tokens * group - first)
    scale = scored.scale * LOG2_E  # scores are powers of two
    rows = floats[: (2 * head_dim + block_size + 3) * lanes]
    queries, sums = rows[: head_dim * lanes], rows[head_dim * lanes : 2 * head_dim * lanes]
    scores, state = rows[2 * head_dim * lanes : -3 * lanes], rows[-3 * lanes :]
    scratch = floats[len(rows) :]
    wide = _wide(cache, scratch)
    highest, total, shrink = state[:lanes], state[lanes : 2 * lanes], state[2 * lanes :]
    for r in range(lanes):
        row = first + min(r, num_rows - 1)  # lanes left over repeat the last row
        limits[r] = context if both_ways else context - num_tokens + row // group + 1
        query = q[row // group, row % group]
        for d in range(head_dim):
            queries[d * lanes + r] = query[d] * scale
    sums[:] = np.float32(0.0)
    highest[:] = NEVER
    total[:] = np.float32(0.0)

    value_start = (cache.shape[0] - 1) * cache.shape[1] * num_kv_heads * block_size * head_dim
    visible = limits[lanes - 1]
    if window:
        earliest = max(earliest, limits[0] - window)
    for b in range(earliest // block_size, (visible + block_size - 1) // block_size):
        begin = max(earliest - b * block_size, 0)
        before, here = b * block_size + begin, block_size - begin
        n = min(here, visible - before)
        start = ((table[b] * num_kv_heads + h) * block_size + begin) * head_dim
        at = _widen(cache, start, here * head_dim, scratch)
        t = 0
        while t + num_sums <= here:
            score_keys(queries, wide, scores, at + t * head_dim, t * lanes, head_dim, num_sums, lanes)
            t += num_sums
        while t < n:
            score_keys(queries, wide, scores, at + t * head_dim, t * lanes, head_dim, 1, lanes)
            t += 1
        if scored.softcap:
            _limit(scores, n * lanes, scored.softcap * LOG2_E)
        if len(scored.bias):  # heads have keys of their own: rows are tokens
            place = scored.center + context - num_tokens + first - before
            for t in range(n):
                for r in range(num_rows):
                    scores[t * lanes + r] += scored.bias[h, place - t + r] * LOG2_E
        if before + n > limits[0] or (window and before < visible - window):
            _hide(scores, limits, before, n, window, lanes)
        soften(scores, highest, total, shrink, n, lanes)
        at = _widen(cache, start + value_start, here * head_dim, scratch)
        d = 0
        while d + num_sums <= head_dim:
            add_values(scores, shrink, wide, sums, at + d, d * lanes, n, head_dim, num_sums, lanes)
            d += num_sums
        while d < head_dim:
            add_values(scores, shrink, wide, sums, at + d, d * lanes, n, head_dim, 1, lanes)
            d += 1

    if len(scored.sinks):
        for r in range(num_rows):
            further = scored.sinks[h * group + (first + r) % group] * LOG2_E
            total[r] += np.float32(2.0) ** (further - highest[r])  # infinite where it takes all
    for r in range(num_rows):
        result = tile.results[(first + r) // group, (first + r) % group]
        share = np.float32(1.0) / total[r]
        for d in range(head_dim):
            result[d] = sums[d * lanes + r] * share


@njit(nogil=True, error_model="numpy")
def _hide(scores, limits, before, count, window, lanes):
    """Rule out keys that rows do not see: from their limits on, and before the last `window` of them (0: none).

    A row of which nothing has been seen yet counts what is hidden, until its first key shrinks that to none.
    """
    literally(lanes)
    for t in range(count):
        for r in range(lanes):
            if before + t >= limits[r]:
                scores[t * lanes + r] = NEVER
    if window:
        for t in range(count):
            for r in range(lanes):
                if before + t < limits[r] - window:
                    scores[t * lanes + r] = NEVER


@njit(nogil=True, fastmath=True, error_model="numpy")
def _decode(q, keys, scored, acc, scores):
    """One token's queries of a K/V head, one by one: acc = softmax(q K^T) V.

    Args:
        q, acc: the heads of the group, in whole vectors of a cache line. # [group, head_dim]
        scores: for those of a block. # [block_size or more]
    """
    cache, h, table, earliest, context, _ = keys
    group, head_dim = q.shape
    num_kv_heads, block_size = cache.shape[2], cache.shape[3]
    highest = np.full(group, NEVER, dtype=np.float32)
    total = np.zeros(group, dtype=np.float32)
    acc[:] = np.float32(0.0)
    value_start = (cache.shape[0] - 1) * cache.shape[1] * num_kv_heads * block_size * head_dim
    num_blocks = (context + block_size - 1) // block_size
    for b in range(earliest // block_size, num_blocks):
        begin = max(earliest - b * block_size, 0)
        before, here = b * block_size + begin, block_size - begin
        n = min(here, context - before)
        start = ((table[b] * num_kv_heads + h) * block_size + begin) * head_dim
        soon = (table[min(b + 1, num_blocks - 1)] * num_kv_heads + h) * block_size * head_dim
        for g in range(group):
            t = 0
            while t < n:
                if g == 0:  # blocks lie apart, where the processor's own prefetching does not follow
                    for line in range(t * head_dim, min(t + 4, block_size) * head_dim, LINE_BYTES // cache.itemsize):
                        fetch(cache, soon + line)
                        fetch(cache, soon + value_start + line)
                if t + 4 <= here:
                    dot_keys(q, cache, scores, g * head_dim, start + t * head_dim, t, head_dim, 4, LINE)
                    t += 4
                else:
                    dot_keys(q, cache, scores, g * head_dim, start + t * head_dim, t, head_dim, 1, LINE)
                    t += 1
            top = highest[g]
            for t in range(n):
                scores[t] *= scored.scale
            if scored.softcap:
                _limit(scores, n, scored.softcap)
            if len(scored.bias):
                for t in range(n):
                    scores[t] += scored.bias[h, scored.center + context - 1 - before - t]
            for t in range(n):
                top = max(top, scores[t])
            shrink = _exp(highest[g] - top)
            highest[g] = top
            mass = np.float32(0.0)
            for t in range(n):
                scores[t] = _exp(scores[t] - top)
                mass += scores[t]
            total[g] = total[g] * shrink + mass
            d = 0
            while d + 4 * LINE <= head_dim:
                add_rows(scores, cache, acc, start + value_start + d, g * head_dim + d, shrink, n, head_dim, 4, LINE)
                d += 4 * LINE
            while d < head_dim:
                add_rows(scores, cache, acc, start + value_start + d, g * head_dim + d, shrink, n, head_dim, 1, LINE)
                d += LINE
    for g in range(group):
        if len(scored.sinks):
            further = scored.sinks[h * group + g]
            top = max(highest[g], further)
            shrink = _exp(highest[g] - top)
            total[g] = total[g] * shrink + _exp(further - top)
            for d in range(head_dim):
                acc[g, d] *= shrink
        for d in range(head_dim):
            acc[g, d] /= total[g]
