"""Compute attention on a CPU with numba, directly from K/V blocks in float32, bfloat16 or int8.

Queries of one sequence that read the same K/V head are divided into spans (`prompts`). A free thread takes the next
span. A span's time is proportional to its context. If too few heads share a K/V head to fill a tile, the queries of
decodes are computed one at a time (`decodes`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import njit, prange, types
from numba.extending import overload
from torch import Tensor

from xgpt.core.schema import SCALE_BYTES
from xrunner.attention.base import PLAIN, AttentionBackend, Batch, Scoring
from xrunner.cpu import amx
from xrunner.cpu.decodes import LINE, LOG2_E, Keys, Scored, decode
from xrunner.cpu.prompts import (
    WIDE,
    Context,
    Matrices,
    RowSpan,
    Rules,
    Vectors,
    Way,
    attend,
    begin_products,
    end_products,
    make_space,
    space_floats,
    tile_floats,
    with_piece,
)
from xrunner.cpu.scalars import INFINITE, INNER, LARGEST, MAGNITUDE, TINIEST
from xrunner.cpu.simd import address, at, take_next
from xrunner.cpu.threads import num_threads

LEAST_GROUP = 4
"""Smallest number of heads per K/V head at which a decode's queries form a tile. Fewer are faster one by one."""
TASKS_A_THREAD = 8
SPAN_FLOATS = 1 << 16


PIECES: dict[type[Way], tuple[int, int]] = {Vectors: (64, 32), Matrices: (128, 128)}

_NO_PLACES = np.zeros(0, dtype=np.int32)
_NO_BIAS = np.zeros((0, 0), dtype=np.float32)
_NO_SINKS = np.zeros(0, dtype=np.float32)
_NO_SCALES = np.zeros(0, dtype=np.float32)


class _Places(NamedTuple):
    query_start: np.ndarray
    context_len: np.ndarray
    first_key: np.ndarray
    tables: np.ndarray
    num_decodes: int
    both_ways: bool


class _StridedRows(NamedTuple):
    """Queries, keys or values with any strides. Numba compiles anew for each array layout, which takes seconds. With
    this type, it compiles once.

    # values [elements]: element d of head h of token t is values[t * token_stride + h * head_stride + d]
    """

    values: np.ndarray
    token_stride: int
    head_stride: int
    num_heads: int


class NumbaAttention(AttentionBackend):
    """Attention on CPUs, by online softmax over paged blocks. Queries are float32. Keys and values are float32,
    bfloat16 or int8.

    The kernels run on as many threads as torch.
    """

    def __init__(self) -> None:
        # Numba and torch share one OpenMP: when numba's threads start, they reset the number of threads that torch was
        # given.
        threads = torch.get_num_threads()
        numba.set_num_threads(1)
        torch.set_num_threads(threads)

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cpu" and dtype == torch.float32

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, batch: Batch, scoring: Scoring = PLAIN) -> Tensor:
        count = num_threads()
        numba.set_num_threads(count)
        out = torch.empty(q.shape)
        places = _Places(
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
        kept = (cache.view(torch.uint16) if cache.dtype == torch.bfloat16 else cache).numpy()
        scales = cache.view(-1).view(torch.float32).numpy() if cache.dtype == torch.int8 else _NO_SCALES
        kind = Matrices if suits_matrices(cache) else Vectors
        of_prompts, of_decodes = PIECES[kind]
        _write(_rows(k), _rows(v), kept, scales, batch.cache_slots.numpy(), q.shape[2])
        _attend(_rows(q), kept, scales, places, scored, kind(of_prompts), of_decodes, count, q.shape[2], out.numpy())
        return out.flatten(1)


def suits_matrices(cache: Tensor) -> bool:
    """Return whether the processor has matrix registers, the cache is bfloat16, and its blocks and heads fill whole
    registers.
    """
    block_size, head_dim = cache.shape[3:]
    whole = block_size % amx.SQUARE == 0 and head_dim % amx.DEPTH == 0
    return cache.dtype == torch.bfloat16 and whole and amx.is_available()


def _rows(x: Tensor) -> _StridedRows:
    """Return a tensor in which each token's heads are contiguous: a view if possible, else a copy. # x [tokens, heads,
    head_dim]
    """
    num_tokens, num_heads, head_dim = x.shape
    if x.stride(2) != 1 or x.stride(1) != head_dim:
        x = x.contiguous()
    reach = (num_tokens - 1) * x.stride(0) + num_heads * head_dim if num_tokens else 0
    return _StridedRows(x.as_strided((reach,), (1,)).numpy(), x.stride(0), x.stride(1), num_heads)


def _stored(cache: np.ndarray, x: np.float32) -> Any:
    """Convert a number to the cache's type: float32, or bfloat16 (rounded to nearest, ties to even)."""


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


def _keep(x: Any, cache: np.ndarray, scales: np.ndarray, place: int, scale_place: int, head_dim: int) -> None:
    """Store a token's key or value at element `place`. In an int8 cache, store its scale at byte `scale_place`."""


@overload(_keep, strict=False)
def _(x: Any, cache: Any, scales: Any, place: Any, scale_place: Any, head_dim: Any) -> Any:
    def stored(x, cache, scales, place, scale_place, head_dim):
        row = at(cache, place)
        for d in range(head_dim):
            row[d] = _stored(cache, x[d])

    def rounded(x, cache, scales, place, scale_place, head_dim):
        row, highest = at(cache, place), np.int32(0)
        for d in range(head_dim):
            highest = max(highest, np.int32(np.float32(x[d]).view(np.int32) & MAGNITUDE))
        is_finite = highest < INFINITE
        scale = max(np.int32(highest).view(np.float32) / LARGEST, TINIEST) if is_finite else np.float32(np.nan)
        factor = np.float32(1.0) / scale if is_finite else np.float32(0.0)
        for d in range(head_dim):
            row[d] = np.int8(np.int32(np.rint(x[d] * factor))) if is_finite else np.int8(0)
        scales[scale_place // SCALE_BYTES] = scale

    return rounded if cache.dtype == types.int8 else stored


def _lose(cache: np.ndarray, scales: np.ndarray, place: int, scale_place: int, head_dim: int) -> None:
    """Fill a token's value with NaN."""


@overload(_lose, strict=False)
def _(cache: Any, scales: Any, place: Any, scale_place: Any, head_dim: Any) -> Any:
    def stored(cache, scales, place, scale_place, head_dim):
        row = at(cache, place)
        for d in range(head_dim):
            row[d] = _stored(cache, np.float32(np.nan))

    def rounded(cache, scales, place, scale_place, head_dim):
        scales[scale_place // SCALE_BYTES] = np.float32(np.nan)

    return rounded if cache.dtype == types.int8 else stored


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _write(k, v, cache, scales, slots, head_dim):
    num_kv_heads, block_size = cache.shape[2], cache.shape[3]
    size = block_size * cache.shape[4]
    to_values = (cache.shape[0] - 1) * cache.shape[1] * num_kv_heads * size  # 0 if keys also serve as values
    for i in prange(len(slots)):
        offset = slots[i] % block_size
        for h in range(num_kv_heads):
            first = (slots[i] // block_size * num_kv_heads + h) * size
            place, scale_place = first + offset * head_dim, first + block_size * head_dim + offset * SCALE_BYTES
            new_keys = at(k.values, i * k.token_stride + h * k.head_stride)
            new_values = at(v.values, i * v.token_stride + h * v.head_stride)
            _keep(new_values, cache, scales, place + to_values, scale_place + to_values, head_dim)
            _keep(new_keys, cache, scales, place, scale_place, head_dim)
            if not _all_finite(new_keys, head_dim):  # the softmax would lose the NaN, but the sum of values keeps it
                _lose(cache, scales, place + to_values, scale_place + to_values, head_dim)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _attend(q, cache, scales, places, scored, way, of_decodes, num_threads, head_dim, out):
    query_start, context_len, first_key, tables, num_decodes, both_ways = places
    num_heads, num_kv_heads, block_size = q.num_heads, cache.shape[2], cache.shape[3]
    size = block_size * cache.shape[4]
    group, stride = num_heads // num_kv_heads, num_kv_heads * size
    to_values = (cache.shape[0] - 1) * cache.shape[1] * stride

    is_alone = group < LEAST_GROUP and head_dim % LINE == 0 and block_size % LINE == 0
    num_alone = num_decodes if is_alone else 0
    parts = 1  # number of parts into which a decode's heads are divided
    if num_threads > 1:
        parts = min(num_kv_heads, -(-TASKS_A_THREAD * num_threads // max(num_alone, 1)))
    room = max(1, min(way.tiles, SPAN_FLOATS // tile_floats(head_dim)))
    num_tiles = np.sum(-(-(query_start[num_alone + 1 :] - query_start[num_alone:-1]) * group // WIDE)) * num_kv_heads
    if num_threads > 1:
        room = max(1, min(room, num_tiles // (TASKS_A_THREAD * num_threads)))
    sequence, first_row = _spans(query_start[num_alone:], group, room * WIDE)
    num_spans = len(sequence)
    counter = np.zeros(1, dtype=np.int64)
    for _ in prange(num_threads):
        widest = with_piece(way, max(way.piece, of_decodes))
        floats, memory = _aligned(2 * num_heads * LINE), _aligned(space_floats(widest, room, head_dim))
        space = make_space(widest, room, head_dim, memory)
        task = take_next(counter)
        while task < num_alone * parts:
            i, part = task // parts, task % parts
            earliest = first_key[i] if len(first_key) else 0
            if scored.window:
                earliest = max(earliest, context_len[i] - scored.window)
            first_head, behind = num_kv_heads * part // parts, num_kv_heads * (part + 1) // parts
            keys = Keys(cache, scales, first_head, tables[i], earliest, context_len[i], both_ways)
            heads = slice(first_head * group, behind * group)
            begin, end = i * q.token_stride + heads.start * head_dim, i * q.token_stride + heads.stop * head_dim
            rows = q.values[begin:end].reshape(-1, head_dim)
            decode(rows, keys, behind - first_head, scored, out[i, heads], floats)
            task = take_next(counter)
        task -= num_alone * parts
        begin_products(way)
        while task < num_spans * num_kv_heads:
            # Spans are computed head by head, so that a sequence's spans find its keys and values in the processor's
            # cache.
            h, i, first = task // num_spans, num_alone + sequence[task % num_spans], first_row[task % num_spans]
            begin, num_tokens = query_start[i], query_start[i + 1] - query_start[i]
            span = RowSpan(
                at(q.values, begin * q.token_stride + h * group * q.head_stride),
                at(out, (begin * num_heads + h * group) * head_dim),
                (q.token_stride, q.head_stride),
                (num_heads * head_dim, head_dim),
                num_tokens,
                group,
                first,
                min(num_tokens * group - first, room * WIDE),
            )
            context = Context(
                at(cache, h * size),
                at(scales, h * size // SCALE_BYTES),
                at(tables, i * tables.shape[1]),
                block_size,
                stride,
                to_values,
                head_dim,
                first_key[i] if len(first_key) else 0,
                context_len[i],
                both_ways,
            )
            attend(
                with_piece(way, of_decodes if num_tokens == 1 else way.piece),
                span,
                context,
                _rules(scored, h, group),
                space,
            )
            task = take_next(counter) - num_alone * parts
        end_products(way)
        memory[0] = np.float32(0.0)  # kept alive up to here


@njit(nogil=True, **INNER)
def _all_finite(x, count):
    largest = np.int32(0)
    for i in range(count):
        largest = max(largest, np.float32(x[i]).view(np.int32) & np.int32(0x7FFFFFFF))
    return largest < np.int32(0x7F800000)


@njit(nogil=True, **INNER)
def _rules(scored, h, group):
    return Rules(
        scored.scale * LOG2_E,
        scored.softcap * LOG2_E,
        scored.window,
        len(scored.bias) > 0,
        at(scored.bias, h * scored.bias.shape[1] + scored.center),
        len(scored.sinks) > 0,
        at(scored.sinks, h * group),
    )


@njit(nogil=True, **INNER)
def _spans(query_start, group, room):
    """Divide each sequence's rows into spans of at most `room` rows. Return each span's sequence and first row.

    # int32 [spans], int32 [spans]
    """
    num_rows = (query_start[1:] - query_start[:-1]) * group
    num_spans = np.sum((num_rows + room - 1) // room)
    sequence, first_row = np.empty(num_spans, dtype=np.int32), np.empty(num_spans, dtype=np.int32)
    span = 0
    for i in range(len(num_rows)):
        for first in range(0, num_rows[i], room):
            sequence[span], first_row[span] = i, first
            span += 1
    return sequence, first_row


@njit(nogil=True, **INNER)
def _aligned(size):
    memory = np.empty(size + 16, dtype=np.float32)
    first = -address(memory) % 64 // 4
    return memory[first : first + size]
