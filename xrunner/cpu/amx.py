"""Multiply bfloat16 numbers in the processor's matrix registers (AMX), with sums in float32. Kernels compiled by numba
call these functions.

A register holds 16 rows of 64 bytes. One instruction multiplies a 16 x 32 matrix by a 32 x 16 matrix. In the second
matrix, two rows are interleaved: element i of an even row is followed by element i of the next row. As in `tiles`, each
lane is a query. Lanes fill one or two registers.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from xrunner.cpu.simd import Emit, inlined, int64, pointers

DEPTH = 32
SQUARE = 16

_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18

SHAPES = np.zeros(64, dtype=np.uint8)
SHAPES[0] = 1
SHAPES[16:32:2] = 64
SHAPES[48:56] = 16

# Numbers of the registers for the sums (of each half of the rows and each half of the lanes), the rows and the lanes.
SUMS, ROWS, LANES = ((0, 1), (2, 3)), (4, 5), (6, 7)


@cache
def is_available(numbers: str = "bf16") -> bool:
    """Return whether the processor has matrix registers and the operating system lets this process use them."""
    features = llvmlite.binding.get_host_cpu_features()
    if platform.system() != "Linux" or platform.machine() not in {"x86_64", "AMD64"}:
        return False
    if not (features.get("amx-tile") and features.get(f"amx-{numbers}") and features.get("avx512f")):
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA) == 0


class Registers:
    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self.builder = builder
        self.halves = range(lanes // SQUARE)

    def call(self, name: str, *arguments: ir.Value) -> None:
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.x86.{name}")
        self.builder.call(function, arguments)

    def load(self, register: int, array: ir.Value, stride: ir.Value) -> None:
        self.call("tileloadd64", _byte(register), self._bytes(array), stride)

    def store(self, register: int, array: ir.Value, stride: ir.Value) -> None:
        self.call("tilestored64", _byte(register), self._bytes(array), stride)

    def zero(self, register: int) -> None:
        self.call("tilezero", _byte(register))

    def multiply_all(self) -> None:
        for i in range(2):
            for half in self.halves:
                self.call("tdpbf16ps", _byte(SUMS[i][half]), _byte(ROWS[i]), _byte(LANES[half]))

    def load_lanes(self, array: ir.Value, stride: ir.Value) -> None:
        for half in self.halves:
            self.load(LANES[half], self.builder.gep(array, [int64(SQUARE * half)]), stride)

    def _bytes(self, array: ir.Value) -> ir.Value:
        return self.builder.bitcast(array, ir.IntType(8).as_pointer())


@inlined
def configure(typing_context: Any, shapes: Any) -> Any:
    """Configure this thread's registers. `shapes` has the operand of ldtilecfg. # uint8 [64]"""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        registers = Registers(builder, 0)
        registers.call("ldtilecfg", registers._bytes(pointers(context, builder, signature, values, 1)[0]))
        return context.get_dummy_value()

    return types.void(shapes), generate


@inlined
def release(typing_context: Any) -> Any:

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        Registers(builder, 0).call("tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@inlined
def pair_rows(typing_context: Any, rows: Any, pairs: Any, count: Any, lanes: Any) -> Any:
    """Round to bfloat16 and interleave pairs of rows. Then do the same to the rounding errors.

    # rows float32 [count, lanes] -> pairs [2, count / 2, lanes]
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        rows, pairs = pointers(context, builder, signature, values, 2)
        emit, num_pairs = Emit(builder, lanes.literal_value), builder.sdiv(values[2], int64(2))
        with cgutils.for_range(builder, num_pairs) as pair:
            twice = builder.mul(pair.index, int64(2))
            both = [emit.load(rows, twice), emit.load(rows, builder.add(twice, int64(1)))]
            emit.store(emit.halves(*both), pairs, pair.index)
            rest = [builder.fsub(row, emit.rounded(row)) for row in both]
            emit.store(emit.halves(*rest), pairs, builder.add(pair.index, num_pairs))
        return context.get_dummy_value()

    return types.void(rows, pairs, types.intp, lanes), generate


@inlined
def score_keys(
    typing_context: Any,
    pairs: Any,
    keys: Any,
    scores: Any,
    from_keys: Any,
    from_later_keys: Any,
    head_dim: Any,
    lanes: Any,
) -> Any:
    """Compute dot products of queries with two groups of 16 keys. `pairs` are queries from `pair_rows`. # -> scores
    [32, lanes]
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        pairs, keys, scores = pointers(context, builder, signature, values, 3)
        places = [builder.gep(keys, [place]) for place in values[3:5]]
        dim, width, registers = values[5], lanes.literal_value, Registers(builder, lanes.literal_value)
        stride = int64(4 * width)
        rest = builder.gep(pairs, [builder.mul(dim, int64(width // 2))])
        for register in (SUMS[i][half] for i in range(2) for half in registers.halves):
            registers.zero(register)
        with cgutils.for_range(builder, builder.sdiv(dim, int64(DEPTH))) as step:
            for register, place in zip(ROWS, places, strict=True):
                at = builder.gep(place, [builder.mul(step.index, int64(DEPTH))])
                registers.load(register, at, builder.mul(dim, int64(2)))
            for part in (pairs, rest):
                at = builder.gep(part, [builder.mul(step.index, int64(SQUARE * width))])
                registers.load_lanes(at, stride)
                registers.multiply_all()
        for i in range(2):
            for half in registers.halves:
                at = builder.gep(scores, [int64(SQUARE * (i * width + half))])
                registers.store(SUMS[i][half], at, stride)
        return context.get_dummy_value()

    return types.void(pairs, keys, scores, *[types.intp] * 3, lanes), generate


@inlined
def add_values(
    typing_context: Any, pairs: Any, values: Any, sums: Any, from_values: Any, num_steps: Any, head_dim: Any, lanes: Any
) -> Any:
    """Add weights^T * values to sums, for 32 dimensions of the values.

    # weights: pairs [16 * num_steps, lanes]; values: from `turn_values`, from byte `from_values` on; sums [32, lanes]
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        pairs, values, sums = pointers(context, builder, signature, arguments, 3)
        values = builder.gep(_halves(builder, values), [builder.sdiv(arguments[3], int64(2))])
        count, dim, width = arguments[4], arguments[5], lanes.literal_value
        registers = Registers(builder, width)
        ends = []
        for i in range(2):
            for half in registers.halves:
                ends.append((SUMS[i][half], builder.gep(sums, [int64(SQUARE * (i * width + half))])))
        for register, place in ends:
            registers.load(register, place, int64(4 * width))
        with cgutils.for_range(builder, count) as step:
            value = builder.gep(values, [builder.mul(step.index, builder.mul(dim, int64(DEPTH)))])
            for i, register in enumerate(ROWS):
                registers.load(register, builder.gep(value, [int64(i * SQUARE * DEPTH)]), int64(2 * DEPTH))
            at = builder.gep(pairs, [builder.mul(step.index, int64(SQUARE * width))])
            registers.load_lanes(at, int64(4 * width))
            registers.multiply_all()
        for register, place in ends:
            registers.store(register, place, int64(4 * width))
        return context.get_dummy_value()

    return types.void(pairs, values, sums, *[types.intp] * 3, lanes), generate


@inlined
def turn_values(
    typing_context: Any, values: Any, places: Any, turned_values: Any, first: Any, begin: Any, end: Any, head_dim: Any
) -> Any:
    """Transpose the values of 32 keys from `first` on. Each row is then a dimension, and 16 rows fill a register.

    Keys outside `begin` to `end` become zero.

    # values bfloat16 as uint16, places int64 [keys] -> turned uint16 [.. head_dim / 16, 16, 32]
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        values, places, turned_values = pointers(context, builder, signature, arguments, 3)
        first, begin, end, dim = arguments[3:7]
        out = builder.gep(_halves(builder, turned_values), [builder.mul(first, dim)])
        halves = ir.VectorType(ir.IntType(16), SQUARE)
        words = ir.VectorType(ir.IntType(32), SQUARE)
        numbers = [builder.add(first, int64(i)) for i in range(DEPTH)]
        rows = [builder.gep(values, [builder.load(builder.gep(places, [number]))]) for number in numbers]
        seen = [
            builder.and_(builder.icmp_signed(">=", number, begin), builder.icmp_signed("<", number, end))
            for number in numbers
        ]
        with cgutils.for_range(builder, builder.sdiv(dim, int64(SQUARE))) as part:
            at = builder.mul(part.index, int64(SQUARE))
            loaded = []
            for row, is_seen in zip(rows, seen, strict=True):
                place = builder.bitcast(builder.gep(row, [at]), halves.as_pointer())
                value = builder.zext(builder.load(place, align=2), words)
                loaded.append(builder.select(is_seen, value, ir.Constant(words, [0] * SQUARE)))
            shift = ir.Constant(words, [16] * SQUARE)
            pairs = [builder.or_(a, builder.shl(b, shift)) for a, b in zip(loaded[::2], loaded[1::2], strict=True)]
            tile = builder.gep(out, [builder.mul(part.index, int64(SQUARE * DEPTH))])
            for i, column in enumerate(_turned(builder, pairs)):
                place = builder.gep(tile, [int64(DEPTH * i)])
                builder.store(column, builder.bitcast(place, words.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(values, places, turned_values, *[types.intp] * 4), generate


@inlined
def soften(
    typing_context: Any,
    scores: Any,
    pairs: Any,
    highest: Any,
    total: Any,
    shrink: Any,
    first: Any,
    num_keys: Any,
    lanes: Any,
) -> Any:
    """Take one step of the online softmax, like `tiles.soften`, but write the weights to `pairs` as bfloat16. The
    number of keys must be even. # -> pairs [keys / 2, lanes]
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        scores, pairs, highest, total, shrink = pointers(context, builder, signature, values, 5)
        start, emit = int64(0), Emit(builder, lanes.literal_value)
        scores = builder.gep(scores, [builder.mul(values[5], int64(emit.lanes))])
        before = emit.load(highest, start)
        num_pairs = builder.sdiv(values[6], int64(2))

        def both(pair: ir.Value) -> list[ir.Value]:
            twice = builder.mul(pair, int64(2))
            return [emit.load(scores, twice), emit.load(scores, builder.add(twice, int64(1)))]

        tops, masses = emit.variables(2), emit.variables(2)
        for top in tops:
            builder.store(before, top)
        with cgutils.for_range(builder, num_pairs) as pair:
            for score, top in zip(both(pair.index), tops, strict=True):
                builder.store(emit.maximum(score, builder.load(top)), top)
        now = emit.maximum(*[builder.load(top) for top in tops])
        factor = emit.exp2(builder.fsub(before, now))
        builder.store(builder.fmul(emit.load(total, start), factor), masses[0])
        with cgutils.for_range(builder, num_pairs) as pair:
            weights = [emit.exp2(builder.fsub(score, now), roughly=True) for score in both(pair.index)]
            emit.store(emit.halves(*weights), pairs, pair.index)
            for weight, mass in zip(weights, masses, strict=True):
                builder.store(builder.fadd(builder.load(mass), weight), mass)
        emit.store(now, highest, start)
        emit.store(factor, shrink, start)
        emit.store(builder.fadd(*[builder.load(mass) for mass in masses]), total, start)
        return context.get_dummy_value()

    return types.void(scores, pairs, highest, total, shrink, types.intp, types.intp, lanes), generate


def _quarters(*ends: int) -> list[int]:
    return [4 * quarter + end % 4 + SQUARE * (end // 4) for quarter in range(4) for end in ends]


def _runs(*quarters: int) -> list[int]:
    return [4 * quarter + i for quarter in quarters for i in range(4)]


_EVEN, _ODD = _runs(0, 2, 4, 6), _runs(1, 3, 5, 7)


def _turned(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    def exchange(a: ir.Value, b: ir.Value, mask: list[int]) -> ir.Value:
        return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), SQUARE), mask))

    pairs = []
    for a, b in zip(rows[::2], rows[1::2], strict=True):
        pairs += [exchange(a, b, _quarters(0, 4, 1, 5)), exchange(a, b, _quarters(2, 6, 3, 7))]
    fours = []  # each quarter has one column of four rows
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


def _halves(builder: ir.IRBuilder, array: ir.Value) -> ir.Value:
    return builder.bitcast(array, ir.IntType(16).as_pointer())


def _byte(value: int) -> ir.Constant:
    return ir.Constant(ir.IntType(8), value)
