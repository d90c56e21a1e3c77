"""Rows of 16 queries, keys or results turned into lanes and back, as LLVM vector instructions for numba to call.

A square of 16 x 16 numbers is turned by 64 exchanges between pairs of registers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from xrunner.cpu.simd import Emit, inlined, int64, pointers

SQUARE = 16
"""Rows and columns of what is turned at once: elements of the widest register."""


def _quarters(*ends: int) -> list[int]:
    """In each quarter of two registers, these elements of the first (0 to 3) and of the second (4 to 7)."""
    return [4 * quarter + end % 4 + SQUARE * (end // 4) for quarter in range(4) for end in ends]


def _runs(*quarters: int) -> list[int]:
    """These quarters of the first (0 to 3) and of the second register (4 to 7), whole."""
    return [4 * quarter + i for quarter in quarters for i in range(4)]


_EVEN, _ODD = _runs(0, 2, 4, 6), _runs(1, 3, 5, 7)


def turned(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Columns of 16 vectors of 16 elements of 32 bits."""

    def exchange(a: ir.Value, b: ir.Value, mask: list[int]) -> ir.Value:
        return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), SQUARE), mask))

    pairs = []
    for a, b in zip(rows[::2], rows[1::2], strict=True):
        pairs += [exchange(a, b, _quarters(0, 4, 1, 5)), exchange(a, b, _quarters(2, 6, 3, 7))]
    fours = []  # of four rows, in each quarter one column
    for first in range(0, SQUARE, 4):
        for a, b in zip(pairs[first : first + 2], pairs[first + 2 : first + 4], strict=True):
            fours += [exchange(a, b, _quarters(0, 1, 4, 5)), exchange(a, b, _quarters(2, 3, 6, 7))]
    columns: list[Any] = [None] * SQUARE
    for column in range(4):
        for odd, mask in enumerate((_EVEN, _ODD)):
            upper = exchange(fours[column], fours[4 + column], mask)
            lower = exchange(fours[8 + column], fours[12 + column], mask)
            columns[4 * odd + column] = exchange(upper, lower, _EVEN)
            columns[4 * odd + column + 8] = exchange(upper, lower, _ODD)
    return columns


@inlined
def rows_to_lanes(
    typing_context: Any,
    rows: Any,
    places: Any,
    lanes: Any,
    first: Any,
    from_lanes: Any,
    num_vectors: Any,
    stride: Any,
    scale: Any,
) -> Any:
    """Copy 16 rows, whose places begin at the `first`, times a factor: dimension by dimension, `stride` apart."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        rows, places, lanes = pointers(context, builder, signature, values, 3)
        first, start, count, stride = values[3:7]
        emit = Emit(builder, SQUARE)
        factor = emit.fill(values[7])
        with cgutils.for_range(builder, count) as part:
            vectors = []
            for number in range(SQUARE):
                place = builder.load(builder.gep(places, [builder.add(first, int64(number))]))
                row = emit.load(builder.gep(rows, [place]), part.index)
                vectors.append(builder.fmul(row, factor))
            dim = builder.mul(part.index, int64(SQUARE))
            for number, vector in enumerate(turned(builder, vectors)):
                at = builder.add(start, builder.mul(builder.add(dim, int64(number)), stride))
                emit.store(vector, builder.gep(lanes, [at]), int64(0))
        return context.get_dummy_value()

    return types.void(rows, places, lanes, *[types.intp] * 4, types.float32), generate


@inlined
def lanes_to_rows(
    typing_context: Any,
    lanes: Any,
    factors: Any,
    rows: Any,
    places: Any,
    from_lanes: Any,
    from_factors: Any,
    first: Any,
    num_vectors: Any,
    stride: Any,
) -> Any:
    """Copy 16 lanes, each times its factor, into rows whose places begin at the `first`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        lanes, factors, rows, places = pointers(context, builder, signature, values, 4)
        start, from_factors, first, count, stride = values[4:9]
        emit = Emit(builder, SQUARE)
        factor = emit.load(builder.gep(factors, [from_factors]), int64(0))
        with cgutils.for_range(builder, count) as part:
            dim, vectors = builder.mul(part.index, int64(SQUARE)), []
            for number in range(SQUARE):
                at = builder.add(start, builder.mul(builder.add(dim, int64(number)), stride))
                vectors.append(builder.fmul(emit.load(builder.gep(lanes, [at]), int64(0)), factor))
            for number, vector in enumerate(turned(builder, vectors)):
                place = builder.load(builder.gep(places, [builder.add(first, int64(number))]))
                emit.store(vector, builder.gep(rows, [place]), part.index)
        return context.get_dummy_value()

    return types.void(lanes, factors, rows, places, *[types.intp] * 5), generate
