"""Triton kernels of `attention` and `fused`. This module needs triton.

One attention kernel serves decodes and prompt chunks. A program computes a tile of queries that read one K/V head. A
row is the query of one token and one head. The program goes over the sequence's blocks with an online softmax in powers
of two. Sources: FlashAttention-2 (arXiv 2307.08691); Flash-Decoding for the split along the context; PagedAttention
(arXiv 2309.06180) for the blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def write_kernel(
    k,
    v,
    cache,
    slots,  # int64 [tokens]
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    value_start,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write a token's keys and values into its slot of the cache. Grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    i = tl.arange(0, WIDTH)
    inside = i < NUM_KV_HEADS * HEAD_DIM
    head, d = i // HEAD_DIM, i % HEAD_DIM
    place = ((slot // BLOCK_SIZE * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM + d
    key = tl.load(k + token * k_token_stride + head * k_head_stride + d, mask=inside)
    value = tl.load(v + token * v_token_stride + head * v_head_stride + d, mask=inside)
    tl.store(cache + place, key, mask=inside)
    tl.store(cache + value_start + place, value, mask=inside)


# These arguments are not specialised: they change with every step, and each combination of divisibility by 16 would
# need another compilation.
@triton.jit(do_not_specialize=["first_sequence", "num_sequences", "splits", "table_stride"])
def attend_kernel(
    q,
    cache,
    out,  # [tokens, heads, HEAD_DIM]
    parts,  # float32 [sequences, heads, splits, HEAD_DIM]; where split
    masses,  # float32 [sequences, heads, splits]: logarithm to base 2 of a split's sum of weights
    query_start,  # int32 [sequences + 1]
    context_len,  # int32 [sequences]
    tables,  # int32 [sequences, table_stride]
    counts,  # int32 [2]: decodes, and all sequences; if captured
    first_sequence,
    num_sequences,
    splits,
    scale,
    q_token_stride,
    q_head_stride,
    value_start,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_DECODE: tl.constexpr,
    IS_CAPTURED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Compute the attention of a tile of queries over one split of the sequence's keys. Grid: tiles, K/V heads, splits.

    The sequences are the decodes (IS_DECODE), or those from `first_sequence` on. In a captured step, the grid is large
    enough for any batch of this size.
    """
    TOKENS: tl.constexpr = 1 if IS_DECODE else ROWS // GROUP
    kv_head, split = tl.program_id(1), tl.program_id(2)
    in_use = splits
    num_tiles = tl.num_programs(0)
    if IS_CAPTURED:
        num_decodes = tl.load(counts)
        if IS_DECODE:
            num_tiles = num_decodes
            if IS_SPLIT:
                in_use = _splits_in_use(num_decodes, splits, NUM_KV_HEADS, PROGRAMS)
        else:
            first_sequence = num_decodes
            num_sequences = tl.load(counts + 1) - num_decodes
            num_tiles = _first_tile(num_sequences, query_start + first_sequence, TOKENS)
    if (tl.program_id(0) >= num_tiles) | (split >= in_use):
        return
    sequence, first = _tile(num_tiles, first_sequence, query_start, num_sequences, TOKENS, IS_DECODE)
    begin_token = tl.load(query_start + sequence)
    num_tokens = tl.load(query_start + sequence + 1) - begin_token
    if first >= num_tokens:
        return
    context = tl.load(context_len + sequence)

    row, d = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    token, head = first + row // GROUP, kv_head * GROUP + row % GROUP
    is_real = (row < TOKENS * GROUP) & (token < num_tokens)
    in_head = d < HEAD_DIM
    is_stored = is_real[:, None] & in_head[None, :]
    at = begin_token.to(tl.int64) + token
    queries = tl.load(
        q + (at * q_token_stride + head * q_head_stride)[:, None] + d[None, :], mask=is_stored, other=0.0
    ).to(DOT)

    limit = context - num_tokens + token + 1  # number of keys that a row sees
    most = tl.minimum(context, context - num_tokens + first + TOKENS)
    begin, end = _share(context, in_use, split, most, KEYS, IS_SPLIT)
    seen_by_all = tl.minimum(end, context - num_tokens + first + 1)
    middle = begin + tl.maximum(seen_by_all - begin, 0) // KEYS * KEYS

    keys = cache + kv_head * (BLOCK_SIZE * HEAD_DIM)
    table = tables + sequence.to(tl.int64) * table_stride
    acc = tl.zeros([ROWS, PADDED_DIM], dtype=tl.float32)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([ROWS], dtype=tl.float32)
    acc, top, mass = _go_over(
        acc, top, mass, queries, keys, value_start, table, begin, middle, limit, most, scale,
        NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, KEYS, DOT, False,
    )  # fmt: skip
    acc, top, mass = _go_over(
        acc, top, mass, queries, keys, value_start, table, middle, end, limit, most, scale,
        NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, KEYS, DOT, True,
    )  # fmt: skip

    total = tl.where(mass == 0.0, 1.0, mass)  # a split without keys adds nothing
    result = acc / total[:, None]
    if IS_SPLIT:
        is_part = in_use > 1
        place = (sequence.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * splits + split
        tl.store(parts + place[:, None] * HEAD_DIM + d[None, :], result, mask=is_stored & is_part)
        tl.store(masses + place, tl.where(mass == 0.0, float("-inf"), top + tl.log2(total)), mask=is_real & is_part)
    place = (at * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
    tl.store(out + place[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=is_stored & (in_use == 1))


@triton.jit
def _go_over(
    acc,
    top,
    mass,
    queries,
    keys,
    value_start,
    table,
    begin,
    end,
    limit,
    most,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    DOT: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Process keys [begin, end): update the sums and the softmax state. Without IS_MASKED, every row must see all these
    keys.
    """
    d = tl.arange(0, PADDED_DIM)
    in_head = d < HEAD_DIM
    for start in range(begin, end, KEYS):
        position = start + tl.arange(0, KEYS)
        inside = position < most
        block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        place = block * (NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM) + position % BLOCK_SIZE * HEAD_DIM
        if IS_MASKED:
            key = tl.load(keys + place[None, :] + d[:, None], mask=in_head[:, None] & inside[None, :], other=0.0)
            value = tl.load(
                keys + value_start + place[:, None] + d[None, :], mask=inside[:, None] & in_head[None, :], other=0.0
            )
        elif HEAD_DIM == PADDED_DIM:
            key = tl.load(keys + place[None, :] + d[:, None])
            value = tl.load(keys + value_start + place[:, None] + d[None, :])
        else:
            key = tl.load(keys + place[None, :] + d[:, None], mask=in_head[:, None], other=0.0)
            value = tl.load(keys + value_start + place[:, None] + d[None, :], mask=in_head[None, :], other=0.0)
        score = tl.dot(queries, key.to(DOT), input_precision="ieee") * scale
        if IS_MASKED:
            score = tl.where(position[None, :] < limit[:, None], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - higher)
        weight = tl.exp2(score - higher[:, None])
        mass = mass * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(DOT), value.to(DOT), acc * shrink[:, None], input_precision="ieee")
        top = higher
    return acc, top, mass


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(
    parts,
    masses,
    out,
    query_start,
    counts,
    splits,
    NUM_KV_HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    IS_CAPTURED: tl.constexpr,
):
    """Combine the results of a decode's splits for one head. Grid: pairs (decode, head), in a captured step for the
    largest number of decodes.
    """
    row = tl.program_id(0).to(tl.int64)
    sequence = row // NUM_HEADS
    in_use = splits
    if IS_CAPTURED:
        num_decodes = tl.load(counts)
        in_use = _splits_in_use(num_decodes, splits, NUM_KV_HEADS, PROGRAMS)
        if (sequence >= num_decodes) | (in_use == 1):  # a decode with one split has its result already
            return
    token = tl.load(query_start + sequence).to(tl.int64)
    split, d = tl.arange(0, MOST_SPLITS), tl.arange(0, PADDED_DIM)
    inside = (split < in_use)[:, None] & (d < HEAD_DIM)[None, :]
    mass = tl.load(masses + row * splits + split, mask=split < in_use, other=float("-inf"))
    highest = tl.max(mass, 0)
    weight = tl.exp2(mass - tl.where(highest == float("-inf"), 0.0, highest))
    part = tl.load(parts + (row * splits + split)[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    total = tl.sum(weight, 0)
    result = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    place = (token * NUM_HEADS + row % NUM_HEADS) * HEAD_DIM
    tl.store(out + place + d, result.to(out.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit
def _tile(num_tiles, first_sequence, query_start, num_sequences, TOKENS: tl.constexpr, IS_DECODE: tl.constexpr):
    """Return the sequence and the first token of a program's tile. A decode has one tile. A prompt chunk has tiles of
    TOKENS tokens. If n tokens precede sequence i, its first tile has number n // TOKENS + i. Some tiles may be empty,
    but the host need not know the lengths.
    """
    if IS_DECODE:
        return first_sequence + tl.program_id(0), 0
    else:
        # Tiles at the end of a prompt see the most keys. They run first, so that none of them runs alone at the end.
        tile = num_tiles - 1 - tl.program_id(0)
        query_starts = query_start + first_sequence
        index = _sequence_of(tile, query_starts, num_sequences, TOKENS)
        return first_sequence + index, (tile - _first_tile(index, query_starts, TOKENS)) * TOKENS


@triton.jit
def _splits_in_use(num_decodes, splits, NUM_KV_HEADS: tl.constexpr, PROGRAMS: tl.constexpr):
    tiles = tl.maximum(num_decodes, 1) * NUM_KV_HEADS
    return tl.minimum(tl.maximum(PROGRAMS // tiles, 1), splits)


@triton.jit
def _share(context, splits, split, most, KEYS: tl.constexpr, IS_SPLIT: tl.constexpr):
    if IS_SPLIT:
        share = tl.cdiv(tl.cdiv(context, splits), KEYS) * KEYS
        return split * share, tl.minimum(split * share + share, most)
    else:
        return 0, most


@triton.jit
def _first_tile(sequence, query_start, TOKENS: tl.constexpr):
    return (tl.load(query_start + sequence) - tl.load(query_start)) // TOKENS + sequence


@triton.jit
def _sequence_of(tile, query_start, num_sequences, TOKENS: tl.constexpr):
    low, high = 0, num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if _first_tile(middle, query_start, TOKENS) <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def rotate_kernel(
    x,
    out,  # [tokens, NUM_HEADS, 2 * HALF]
    positions,  # int64 [tokens]
    frequencies,  # float32 [HALF]
    token_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    """Rotate all heads of a token. Grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, PADDED_HEADS), tl.arange(0, PADDED_HALF)
    inside = (head < NUM_HEADS)[:, None] & (d < HALF)[None, :]
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + d, mask=d < HALF, other=0.0)
    cos, sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
    place = token * token_stride + head[:, None] * head_stride + d[None, :]
    a = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + place + HALF, mask=inside, other=0.0).to(tl.float32)
    place = (token * NUM_HEADS + head[:, None]) * (2 * HALF) + d[None, :]
    tl.store(out + place, (a * cos - b * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(out + place + HALF, (b * cos + a * sin).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(x, out, width, BLOCK: tl.constexpr):
    """Compute silu(first half) * second half for a block of a token's columns. Grid: tokens, blocks of columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + token * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + token * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * width + column, result.to(out.dtype.element_ty), mask=inside)
