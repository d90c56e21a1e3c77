"""Compute attention for one decoding query at a time. The memory's bandwidth limits the speed, so K/V are read in the
order of addresses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import overload

from xgpt.core.schema import SCALE_BYTES
from xrunner.cpu.scalars import INNER, exp
from xrunner.cpu.simd import add_rows, at, dot_keys, fetch, soften_keys

NEVER = np.float32(-1e30)
"""A number below any score. It is not -inf, since fastmath may assume that no number is infinite."""

LOG2_E = np.float32(1.4426950408889634)

LINE = 16
LINE_BYTES = 64


class Keys(NamedTuple):
    """The keys of one sequence, in blocks, from K/V head `head` on. Keys [earliest, context) are visible.

    Attributes:
        scales: the same memory viewed as float32, from which an int8 cache's scales are read. Else empty.
    """

    cache: np.ndarray
    scales: np.ndarray
    head: int
    table: np.ndarray
    earliest: int
    context: int
    both_ways: bool


class Scored(NamedTuple):
    scale: np.float32
    softcap: np.float32
    bias: np.ndarray
    center: int
    window: int
    sinks: np.ndarray


@njit(nogil=True, fastmath=True, error_model="numpy", **INNER)
def limit(scores, count, cap):
    for i in range(count):
        small = exp(np.float32(-2.0) * abs(scores[i]) / cap)
        limited = cap * (np.float32(1.0) - small) / (np.float32(1.0) + small)
        scores[i] = limited if scores[i] > 0 else -limited


@njit(nogil=True, fastmath=True, error_model="numpy", **INNER)
def decode(q, keys, num_kv_heads, scored, acc, floats):
    """Compute one token's attention over some K/V heads: acc = softmax(q K^T) V.

    A block stores its heads one after the other, so the loops go over blocks, then over the heads of a block.

    Args:
        q, acc: queries and results. head_dim must be a multiple of LINE. # [num_kv_heads * group, head_dim]
        keys: keys of the first head. The block size must be a multiple of LINE.
        floats: scratch memory for each query head's weights of a line of keys, and the sums of these weights. # [2 *
            num_kv_heads * group * LINE]
    """
    cache, scales, first_head, table, earliest, context, _ = keys
    num_heads, head_dim = q.shape
    group, block_size = num_heads // num_kv_heads, cache.shape[3]
    highest = np.full(num_heads, NEVER, dtype=np.float32)
    shrink = np.empty(num_heads, dtype=np.float32)
    scores, totals = floats[: num_heads * LINE], floats[num_heads * LINE : 2 * num_heads * LINE]
    totals[:] = np.float32(0.0)
    acc[:] = np.float32(0.0)
    size = block_size * cache.shape[4]
    stride = cache.shape[2] * size
    per_line = LINE_BYTES // cache.itemsize
    # Number of elements of keys and of values to prefetch at a time. With more, prefetches would wait for memory.
    share = (LINE * head_dim // (2 * group) + per_line - 1) // per_line * per_line
    to_values = (cache.shape[0] - 1) * cache.shape[1] * stride
    to_scales = block_size * head_dim
    together = _heads_at_once(cache, num_kv_heads)
    passes = 1 if together == 1 else 3  # scores, softmax and values are each computed for all of these heads
    for b in range(earliest // block_size, (context + block_size - 1) // block_size):
        start = table[b] * stride + first_head * size
        following = table[min(b + 1, (context - 1) // block_size)] * stride + first_head * size
        for first in range(0, num_kv_heads, together):
            here = start + first * size
            soon = here + together * size if first + together < num_kv_heads else following
            for t in range(0, block_size, LINE):
                before = b * block_size + t
                begin, end = max(earliest - before, 0), min(context - before, LINE)
                if begin >= LINE or end <= 0:
                    continue
                for number in range(passes):
                    for g in range(first * group, (first + together) * group):
                        head = (g // group - first) * size
                        place, scale_place = head + t * head_dim, here + head + to_scales + t * SCALE_BYTES
                        asked = soon + place + g % group * 2 * share
                        line = at(scores, g * LINE)
                        if passes == 1 or number == 0:
                            _fetch(cache, asked, share)
                            dot_keys(q, cache, line, g * head_dim, here + place, head_dim, LINE)
                            _fetch(cache, asked + share, share)
                            _scale_line(cache, scales, line, scale_place)
                        if passes == 1 or number == 1:
                            _adjust(line, scored, first_head + g // group, context - 1 - before)
                            highest[g], shrink[g] = soften_keys(line, totals, g * LINE, highest[g], begin, end, LINE)
                        if passes == 1 or number == 2:
                            _scale_line(cache, scales, line, scale_place + to_values)
                            _fetch(cache, asked + to_values, share)
                            values = here + place + to_values
                            _add(line, cache, acc, values, g * head_dim, shrink[g], begin, end, head_dim)
                            _fetch(cache, asked + to_values + share, share)
    for g in range(num_heads):
        total = np.sum(totals[g * LINE : (g + 1) * LINE])
        if len(scored.sinks):
            further = scored.sinks[first_head * group + g] * LOG2_E
            total += np.float32(2.0) ** (further - highest[g])  # infinite if the attention sink has all the weight
        for d in range(head_dim):
            acc[g, d] /= total


def _heads_at_once(cache: np.ndarray, num_kv_heads: int) -> Any:
    """Return the number of K/V heads whose scores are computed before the first head's softmax, so that the softmax
    does not wait for scores. It is 1 in float32, where the memory's bandwidth is the limit.
    """


@overload(_heads_at_once, strict=False)
def _(cache: Any, num_kv_heads: Any) -> Any:
    return (lambda cache, num_kv_heads: 1) if cache.dtype == types.float32 else lambda cache, num_kv_heads: num_kv_heads


def _scale_line(cache: np.ndarray, scales: np.ndarray, numbers: np.ndarray, place: int) -> None:
    """Multiply a line of numbers, one per key, by the scales at byte `place` and after. Do nothing if the cache has no
    scales.
    """


@overload(_scale_line, strict=False)
def _(cache: Any, scales: Any, numbers: Any, place: Any) -> Any:
    def scaled(cache, scales, numbers, place):
        first = place // SCALE_BYTES
        for i in range(LINE):
            numbers[i] *= scales[first + i]

    return scaled if cache.dtype == types.int8 else lambda cache, scales, numbers, place: None


@njit(nogil=True, error_model="numpy", **INNER)
def _fetch(cache, start, count):
    """Prefetch the cache lines of `count` elements. Processors do not prefetch across blocks."""
    for line in range(0, count, LINE_BYTES // cache.itemsize):
        fetch(cache, start + line)


@njit(nogil=True, fastmath=True, error_model="numpy", **INNER)
def _adjust(scores, scored, head, distance):
    """Scale a line of scores for a softmax in powers of two, apply the soft cap and add the bias. `distance` is the
    query's position minus the first key's.
    """
    for i in range(LINE):
        scores[i] *= scored.scale * LOG2_E
    if scored.softcap:
        limit(scores, LINE, scored.softcap * LOG2_E)
    if len(scored.bias):  # heads do not share keys if there is a bias
        for i in range(min(LINE, distance + 1)):
            scores[i] += scored.bias[head, scored.center + distance - i] * LOG2_E


@njit(nogil=True, error_model="numpy", **INNER)
def _add(weights, values, sums, from_values, from_sums, shrink, begin, end, head_dim):
    d = 0
    while d + 4 * LINE <= head_dim:
        add_rows(weights, values, sums, from_values + d, from_sums + d, shrink, begin, end, head_dim, 4, LINE)
        d += 4 * LINE
    while d < head_dim:
        add_rows(weights, values, sums, from_values + d, from_sums + d, shrink, begin, end, head_dim, 1, LINE)
        d += LINE
