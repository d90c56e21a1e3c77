"""Compute attention for queries that share keys: those of prompts, and those of decodes if several heads share a K/V
head.

Up to 32 queries that read the same K/V head form a tile. They are ordered by token: all heads of one token, then all
heads of the next. Several tiles of one sequence form a span. A span goes over the sequence's keys in pieces, and all
its tiles read a piece before the next. So a piece is converted (to float32, or transposed for matrix registers) only
once per span.

Products are computed in float32 in vector registers (`tiles`). If keys are bfloat16 and the processor has matrix
registers, they are computed in bfloat16 with sums in float32 (`amx`). Each number of a query is then split into two
bfloat16 numbers, with 16 bits of precision together. Weights are rounded to one bfloat16 number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import literally, njit, types
from numba.extending import overload, register_jitable

from xgpt.core.schema import SCALE_BYTES
from xrunner.cpu import amx
from xrunner.cpu.decodes import LINE, LINE_BYTES, LOG2_E, NEVER, limit
from xrunner.cpu.scalars import INNER
from xrunner.cpu.simd import at, fetch, widen
from xrunner.cpu.tiles import add_values, hide, rescale, score_keys, soften

NARROW, WIDE = 16, 32

KEYS_AT_ONCE = {WIDE: 8, NARROW: 16}


class Vectors(NamedTuple):
    """Settings of attention in vector registers: the number of keys in a piece, and the largest number of tiles in a
    span.
    """

    piece: int
    tiles: int = 8


class Matrices(NamedTuple):
    """The same settings for matrix registers. `piece` must be a multiple of `amx.DEPTH`."""

    piece: int
    tiles: int = 8


Way = Vectors | Matrices


def with_piece(way: Way, piece: int) -> Way:
    return way._replace(piece=piece)


@overload(with_piece, strict=False)
def _(way: Any, piece: Any) -> Any:
    if way.instance_class is Matrices:
        return lambda way, piece: Matrices(piece, way.tiles)
    return lambda way, piece: Vectors(piece, way.tiles)


class RowSpan(NamedTuple):
    """Some rows of a sequence. A row is the query of one token and one head of a group. Here and below, arrays are
    pointers (`simd.at`).

    Attributes:
        queries, results: pointers to the query and the result of the sequence's first token in this step and the
            group's first head. Other tokens and heads follow at the given strides, in elements.
        num_tokens: tokens of the sequence in this step.
        first, num_rows: index of the span's first row among the sequence's rows, and the span's number of rows.
    """

    queries: Any
    results: Any
    query_strides: tuple[int, int]
    result_strides: tuple[int, int]
    num_tokens: int
    group: int
    first: int
    num_rows: int


class Context(NamedTuple):
    """The keys and values of one sequence and K/V head. Keys [earliest, length) are visible.

    Attributes:
        cache: pointer to the K/V head in the pool's first block. A value is `to_values` elements after its key.
        scales: the same memory viewed as float32, from which an int8 cache's scales are read.
        stride: number of elements from the start of one block to the start of the next.
    """

    cache: Any
    scales: Any
    table: Any
    block_size: int
    stride: int
    to_values: int
    head_dim: int
    earliest: int
    length: int
    both_ways: bool


class Rules(NamedTuple):
    """The `Scoring` of one K/V head. Its scale and cap are for a softmax in powers of two instead of powers of e. An
    absent cap or window is 0.

    Attributes:
        bias: the head's position bias, indexed by query position minus key position. Only for models whose heads do not
            share keys.
    """

    scale: np.float32
    softcap: np.float32
    window: int
    has_bias: bool
    bias: Any
    has_sinks: bool
    sinks: Any


class ThreadScratch(NamedTuple):
    """Scratch memory of one thread.

    Attributes:
        tiles: queries, sums and softmax state. # float32 [tiles, tile_floats]
        scores: three arrays: a piece's scores, its weights as pairs of bfloat16 numbers, and the factors for earlier
            sums. # float32 [score_floats]
        keys: keys and values of a piece in float32, or transposed values. # float32 [2, piece, head_dim]
        limits: index after the last key that each row sees. # int32 [tiles * WIDE]
        places: index of each row's first element in queries, and in results. # int64 [2, tiles * WIDE]
        key_places: index of the first element of each of the piece's keys, and values. # int64 [2, piece]
        soon: the same in the cache for the next piece's keys. # int64 [piece]
    """

    tiles: Any
    scores: Any
    keys: Any
    limits: Any
    places: Any
    key_places: Any
    soon: Any
    num_tiles: int


def begin_products(way: Any) -> None:
    """Configure this thread's matrix registers, if `way` uses them."""


@overload(begin_products, strict=False)
def _(way: Any) -> Any:
    if way.instance_class is Matrices:
        return lambda way: amx.configure(amx.SHAPES)
    return lambda way: None


def end_products(way: Any) -> None:
    """Release this thread's matrix registers, if `way` uses them."""


@overload(end_products, strict=False)
def _(way: Any) -> Any:
    if way.instance_class is Matrices:
        return lambda way: amx.release()
    return lambda way: None


@register_jitable
def tile_floats(head_dim):
    return (2 * head_dim + 2) * WIDE


@register_jitable
def score_floats(way):
    return (way.piece + way.piece // 2 + 1) * WIDE


@register_jitable
def space_floats(way, num_tiles, head_dim):
    keys = 2 * way.piece * head_dim
    integers = num_tiles * WIDE + 2 * (2 * num_tiles * WIDE + 3 * way.piece)
    return num_tiles * tile_floats(head_dim) + score_floats(way) + keys + integers


@njit(nogil=True, **INNER)
def make_space(way, num_tiles, head_dim, memory):
    scores = num_tiles * tile_floats(head_dim)
    keys = scores + score_floats(way)
    limits = keys + 2 * way.piece * head_dim
    places = (limits + num_tiles * WIDE) // 2
    return ThreadScratch(
        at(memory, 0),
        at(memory, scores),
        at(memory, keys),
        at(memory.view(np.int32), limits),
        at(memory.view(np.int64), places),
        at(memory.view(np.int64), places + 2 * num_tiles * WIDE),
        at(memory.view(np.int64), places + 2 * num_tiles * WIDE + 2 * way.piece),
        num_tiles,
    )


@njit(nogil=True, error_model="numpy", **INNER)
def attend(way, span, context, rules, space):
    group, first, num_rows = span.group, span.first, span.num_rows
    limits, places, results = space.limits, space.places, at(space.places, space.num_tiles * WIDE)
    num_tiles = (num_rows + WIDE - 1) // WIDE
    for r in range(num_tiles * WIDE):
        row = first + min(r, num_rows - 1)  # unused lanes repeat the last row
        token, head = row // group, row % group
        limits[r] = context.length if context.both_ways else context.length - span.num_tokens + token + 1
        places[r] = token * span.query_strides[0] + head * span.query_strides[1]
        results[r] = token * span.result_strides[0] + head * span.result_strides[1]
    for tile in range(num_tiles):
        if num_rows - tile * WIDE > NARROW:
            _begin_tile(way, span.queries, context.head_dim, rules.scale, space, tile, WIDE)
        else:
            _begin_tile(way, span.queries, context.head_dim, rules.scale, space, tile, NARROW)

    visible, earliest = limits[num_rows - 1], context.earliest
    if rules.window:
        earliest = max(earliest, limits[0] - rules.window)
    begin = earliest // context.block_size * context.block_size
    num_soon = place_keys(context, begin, visible, way.piece, space.soon)
    for before in range(begin, visible, way.piece):
        num_held = num_soon
        for t in range(num_held):
            space.key_places[t] = space.soon[t]
        num_soon = place_keys(context, before + way.piece, visible, way.piece, space.soon)
        _prepare(way, context, space, before, num_held, max(earliest - before, 0), visible - before)
        for tile in range(num_tiles):
            asks_for = num_soon if tile == num_tiles - 1 else 0  # no other row sees more keys than the last row
            if num_rows - tile * WIDE > NARROW:
                _pass(way, context, rules, space, span, (tile, before, num_held, asks_for), WIDE)
            else:
                _pass(way, context, rules, space, span, (tile, before, num_held, asks_for), NARROW)

    for tile in range(num_tiles):
        if num_rows - tile * WIDE > NARROW:
            _end_tile(way, span, context.head_dim, rules, space, tile, WIDE)
        else:
            _end_tile(way, span, context.head_dim, rules, space, tile, NARROW)


@njit(nogil=True, error_model="numpy", **INNER)
def place_keys(context, begin, end, most, places):
    """Write the cache positions of keys into `places`, from key `begin` on. They end with the block that contains key
    `end - 1`, or after `most` keys. Return their number.
    """
    block_size = context.block_size
    count = min(most, max((end + block_size - 1) // block_size * block_size - begin, 0))
    t, block, offset = 0, begin // block_size, begin % block_size
    while t < count:
        start = context.table[block] * context.stride
        for _ in range(min(block_size - offset, count - t)):
            places[t] = start + offset * context.head_dim
            t, offset = t + 1, offset + 1
        block, offset = block + 1, 0
    return count


def ask(context: Context, places: np.ndarray, begin: int, end: int, behind: int) -> None:
    """Prefetch the vectors that begin `behind` elements after places [begin, end). Processors do not prefetch across
    blocks.
    """


@overload(ask, strict=False)
def _(context: Any, places: Any, begin: Any, end: Any, behind: Any) -> Any:
    per_line = LINE_BYTES * 8 // _kept_as(context).bitwidth

    def asked(context, places, begin, end, behind):
        for t in range(begin, end):
            start = places[t] + behind
            for line in range(start, start + context.head_dim, per_line):
                fetch(context.cache, line)

    return asked


@njit(nogil=True, error_model="numpy", **INNER)
def _tile(space, tile, head_dim, lanes):
    first, size = tile * tile_floats(head_dim), head_dim * lanes
    state = first + 2 * size
    tiles = space.tiles
    return at(tiles, first), at(tiles, first + size), at(tiles, state), at(tiles, state + lanes)


@njit(nogil=True, error_model="numpy", **INNER)
def _begin_tile(way, rows, head_dim, scale, space, tile, lanes):
    literally(lanes)
    queries, sums, highest, total = _tile(space, tile, head_dim, lanes)
    places = at(space.places, tile * WIDE)
    for r in range(lanes):
        row = at(rows, places[r])
        for d in range(head_dim):
            queries[d * lanes + r] = row[d] * scale
    _pair_queries(way, queries, sums, head_dim, lanes)
    for i in range(head_dim * lanes):
        sums[i] = np.float32(0.0)
    for r in range(lanes):
        highest[r] = NEVER
        total[r] = np.float32(0.0)


@njit(nogil=True, error_model="numpy", **INNER)
def _end_tile(way, span, head_dim, rules, space, tile, lanes):
    literally(lanes)
    _, sums, highest, total = _tile(space, tile, head_dim, lanes)
    rows, places = span.results, at(space.places, (space.num_tiles + tile) * WIDE)
    for r in range(lanes):
        if rules.has_sinks:
            head = (span.first + min(tile * WIDE + r, span.num_rows - 1)) % span.group
            # Infinite if the attention sink has all the weight.
            total[r] += np.float32(2.0) ** (rules.sinks[head] * LOG2_E - highest[r])
        total[r] = np.float32(1.0) / total[r]
    for r in range(lanes):
        row = at(rows, places[r])
        for d in range(head_dim):
            row[d] = sums[d * lanes + r] * total[r]


@njit(nogil=True, error_model="numpy", **INNER)
def _pass(way, context, rules, space, span, piece, lanes):
    """Compute the attention of a tile's queries over a piece of keys.

    Args:
        piece: four numbers: the tile, the index of the piece's first key in the sequence, the number of keys in the
            piece, and the number of the next piece's keys to prefetch, together with their values.
    """
    literally(lanes)
    tile, before, num_held, asks_for = piece
    limits, scores, window = at(space.limits, tile * WIDE), space.scores, rules.window
    visible, earliest = limits[lanes - 1], context.earliest
    if window:
        earliest = max(earliest, limits[0] - window)
    begin, end = max(earliest - before, 0), min(visible - before, num_held)
    if begin >= end:
        return
    _score(way, context, space, tile, begin, end, (num_held, asks_for), lanes)
    if rules.softcap:
        limit(at(scores, begin * lanes), (end - begin) * lanes, rules.softcap)
    if rules.has_bias:  # rows are tokens
        row, last = span.first + tile * WIDE, span.num_rows - tile * WIDE - 1
        place = context.length - span.num_tokens + row - before
        for t in range(begin, end):
            for r in range(lanes):
                scores[t * lanes + r] += rules.bias[place - t + min(r, last)] * LOG2_E
    # In a row that has no visible key so far, hidden keys count at first. The row's first visible key then reduces
    # their weights to zero.
    if window:
        hide(scores, limits, before, begin, end, window, lanes)
    elif before + end > limits[0]:
        hide(scores, limits, before, max(begin, limits[0] - before), end, visible, lanes)
    _add(way, context, space, tile, begin, end, asks_for, lanes)


def _pair_queries(way: Any, queries: np.ndarray, scratch: np.ndarray, head_dim: int, lanes: int) -> None:
    """Split each number of a tile's queries into two bfloat16 numbers, if products are in bfloat16."""


@overload(_pair_queries, strict=False, prefer_literal=True)
def _(way: Any, queries: Any, scratch: Any, head_dim: Any, lanes: Any) -> Any:
    if not isinstance(lanes, types.IntegerLiteral):
        return lambda way, queries, scratch, head_dim, lanes: literally(lanes)
    num_lanes = lanes.literal_value

    def kept(way, queries, scratch, head_dim, lanes):
        pass

    def paired(way, queries, scratch, head_dim, lanes):
        for i in range(head_dim * num_lanes):
            scratch[i] = queries[i]
        amx.pair_rows(scratch, queries, head_dim, num_lanes)

    return paired if way.instance_class is Matrices else kept


def _prepare(
    way: Any, context: Context, space: ThreadScratch, before: int, num_held: int, begin: int, end: int
) -> None:
    """Convert a piece's keys and values to the format of the products. The result is undefined for keys outside [begin,
    end).
    """


@overload(_prepare, strict=False)
def _(way: Any, context: Any, space: Any, before: Any, num_held: Any, begin: Any, end: Any) -> Any:
    def found(way, context, space, before, num_held, begin, end):
        values = at(space.key_places, way.piece)
        for t in range(num_held):
            values[t] = space.key_places[t] + context.to_values

    def widened(way, context, space, before, num_held, begin, end):
        head_dim = context.head_dim
        vectors = head_dim // LINE
        for half in range(2):
            for t in range(num_held):
                room = (half * way.piece + t) * head_dim
                start = space.key_places[t] + half * context.to_values - room
                widen(context.cache, space.keys, start, room, vectors, LINE)
                widen(context.cache, space.keys, start, room + vectors * LINE, head_dim - vectors * LINE, 1)
        _scale(context, space, way.piece, before, num_held)
        for half in range(2):
            places = at(space.key_places, half * way.piece)
            for t in range(num_held):
                places[t] = (half * way.piece + t) * head_dim

    def turned(way, context, space, before, num_held, begin, end):
        keys, values = space.key_places, at(space.key_places, way.piece)
        for t in range(num_held):
            values[t] = keys[t] + context.to_values
        for t in range(num_held, (num_held + amx.DEPTH - 1) // amx.DEPTH * amx.DEPTH):
            keys[t], values[t] = keys[0], values[0]
        for t in range(0, num_held, amx.DEPTH):
            amx.turn_values(context.cache, values, space.keys, t, begin, min(end, num_held), context.head_dim)

    if _multiplies_halves(way):
        return turned
    return found if _is_wide(context) else widened


def _scale(context: Context, space: ThreadScratch, piece: int, before: int, num_held: int) -> None:
    """Multiply the converted keys and values of a piece by their scales. Do nothing if the cache has no scales."""


@overload(_scale, strict=False)
def _(context: Any, space: Any, piece: Any, before: Any, num_held: Any) -> Any:
    def scaled(context, space, piece, before, num_held):
        block_size, head_dim = context.block_size, context.head_dim
        for half in range(2):
            for t in range(num_held):
                block, offset = (before + t) // block_size, (before + t) % block_size
                start = context.table[block] * context.stride + half * context.to_values + block_size * head_dim
                factor, room = context.scales[start // SCALE_BYTES + offset], (half * piece + t) * head_dim
                for d in range(room, room + head_dim):
                    space.keys[d] *= factor

    return scaled if _kept_as(context) == types.int8 else lambda context, space, piece, before, num_held: None


def _multiplies_halves(way: Any) -> bool:
    return way.instance_class is Matrices


def _is_wide(context: Any) -> bool:
    return _kept_as(context) == types.float32


def _kept_as(context: Any) -> Any:
    return context.types[Context._fields.index("cache")].dtype


def _score(
    way: Any,
    context: Context,
    space: ThreadScratch,
    tile: int,
    begin: int,
    end: int,
    bounds: tuple[int, int],
    lanes: int,
) -> None:
    """Compute the scores of a tile's queries and keys [begin, end) of a piece. Keys next to these may be scored,
    too.
    """


@overload(_score, strict=False, prefer_literal=True)
def _(way: Any, context: Any, space: Any, tile: Any, begin: Any, end: Any, num_kept: Any, lanes: Any) -> Any:
    if not isinstance(lanes, types.IntegerLiteral):
        return lambda way, context, space, tile, begin, end, num_held, lanes: literally(lanes)
    num_lanes = lanes.literal_value
    at_once = KEYS_AT_ONCE[num_lanes]

    def vectors(way, context, space, tile, begin, end, bounds, lanes):
        queries, head_dim = _tile(space, tile, context.head_dim, num_lanes)[0], context.head_dim
        keys, places, scores = _read(context, space), space.key_places, space.scores
        num_held, asks_for = bounds
        t, asked = begin // at_once * at_once, 0
        while t < end:
            if t + at_once <= num_held and _is_one_run(at(places, t), at_once, head_dim):
                score_keys(queries, keys, scores, places[t], t * num_lanes, head_dim, at_once, num_lanes)
                t += at_once
            else:
                score_keys(queries, keys, scores, places[t], t * num_lanes, head_dim, 1, num_lanes)
                t += 1
            ask(context, space.soon, asked, min(t, asks_for), 0)
            asked = t
        ask(context, space.soon, asked, asks_for, 0)

    def matrices(way, context, space, tile, begin, end, bounds, lanes):
        queries, places = _tile(space, tile, context.head_dim, num_lanes)[0], space.key_places
        asks_for, asked = bounds[1], 0
        for t in range(begin // amx.DEPTH * amx.DEPTH, end, amx.DEPTH):
            first, later = places[t], places[t + amx.SQUARE]
            scores = at(space.scores, t * num_lanes)
            amx.score_keys(queries, context.cache, scores, first, later, context.head_dim, num_lanes)
            ask(context, space.soon, asked, min(t + amx.DEPTH, asks_for), 0)
            asked = t + amx.DEPTH
        ask(context, space.soon, asked, asks_for, 0)

    return matrices if _multiplies_halves(way) else vectors


@njit(nogil=True, **INNER)
def _is_one_run(places, count, stride):
    steps = 0
    for i in range(1, count):
        steps += places[i] - places[i - 1] == stride
    return steps == count - 1


def _read(context: Any, space: Any) -> Any:
    """Return the memory that holds a piece's keys and values in float32: the cache itself, or scratch memory."""


@overload(_read, strict=False)
def _(context: Any, space: Any) -> Any:
    return (lambda context, space: context.cache) if _is_wide(context) else (lambda context, space: space.keys)


def _add(
    way: Any, context: Context, space: ThreadScratch, tile: int, begin: int, end: int, asks_for: int, lanes: int
) -> None:
    """Add values [begin, end) of a piece to a tile's sums, weighted by the softmax of the scores."""


@overload(_add, strict=False, prefer_literal=True)
def _(way: Any, context: Any, space: Any, tile: Any, begin: Any, end: Any, asks_for: Any, lanes: Any) -> Any:
    if not isinstance(lanes, types.IntegerLiteral):
        return lambda way, context, space, tile, begin, end, asks_for, lanes: literally(lanes)
    num_lanes = lanes.literal_value
    at_once = KEYS_AT_ONCE[num_lanes]

    def vectors(way, context, space, tile, begin, end, asks_for, lanes):
        _, sums, highest, total = _tile(space, tile, context.head_dim, num_lanes)
        values, places, scores = _read(context, space), at(space.key_places, way.piece), space.scores
        shrink = at(scores, way.piece * (WIDE + WIDE // 2))
        n = end - begin
        soften(scores, highest, total, shrink, begin, n, num_lanes)
        d = 0
        while d + at_once <= context.head_dim:
            add_values(scores, shrink, values, places, sums, begin, d, d * num_lanes, n, at_once, num_lanes)
            _ask_values(context, space, asks_for, d, d + at_once)
            d += at_once
        while d < context.head_dim:
            add_values(scores, shrink, values, places, sums, begin, d, d * num_lanes, n, 1, num_lanes)
            _ask_values(context, space, asks_for, d, d + 1)
            d += 1

    def matrices(way, context, space, tile, begin, end, asks_for, lanes):
        _, sums, highest, total = _tile(space, tile, context.head_dim, num_lanes)
        scores, pairs, head_dim = space.scores, at(space.scores, way.piece * WIDE), context.head_dim
        shrink = at(scores, way.piece * (WIDE + WIDE // 2))
        first = begin // amx.DEPTH * amx.DEPTH
        behind = (end + amx.DEPTH - 1) // amx.DEPTH * amx.DEPTH
        for i in range(first * num_lanes, begin * num_lanes):
            scores[i] = NEVER
        for i in range(end * num_lanes, behind * num_lanes):
            scores[i] = NEVER
        amx.soften(scores, pairs, highest, total, shrink, first, behind - first, num_lanes)
        rescale(sums, shrink, head_dim, num_lanes)
        for d in range(0, head_dim, amx.DEPTH):
            place = 2 * first * head_dim + 2 * d * amx.DEPTH  # bytes
            steps = (behind - first) // amx.DEPTH
            amx.add_values(pairs, space.keys, at(sums, d * num_lanes), place, steps, head_dim, num_lanes)
            _ask_values(context, space, asks_for, d, d + amx.DEPTH)

    return matrices if _multiplies_halves(way) else vectors


@njit(nogil=True, error_model="numpy", **INNER)
def _ask_values(context, space, count, first, last):
    begin, end = count * first // context.head_dim, count * last // context.head_dim
    ask(context, space.soon, begin, end, context.to_values)
