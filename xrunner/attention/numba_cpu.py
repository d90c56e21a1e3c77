"""Attention on a CPU in float32, compiled by numba; reads K/V blocks (float32 or bfloat16) where they are.

Up to 32 queries that read the same K/V head make a tile: queries of one token's heads, then of the next token's. Tiles
go to whichever thread is free; one costs what its context says, whether its prompt is whole or a later piece. Decodes
whose heads share too many K/V heads to fill a tile go one by one (`numba_decode`; see benchmarks/attention.py).
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
from xrunner.attention.numba_decode import LINE, LOG2_E, NEVER, Keys, Scored, decode, limit
from xrunner.attention.simd import add_values, address, score_keys, soften, take_next, widen
from xrunner.kernels.threads import num_threads

# Torch computes on OpenMP threads already; numba's own pool would fight them for the cores (twice as slow).
numba.config.THREADING_LAYER = "omp"  # type: ignore[attr-defined]

NARROW, WIDE = 16, 32
"""Lanes of a tile: a key that is loaded serves two registers of a wide one."""

LEAST_GROUP = 4
"""Queries of a decode that make a tile; fewer are faster one by one."""
TASKS_A_THREAD = 8
"""Of decodes one by one: enough that no thread waits long for the last."""


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


class NumbaAttention(AttentionBackend):
    """Online softmax over paged blocks, on a CPU only: float32, with keys and values in float32 or bfloat16.

    Runs on as many threads as torch does.
    """

    def __init__(self) -> None:
        # Numba and torch share one OpenMP: starting numba's threads resets the count that torch was given.
        threads = torch.get_num_threads()
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
        count = num_threads()
        numba.set_num_threads(count)
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
        scored = Scored(
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
        _write_and_attend(arrays, kept.numpy(), places, scored, count, out.numpy())
        return out.flatten(1)


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

    is_alone = group < LEAST_GROUP and head_dim % LINE == 0 and block_size % LINE == 0
    num_alone = num_decodes if is_alone else 0
    parts = 1  # of a decode's heads
    if num_threads > 1:
        parts = min(num_kv_heads, -(-TASKS_A_THREAD * num_threads // max(num_alone, 1)))
    sequence, first_row = _tiles(query_start[num_alone:], group)
    num_tiles = len(sequence)
    counter = np.zeros(1, dtype=np.int64)
    for _ in prange(num_threads):
        floats = _aligned(max((2 * head_dim + block_size + 3) * WIDE + block_size * head_dim, (1 + num_heads) * LINE))
        space = _Space(floats, np.empty(WIDE, dtype=np.int32))
        task = take_next(counter)
        while task < num_alone * parts:
            i, part = task // parts, task % parts
            earliest = first_key[i] if len(first_key) else 0
            if scored.window:
                earliest = max(earliest, context_len[i] - scored.window)
            first_head, behind = num_kv_heads * part // parts, num_kv_heads * (part + 1) // parts
            keys = Keys(cache, first_head, tables[i], earliest, context_len[i], both_ways)
            heads = slice(first_head * group, behind * group)
            decode(q[i, heads], keys, behind - first_head, scored, out[i, heads], floats)
            task = take_next(counter)
        task -= num_alone * parts
        while task < num_tiles * num_kv_heads:
            # Head by head: a sequence's tiles find its keys and values in the processor's cache.
            h, i, first = task // num_tiles, num_alone + sequence[task % num_tiles], first_row[task % num_tiles]
            begin, end, context = query_start[i], query_start[i + 1], context_len[i]
            earliest = first_key[i] if len(first_key) else 0
            heads = slice(h * group, (h + 1) * group)
            keys = Keys(cache, h, tables[i], earliest, context, both_ways)
            tile = _Tile(q[begin:end, heads], out[begin:end, heads], first)
            if (end - begin) * group - first > NARROW:
                _attend(tile, keys, scored, space, WIDE, 8)
            else:
                _attend(tile, keys, scored, space, NARROW, 16)
            task = take_next(counter) - num_alone * parts


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
            limit(scores, n * lanes, scored.softcap * LOG2_E)
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
