"""Products in float32 of more rows with an eighth fewer multiplications: seven products of halves instead of eight.

Rows, inputs and outputs are cut in halves; sums of halves are multiplied, and sums of these products are the result.
The halves of outputs are neighbouring panels, so that all seven products of a pair of panels end in one core's cache:
weights lie as in `panels`, which multiplies fewer rows, and sums of them are made as they are read.

A sum takes over the rounding of its larger part. So rows, and the outputs of a pair of panels, are brought to a like
size before they are added, by powers of two, which round nothing: the error of a result is bounded, as in a plain
product, by its own row and its own weights, though by the largest number of each instead of term by term. Rows of which
one is not finite are multiplied in panels, so that no other row is touched by it.

Sources: V. Strassen, Gaussian Elimination is not Optimal (1969); J. Huang et al., Strassen's Algorithm Reloaded (2016),
for sums that are made while blocks are packed; G. Ballard et al., Improving the Numerical Stability of Fast Matrix
Multiplication (2016), for the scaling.
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

from xrunner.cpu import panels
from xrunner.cpu.panels import (
    BEGIN,
    GROUP,
    REST,
    SOON,
    SOON_LINES,
    STEPS,
    TURNS,
    WEIGHT,
    WIDTH,
    X_STRIDE,
    Y_STRIDE,
    Finish,
    X,
    Y,
    apply_gates,
    multiply_float32,
)
from xrunner.cpu.quantised import largest_bits, number
from xrunner.cpu.simd import Emit, address, at, inlined, int64, pointers
from xrunner.cpu.threads import num_threads

LEAST_ROWS = 96
"""Fewer are as fast in `panels`: sums of weights take as long however few rows pass them."""
CHUNK = 264
"""Rows that pass a pair of panels at once, half of them in each product."""
PRODUCTS = 7
"""M1 to M7 of halves (numbers as in Strassen's paper), where the right panel's weights are scaled but in M5."""
WRITTEN = 5
"""Sums of weights that are written down: of M1, M3, M4, M6 and M7; M2 and M5 take halves of panels as they are."""
LINES_AHEAD = 2
"""Cache lines of the next pair of panels that a turn of the inner loop asks for, until all have been."""
LEFT, RIGHT = 1, 4
"""Which products these two are, counted from zero."""
LANES = 16
VECTORS = WIDTH // LANES
MOST_EXPONENT = 60
"""Of a factor between two outputs' weights."""
MANTISSA_BITS, EXPONENT_BIAS = 23, 127

_RELU, _GATE = int(Finish.RELU), int(Finish.GATE)


def pack(weight: Tensor, finish: Finish = Finish.NOTHING) -> panels.Product:
    """As `panels.pack`; inputs that cannot be halved, and weights that are not finite, are multiplied there."""
    laid_out = panels.lay_out(weight, finish, together=1 if finish is Finish.GATE else 2)
    plain, outputs = panels.product_of(laid_out), laid_out.outputs
    largest = weight.abs().amax(dim=1)
    if weight.shape[1] % 2 or not largest.isfinite().all():
        return plain
    factors = _factors(outputs.in_panels(largest)).numpy()

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) < LEAST_ROWS:
            return plain(x, bias)
        x = x.contiguous()
        sizes = np.empty((len(x), 2), dtype=np.float32)
        if not _measure_rows(x.view(torch.int32).numpy(), sizes):
            return plain(x, bias)
        y = torch.empty(len(x), outputs.width)
        of = laid_out.numbers, outputs.bias(bias), factors
        _run((x.numpy(), sizes), of, y.numpy(), laid_out.block, int(finish))
        return y[:, : outputs.number].contiguous()

    return product


def _factors(largest: Tensor) -> Tensor:
    """The powers of two that bring the right panels' weights to the size of their neighbours on the left.

    Args:
        largest: weight of each output. # [panels * WIDTH]

    Returns:
        float32 [pairs of panels * WIDTH].
    """
    # Weights that are all zero count as far smaller than any others: next to nothing of their neighbours is left there.
    exponents = torch.frexp(largest).exponent.where(largest > 0, torch.full_like(largest, -(10**6), dtype=torch.int32))
    left, right = exponents.view(-1, 2, WIDTH).unbind(1)
    return torch.ldexp(torch.ones(left.shape), (left - right).clamp(-MOST_EXPONENT, MOST_EXPONENT)).flatten()


def _run(rows: tuple[np.ndarray, np.ndarray], of: Any, y: np.ndarray, block: int, finish: int) -> None:
    """# rows: inputs, and sizes as `_measure_rows` writes them; of: panels, bias, factors"""
    count = num_threads()
    if count == 1:
        _multiply_all(rows, of, y, block, finish)
        return
    numba.set_num_threads(count)
    _multiply_shared(rows, of, y, block, finish, count)


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply_all(rows: Any, of: Any, y: Any, block: Any, finish: Any) -> None:
    _multiply(rows, of, y, block, finish, 0, len(of[1]) // WIDTH // 2)


@njit(nogil=True, cache=True, parallel=True, error_model="numpy")
def _multiply_shared(rows: Any, of: Any, y: Any, block: Any, finish: Any, num_threads: Any) -> None:
    num_pairs = len(of[1]) // WIDTH // 2
    for thread in prange(num_threads):
        first, last = num_pairs * thread // num_threads, num_pairs * (thread + 1) // num_threads
        _multiply(rows, of, y, block, finish, first, last)


@njit(nogil=True, cache=True, error_model="numpy")
def _measure_rows(bits: Any, sizes: Any) -> Any:
    """Find for each row the power of two that its largest number is between 1 and 2 of, and its inverse.

    Args:
        bits: of float32, as int32 [rows, in].
        sizes: the power's inverse, and the power. # [rows, 2]

    Returns:
        Whether all rows are finite.
    """
    for i in range(len(bits)):
        exponent = max(np.int64(largest_bits(bits[i])) >> MANTISSA_BITS, np.int64(1))
        if exponent >= 2 * EXPONENT_BIAS:
            return False
        sizes[i, 0] = number((2 * EXPONENT_BIAS - exponent) << MANTISSA_BITS)
        sizes[i, 1] = number(exponent << MANTISSA_BITS)
    return True


@njit(nogil=True, error_model="numpy")
def _multiply(rows: Any, of: Any, y: Any, block: Any, finish: Any, first: Any, last: Any) -> None:
    """Multiply with the pairs of panels from `first` to `last`: chunk by chunk of the rows, block by block of inputs.

    Each thread sums rows up by itself: that is quick, and waiting for others' sums is not.
    """
    x, sizes = rows
    num_rows, depth = x.shape
    num_chunks = (num_rows + CHUNK - 1) // CHUNK
    most = (num_rows + num_chunks - 1) // num_chunks
    half, wide = (most + 1) // 2, min(block, depth) // 2
    operands = np.empty(PRODUCTS * half * wide, dtype=np.float32)
    scratch = np.empty(WRITTEN * wide * WIDTH + (PRODUCTS + 2) * half * WIDTH + LANES, dtype=np.float32)
    waits = finish == _GATE and depth > block  # gates are applied when all blocks have been multiplied
    waiting = np.empty((most if waits else 0, (last - first) * 2 * WIDTH), dtype=np.float32)
    for chunk in range(num_chunks):
        row, end_row = num_rows * chunk // num_chunks, num_rows * (chunk + 1) // num_chunks
        x_here, sizes_here, y_here = x[row:end_row], sizes[row:end_row], y[row:end_row]
        results = waiting if finish == _GATE else y_here, y_here
        for start in range(0, depth, block):
            inputs = start, min(start + block, depth), depth
            _combine_rows(x_here, sizes_here, inputs, operands)
            _multiply_block(operands, sizes_here, of, results, inputs, finish, (first, last), scratch)


@njit(nogil=True, error_model="numpy")
def _combine_rows(x: Any, sizes: Any, inputs: Any, operands: Any) -> None:
    """Write what the products multiply of the rows, for a block of inputs.

    Args:
        operands: # [PRODUCTS, rows of a half, half of the block's inputs]
    """
    num_rows, depth = x.shape
    half, wide = (num_rows + 1) // 2, (inputs[1] - inputs[0]) // 2
    step = half * wide
    for i in range(half):
        below = half + i if half + i < num_rows else i
        upper = sizes[i, 0]
        lower = sizes[below, 0] if below != i else np.float32(0.0)  # of an odd number of rows the last is alone
        x11, x21 = at(x, i * depth + inputs[0]), at(x, below * depth + inputs[0])
        x12, x22 = at(x11, wide), at(x21, wide)
        m1, m2, m3 = at(operands, i * wide), at(operands, step + i * wide), at(operands, 2 * step + i * wide)
        m4, m5 = at(operands, 3 * step + i * wide), at(operands, 4 * step + i * wide)
        m6, m7 = at(operands, 5 * step + i * wide), at(operands, 6 * step + i * wide)
        for d in range(wide):
            a11, a12, a21, a22 = x11[d] * upper, x12[d] * upper, x21[d] * lower, x22[d] * lower
            m1[d], m2[d], m3[d], m4[d] = a11 + a22, a21 + a22, a11, a22
            m5[d], m6[d], m7[d] = a11 + a12, a21 - a11, a12 - a22


@njit(nogil=True, error_model="numpy")
def _multiply_block(
    operands: Any, sizes: Any, of: Any, results: Any, inputs: Any, finish: Any, pairs: Any, scratch: Any
) -> None:
    """Multiply a block of inputs with some pairs of panels."""
    panels, bias, factors = of
    start, end, depth = inputs
    half, wide = (len(sizes) + 1) // 2, (end - start) // 2
    num_groups, turns, quarter = (half + GROUP - 1) // GROUP, wide // STEPS, wide * WIDTH
    weights = at(scratch, -address(scratch) % 64 // 4)
    products = at(weights, WRITTEN * quarter)
    nothing, arguments = np.zeros(WIDTH, dtype=np.float32), np.zeros(12, dtype=np.int64)
    arguments[X_STRIDE], arguments[Y_STRIDE], arguments[BEGIN] = 4 * wide, 4 * WIDTH, address(nothing)
    arguments[TURNS], arguments[REST] = turns, wide % STEPS
    for pair in range(pairs[0], pairs[1]):
        panel = at(panels, start * len(bias) + pair * 4 * quarter)
        of_right = at(factors, pair * WIDTH)
        _combine_weights(panel, of_right, weights, wide)
        arguments[SOON] = address(panel) + 16 * quarter
        until = arguments[SOON] + 16 * quarter
        written = address(weights)
        for product in range(PRODUCTS):
            if product == LEFT:
                arguments[WEIGHT] = address(panel)
            elif product == RIGHT:
                arguments[WEIGHT] = address(panel) + 12 * quarter
            else:
                arguments[WEIGHT] = written
                written += 4 * quarter
            for group in range(num_groups):
                begin, stop = half * group // num_groups, half * (group + 1) // num_groups
                arguments[X] = address(operands) + 4 * wide * (product * half + begin)
                arguments[Y] = address(products) + 4 * WIDTH * (product * half + begin)
                arguments[SOON_LINES] = LINES_AHEAD if arguments[SOON] < until else 0
                multiply_float32(arguments, stop - begin)
                arguments[SOON] += 64 * LINES_AHEAD * turns
        column = (pair - pairs[0] if finish == _GATE else pair) * 2 * WIDTH
        of_outputs = of_right, at(bias, pair * 2 * WIDTH), column, pair * WIDTH
        _finish(products, sizes, of_outputs, results, (start == 0, end == depth), finish)
    nothing[0] = np.float32(0.0)  # it is needed up to here


@njit(nogil=True, error_model="numpy")
def _finish(products: Any, sizes: Any, of_outputs: Any, results: Any, is_end: Any, finish: Any) -> None:
    """Sum the products of a pair of panels up, add what came before, and finish sums with the last block's.

    Args:
        of_outputs: factors of the right panel, bias, and the columns of sums and of what gates leave.
        results: sums, which are the results where nothing is gated, and the results.
        is_end: whether this block is the first, and whether it is the last.
    """
    factors, bias, column, gated_column = of_outputs
    sums, y = results
    half, width = (len(y) + 1) // 2, sums.shape[1]
    for part in range(2):
        row, count = part * half, half if part == 0 else len(y) - half
        sizes_of_rows, here = at(sizes, 2 * row), at(sums, row * width + column)
        before, stride = (bias, 0) if is_end[0] else (here, width)
        is_gated = finish == _GATE and is_end[1]
        gates = at(products, PRODUCTS * half * WIDTH)
        end, end_stride = (gates, 2 * WIDTH) if is_gated else (here, width)
        least = np.float32(0.0) if finish == _RELU and is_end[1] else np.float32(-np.inf)
        if part == 0:
            _sum_upper(products, factors, sizes_of_rows, before, end, half, count, stride, end_stride, least)
        else:
            _sum_lower(products, factors, sizes_of_rows, before, end, half, count, stride, end_stride, least)
        if is_gated:
            apply_gates(gates, 2 * WIDTH, count, at(y, row * y.shape[1] + gated_column), y.shape[1])


@inlined
def _combine_weights(typing_context: Any, panel: Any, factors: Any, sums: Any, count: Any) -> Any:
    """Write sums of the quarters of a pair of panels.

    Args:
        panel: the first; the second lies behind it. # float32 [2, 2 * count, WIDTH]
        factors: of the second panel's outputs. # [WIDTH]
        sums: # [WRITTEN, count, WIDTH]
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        panel, factors, sums = pointers(context, builder, signature, values, 3)
        emit, quarter = Emit(builder, LANES), builder.mul(values[3], int64(VECTORS))
        places = [builder.mul(quarter, int64(number)) for number in range(WRITTEN)]
        of_right = [emit.load(factors, int64(i)) for i in range(VECTORS)]
        with cgutils.for_range(builder, values[3]) as row:
            for i in range(VECTORS):
                here = builder.add(builder.mul(row.index, int64(VECTORS)), int64(i))
                b11, b21, b12, b22 = (emit.load(panel, builder.add(here, place)) for place in places[:4])
                b12, b22 = builder.fmul(b12, of_right[i]), builder.fmul(b22, of_right[i])
                written = (
                    builder.fadd(b11, b22),
                    builder.fsub(b12, b22),
                    builder.fsub(b21, b11),
                    builder.fadd(b11, b12),
                    builder.fadd(b21, b22),
                )
                for value, place in zip(written, places, strict=True):
                    emit.store(value, sums, builder.add(here, place))
        return context.get_dummy_value()

    return types.void(panel, factors, sums, types.intp), generate


def _summing(is_upper: bool) -> Any:
    """What sums products up to the results of the upper or of the lower half of the rows."""

    @inlined
    def sum_rows(
        typing_context: Any,
        products: Any,
        factors: Any,
        sizes: Any,
        before: Any,
        end: Any,
        half: Any,
        num_rows: Any,
        before_stride: Any,
        end_stride: Any,
        least: Any,
    ) -> Any:
        """# products [PRODUCTS, half, WIDTH], sizes [rows, 2]; before and end [rows, stride], 2 * WIDTH of each row"""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
            products, factors, sizes, before, end = pointers(context, builder, signature, values, 5)
            half, num_rows, before_stride, end_stride = values[5:9]
            emit = Emit(builder, LANES)
            least, step = emit.fill(values[9]), builder.mul(half, int64(VECTORS))
            of_right = [emit.load(factors, int64(i)) for i in range(VECTORS)]
            inverse = [builder.fdiv(emit.constant(1.0), factor) for factor in of_right]
            with cgutils.for_range(builder, num_rows) as row:
                power = builder.add(builder.mul(row.index, int64(2)), int64(1))
                size = emit.fill(builder.load(builder.gep(sizes, [power])))
                first = builder.gep(before, [builder.mul(row.index, before_stride)])
                last = builder.gep(end, [builder.mul(row.index, end_stride)])
                for i in range(VECTORS):
                    place = builder.add(builder.mul(row.index, int64(VECTORS)), int64(i))
                    m1, m2, m3, m4, m5, m6, m7 = (
                        emit.load(products, builder.add(place, builder.mul(step, int64(number))))
                        for number in range(PRODUCTS)
                    )
                    if is_upper:
                        left = builder.fsub(builder.fadd(builder.fadd(m1, m4), m7), builder.fmul(m5, of_right[i]))
                        right = builder.fadd(builder.fmul(m3, inverse[i]), m5)
                    else:
                        left = builder.fadd(m2, m4)
                        right = builder.fadd(builder.fsub(m1, m2), builder.fadd(m3, m6))
                        right = builder.fmul(right, inverse[i])
                    for side, total in enumerate((left, right)):
                        number = int64(side * VECTORS + i)
                        total = emit.multiply_add(total, size, emit.load(first, number))
                        is_less = builder.fcmp_ordered("<", total, least)  # NaN stays
                        emit.store(builder.select(is_less, least, total), last, number)
            return context.get_dummy_value()

        arrays = [products, factors, sizes, before, end]
        return types.void(*arrays, *[types.intp] * 4, types.float32), generate

    return sum_rows


_sum_upper, _sum_lower = _summing(True), _summing(False)
