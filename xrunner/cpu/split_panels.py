"""Products in float32 of more rows by matrix registers (AMX), which multiply bfloat16: each number is split into three.

Three numbers of eight bits make up one of 24, so that of nine products of parts six keep float32's precision: the
others are less than its rounding. Sums are float32. Matrix registers make six such products in less than half the time
that vector registers take for one in float32. Weights lie as in `panels`, which multiplies fewer rows, and are split
where they are read: slice by slice, for all rows of a chunk.

Source: G. Henry, P. T. P. Tang, A. Heinecke, Leveraging the bfloat16 Artificial Intelligence Datatype For
Higher-Precision Computations (2019).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from torch import Tensor

from xrunner.cpu import amx, panels
from xrunner.cpu.panels import WIDTH
from xrunner.cpu.simd import Emit, address, at, fetch, inlined, int64, pointers
from xrunner.cpu.threads import num_threads

PARTS = 3
PRODUCTS = ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0))
"""Parts of inputs and of weights, so that one of them stays for the next product; the largest come last."""
LEAST_ROWS = 48
"""Fewer are as fast in `panels`, which asks for weights before they are needed."""
SLICE = 64
"""Inputs of a panel whose parts stay in the first-level cache, 12 KiB, together with those of two groups of rows."""
CHUNK_BYTES = 3 * 2**19
"""Of a block's inputs, all parts, of the rows for which a weight is split once: they stay in the second-level cache."""
HALF = 16
"""Rows of a register; sums of twice as many, by WIDTH outputs, stay in registers."""
LINE = 16
"""Weights of a cache line."""
SLICE_STEPS = SLICE // amx.DEPTH


def is_available() -> bool:
    return panels.is_available() and amx.is_available()


def pack(weight: Tensor, *, relu: bool = False) -> panels.Product:
    """As `panels.pack`."""
    laid_out = panels.lay_out(weight, panels.Finish.RELU if relu else panels.Finish.NOTHING)
    of_few, outputs = panels.product_of(laid_out), laid_out.outputs

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) < LEAST_ROWS:
            return of_few(x, bias)
        y = torch.empty(len(x) + HALF - 1, outputs.width)  # whole halves are written
        _run(x.contiguous().numpy(), laid_out.numbers, outputs.bias(bias), y.numpy(), laid_out.block, relu)
        return y[: len(x), : outputs.number].contiguous()

    return product


def _run(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, y: np.ndarray, block: int, relu: bool) -> None:
    count = num_threads()
    if count == 1:
        _multiply_all(x, weight, bias, y, block, relu)
        return
    numba.set_num_threads(count)
    _multiply_shared(x, weight, bias, y, block, relu, count)


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply_all(x: Any, weight: Any, bias: Any, y: Any, block: Any, relu: Any) -> None:
    parts = np.empty(_inputs_size(x, block), dtype=np.uint16)
    for half in range((len(x) + HALF - 1) // HALF):
        _split_inputs(x, half, block, parts)
    _multiply(x, parts, weight, (bias, y), block, relu, (0, y.shape[1] // WIDTH))


@njit(nogil=True, cache=True, parallel=True, error_model="numpy")
def _multiply_shared(x: Any, weight: Any, bias: Any, y: Any, block: Any, relu: Any, num_threads: Any) -> None:
    parts = np.empty(_inputs_size(x, block), dtype=np.uint16)
    for half in prange((len(x) + HALF - 1) // HALF):
        _split_inputs(x, half, block, parts)
    count = y.shape[1] // WIDTH
    for thread in prange(num_threads):
        mine = count * thread // num_threads, count * (thread + 1) // num_threads
        _multiply(x, parts, weight, (bias, y), block, relu, mine)


@njit(nogil=True)
def _num_slices(depth: Any, block: Any) -> Any:
    whole, rest = depth // block, depth % block
    return whole * ((block + SLICE - 1) // SLICE) + (rest + SLICE - 1) // SLICE


@njit(nogil=True)
def _inputs_size(x: Any, block: Any) -> Any:
    """Of all parts: slice by slice, part by part, step by step, in each the rows, 32 inputs each."""
    rows = (len(x) + HALF - 1) // HALF * HALF
    return _num_slices(x.shape[1], block) * PARTS * SLICE * rows


@njit(nogil=True, error_model="numpy")
def _split_inputs(x: Any, half: Any, block: Any, parts: Any) -> None:
    """Of 16 rows."""
    num_rows, depth = x.shape
    padded = (num_rows + HALF - 1) // HALF * HALF
    place = np.int64(0)
    few = np.zeros(amx.DEPTH, dtype=np.float32)
    for begin in range(0, depth, block):
        end = min(begin + block, depth)
        for start in range(begin, end, SLICE):
            stop = min(start + SLICE, end)
            for step in range(SLICE_STEPS):
                first = start + step * amx.DEPTH
                for row in range(half * HALF, (half + 1) * HALF):
                    to = at(parts, place + (step * padded + row) * amx.DEPTH)
                    if row < num_rows and first + amx.DEPTH <= stop:
                        _split_row(at(x, row * depth + first), to, SLICE * padded)
                    elif first < stop:
                        for i in range(amx.DEPTH):
                            few[i] = x[row, first + i] if row < num_rows and first + i < stop else np.float32(0.0)
                        _split_row(at(few, 0), to, SLICE * padded)
            place += PARTS * SLICE * padded


@njit(nogil=True, error_model="numpy")
def _multiply(x: Any, parts: Any, weight: Any, ends: Any, block: Any, relu: Any, mine: Any) -> None:
    """Those outputs that lie in panels from the first to the last of `mine`."""
    bias, y = ends
    num_rows, depth = x.shape
    width, padded = y.shape[1], (num_rows + HALF - 1) // HALF * HALF
    chunk = max(CHUNK_BYTES // (2 * PARTS * min(block, depth)) // (2 * HALF), 2) * 2 * HALF
    memory = np.zeros((PARTS + 1) * SLICE * WIDTH + chunk * WIDTH + HALF, dtype=np.float32)
    first = -address(memory) % 64 // 4
    split, few = at(memory, first), at(memory, first + PARTS * SLICE * WIDTH)
    sums = at(memory, first + (PARTS + 1) * SLICE * WIDTH)
    amx.configure(amx.SHAPES)
    for row in range(0, padded, chunk):
        count = min(chunk, padded - row)
        num_groups = (count + 2 * HALF - 1) // (2 * HALF)
        place = np.int64(0)
        for begin in range(0, depth, block):
            end = min(begin + block, depth)
            for panel in range(mine[0], mine[1]):
                results = at(y, row * width + panel * WIDTH)
                if begin == 0:
                    _copy(at(bias, panel * WIDTH), 0, sums, WIDTH, count, False)
                else:
                    _copy(results, width, sums, WIDTH, count, False)
                inputs = at(parts, place + row * amx.DEPTH)
                for start in range(begin, end, SLICE):
                    source = at(weight, begin * width + (panel * (end - begin) + start - begin) * WIDTH)
                    length = min(SLICE, end - start)
                    steps = (length + amx.DEPTH - 1) // amx.DEPTH
                    if length % amx.DEPTH:
                        for i in range(steps * amx.DEPTH * WIDTH):
                            few[i] = source[i] if i < length * WIDTH else np.float32(0.0)
                        _split_weights(few, split, steps * amx.DEPTH)
                    else:
                        _split_weights(source, split, length)
                    lines = (length * WIDTH // LINE + num_groups - 1) // num_groups  # of the next slice, asked for here
                    for r in range(0, count, 2 * HALF):
                        soon = at(source, length * WIDTH + r // (2 * HALF) * lines * LINE)
                        for line in range(lines):
                            fetch(soon, line * LINE)
                        here, totals = at(inputs, r * amx.DEPTH), at(sums, r * WIDTH)
                        if r + 2 * HALF <= count:
                            _add_products(here, split, totals, padded, WIDTH, steps, 2)
                        else:
                            _add_products(here, split, totals, padded, WIDTH, steps, 1)
                    inputs = at(inputs, PARTS * SLICE * padded)
                _copy(sums, WIDTH, results, width, count, relu and end == depth)
            place += (end - begin + SLICE - 1) // SLICE * PARTS * SLICE * padded
    amx.release()
    memory[0] = np.float32(0.0)  # it is needed up to here


@njit(nogil=True)
def _copy(source: Any, source_stride: Any, target: Any, target_stride: Any, count: Any, relu: Any) -> None:
    """Rows of WIDTH numbers, without those that are negative on demand."""
    least = np.float32(0.0) if relu else np.float32(-np.inf)
    for r in range(count):
        for i in range(WIDTH):
            x = source[r * source_stride + i]
            target[r * target_stride + i] = least if x < least else x  # NaN stays


def _split(emit: Emit, x: ir.Value) -> list[ir.Value]:
    """Bits of three numbers, in the upper halves, that make up x."""
    parts = []
    for _ in range(PARTS - 1):
        part = emit.rounded(x)
        parts.append(part)
        x = emit.builder.fsub(x, part)
    return [*parts, x]


@inlined
def _split_row(typing_context: Any, x: Any, parts: Any, stride: Any) -> Any:
    """Parts of 32 numbers, `stride` elements apart. # float32 [32] -> bfloat16 [PARTS, ..., 32]"""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        x, parts = pointers(context, builder, signature, values, 2)
        emit = Emit(builder, HALF)
        halves = ir.VectorType(ir.IntType(16), HALF)
        for i in range(amx.DEPTH // HALF):
            for number, part in enumerate(_split(emit, emit.load(x, int64(i)))):
                place = builder.gep(parts, [builder.mul(values[2], int64(number))])
                place = builder.bitcast(builder.gep(place, [int64(HALF * i)]), halves.as_pointer())
                builder.store(emit.upper_halves(part), place, align=2)
        return context.get_dummy_value()

    return types.void(x, parts, types.intp), generate


@inlined
def _split_weights(typing_context: Any, rows: Any, parts: Any, count: Any) -> Any:
    """Parts of inputs' weights, two inputs side by side. # float32 [count, WIDTH] -> pairs [PARTS, SLICE / 2, WIDTH]"""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        rows, parts = pointers(context, builder, signature, values, 2)
        emit = Emit(builder, HALF)
        vectors = WIDTH // HALF
        with cgutils.for_range(builder, builder.sdiv(values[2], int64(2))) as pair:
            first = builder.mul(pair.index, int64(2 * vectors))
            for i in range(vectors):
                even, odd = (emit.load(rows, builder.add(first, int64(i + vectors * odd))) for odd in range(2))
                for number, both in enumerate(zip(_split(emit, even), _split(emit, odd), strict=True)):
                    place = builder.add(builder.mul(pair.index, int64(vectors)), int64(i))
                    place = builder.add(place, int64(number * SLICE // 2 * vectors))
                    emit.store(emit.halves(*both), parts, place)
        return context.get_dummy_value()

    return types.void(rows, parts, types.intp), generate


@inlined
def _add_products(
    typing_context: Any,
    inputs: Any,
    weights: Any,
    sums: Any,
    num_rows: Any,
    width: Any,
    num_steps: Any,
    num_halves: Any,
) -> Any:
    """Add the products of one or two times 16 rows with a slice of a panel to sums, which lie `width` apart."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        inputs, weights, sums = pointers(context, builder, signature, values, 3)
        num_rows, width, num_steps = values[3:6]
        registers = amx.Registers(builder, WIDTH, num_halves.literal_value)
        stride = builder.mul(width, int64(4))
        ends = []
        for i in registers.row_halves:
            for j in registers.halves:
                place = builder.add(builder.mul(width, int64(HALF * i)), int64(HALF * j))
                ends.append((amx.SUMS[i][j], builder.gep(sums, [place])))
        for register, place in ends:
            registers.load(register, place, stride)
        row_step = builder.mul(num_rows, int64(amx.DEPTH))
        with cgutils.for_range(builder, num_steps) as step:
            before: tuple[int | None, int | None] = None, None
            for a, b in PRODUCTS:
                if a != before[0]:
                    part = builder.add(builder.mul(row_step, int64(SLICE_STEPS * a)), builder.mul(row_step, step.index))
                    for i in registers.row_halves:
                        place = builder.gep(inputs, [builder.add(part, int64(HALF * amx.DEPTH * i))])
                        registers.load(amx.ROWS[i], place, int64(2 * amx.DEPTH))
                if b != before[1]:
                    part = builder.add(int64(b * SLICE // 2 * WIDTH), builder.mul(step.index, int64(HALF * WIDTH)))
                    registers.load_lanes(builder.gep(weights, [part]), int64(4 * WIDTH))
                registers.multiply_all()
                before = a, b
        for register, place in ends:
            registers.store(register, place, stride)
        return context.get_dummy_value()

    return types.void(inputs, weights, sums, *[types.intp] * 3, num_halves), generate
