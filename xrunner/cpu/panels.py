"""Multiply by a weight while reading it from memory (AVX-512).

MKL and oneDNN alternate between reading weights and multiplying. With 8 to 64 rows, reading and multiplying take about
the same time, so these libraries reach only half of the memory's bandwidth. Here the next slice of weights is
prefetched between this slice's multiplications.

A weight is stored in the order in which it is read: blocks of up to DEEPEST inputs, then panels of WIDTH outputs, then
inputs. An "input" has four bytes: one float32 number, two bfloat16 or four int8 numbers, which one dot-product
instruction multiplies together. For bfloat16 and int8, one call rounds the rows, multiplies them and scales the sums.
The sums of up to GROUP rows by WIDTH outputs stay in registers. A compiler would not keep them there, so the inner loop
is in assembly. A slice of a panel stays in a cache while all groups of rows are multiplied by it. A block of the rows'
inputs stays in the second-level cache while it is multiplied by all panels. Panels of gates alternate with panels of
gated outputs. A gate is applied while its sums are in a cache, so only half as much is written.

Source: K. Goto and R. van de Geijn, Anatomy of High-Performance Matrix Multiplication (2008).
"""

from __future__ import annotations

import platform
from itertools import pairwise
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange, types
from torch import Tensor
from torch.nn import functional as F

from xrunner import memory
from xrunner.cpu.scalars import INNER, OPTIONS, gated, round_row
from xrunner.cpu.simd import address, append_assembly, argument, at, enable_assembly, inlined, pointers
from xrunner.cpu.threads import num_threads
from xrunner.packing.base import PackedLinear

WIDTH = 32
GROUP = 12
"""Number of rows whose sums stay in registers. Sums take 24 of the 32 registers, weights two, and inputs the others."""
SLICE = 128
"""Number of inputs in a slice of a panel. A slice takes 16 KiB and stays in the first-level cache. If there are more
rows than `GROUP`, a slice is a whole block in the second-level cache, so that each group's sums are read and written
only once.
"""
DEEPEST = 1024
"""Largest number of inputs in a block: a group's sums are read and written once for each block."""
CHUNK = 132
"""Number of rows that are multiplied each time the weight is read. Their inputs in a block take half a MiB."""
STEPS = 4
FEW = 6
"""Largest number of rows that form one group, without prefetching. For one group, the processor's own prefetching is
faster, at 26 GB/s instead of 20. More rows form two groups. The second group finds the slice in the first-level cache,
and multiplies while memory delivers the prefetched lines.
"""
SPREAD = (8, 4, 2)
LINES = STEPS * WIDTH // 16

INSTRUCTIONS = ("vfmadd231ps", "vdpbf16ps", "vpdpbusd")
"""The instruction that multiplies inputs by weights and adds the products to the sums, by kind of number."""
FLOAT32, BFLOAT16, INT8 = range(3)
FEATURES = {"float32": "avx512f", "bfloat16": "avx512bf16", "int8": "avx512vnni"}

X, X_STRIDE, WEIGHT, TURNS, REST, BEGIN, BEGIN_STRIDE, Y, Y_STRIDE, SOON, SOON_LINES = range(11)
"""Positions of the inner loop's arguments in an array of int64: addresses, and strides in bytes. Sums start from the
values at BEGIN. Each iteration prefetches SOON_LINES lines from SOON."""


def is_available(dtype: str = "float32") -> bool:
    """Return whether this processor has the instructions for products in `dtype`."""
    features = llvmlite.binding.get_host_cpu_features()
    wanted = ("avx512f", FEATURES[dtype])
    return platform.machine() in {"x86_64", "AMD64"} and all(features.get(name) for name in wanted)


def pack(weight: Tensor, *, gated: bool = False) -> PackedLinear:
    """Return a function of x and b that computes x W^T + b. # float32 [out, in]

    Args:
        gated: whether the first half of the outputs gates the second half (see `scalars.gated`). The result then has
            half as many outputs.
    """
    return _packed(weight, None, None, FLOAT32, gated=gated)


def pack_bfloat16(weight: Tensor, *, gated: bool = False) -> PackedLinear:
    """Return a function that computes x W^T + b with a weight in bfloat16 [out, in]. The rows of x are rounded to
    bfloat16, and sums are float32."""
    return _packed(weight, None, None, BFLOAT16, gated=gated)


def pack_int8(weight: Tensor, scales: Tensor, *, gated: bool = False) -> PackedLinear:
    """Return a function that computes x W^T + b with a weight in eight bits. Each row of x is rounded to eight bits.

    Args:
        weight: the weight. # int8 [out, in]
        scales: scale of each output. # float32 [out]
    """
    # 128 is added to the rows' numbers; the initial sums compensate for it.
    begin = weight.sum(dim=1, dtype=torch.int32) * -128
    return _packed(weight, scales, begin.view(torch.float32), INT8, gated=gated)


class PanelOutputs:
    """The layout of a product's outputs in whole panels. Panels of gates alternate with panels of gated outputs."""

    def __init__(self, number: int, *, gated: bool) -> None:
        self._parts = 1 + gated
        self.number = number // self._parts
        self.width = self.number + -self.number % WIDTH
        self._no_bias = np.zeros(self._parts * self.width, dtype=np.float32)

    def in_panels(self, of_outputs: Tensor) -> Tensor:
        """Arrange rows, one per output, in the order of panels, padded with zeros. # [out, ...] -> [panels * WIDTH,
        ...]
        """
        if self._parts == 1 and self.number == self.width:
            return of_outputs
        rest = of_outputs.shape[1:]
        filled = of_outputs.new_zeros(self._parts, self.width, *rest)
        filled[:, : self.number] = of_outputs.view(self._parts, self.number, *rest)
        return filled.view(self._parts, -1, WIDTH, *rest).transpose(0, 1).reshape(-1, *rest)

    def bias(self, bias: Tensor | None) -> np.ndarray:
        return self._no_bias if bias is None else self.in_panels(bias).numpy()


def _packed(weight: Tensor, scales: Tensor | None, begin: Tensor | None, kind: int, *, gated: bool) -> PackedLinear:
    """Return a function that multiplies by a weight [out, in].

    Args:
        scales: scale of each output. # [out]
        begin: initial value of each output's sum, as bits of the sums' type. None means the bias. # [out]
    """
    outputs = PanelOutputs(len(weight), gated=gated)
    panels, block = _laid_out(outputs.in_panels(weight))
    of_outputs = np.ones_like(outputs.bias(None)) if scales is None else outputs.in_panels(scales).numpy()
    start = None if begin is None else outputs.in_panels(begin).numpy()
    how = gated, kind

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.empty(len(x), outputs.width)
        added = outputs.bias(bias)
        packed_arrays = panels, added if start is None else start, of_outputs, added
        if kind == FLOAT32:
            _run(x.contiguous().numpy(), packed_arrays, y.numpy(), block, how)
        else:
            _run_rounded(x.contiguous(), packed_arrays, y.numpy(), block, how)
        return y[:, : outputs.number].contiguous()

    return product


def _laid_out(weight: Tensor) -> tuple[np.ndarray, int]:
    enable_assembly()
    together = 4 // weight.dtype.itemsize
    weight = F.pad(weight, (0, -weight.shape[1] % together)).contiguous().view(torch.float32)
    padded, depth = weight.shape
    block = _block_depth(depth)
    panels = memory.zeros((padded * depth,), torch.float32)
    for begin in range(0, depth, block):
        end = min(depth, begin + block)
        part = weight[:, begin:end].view(-1, WIDTH, end - begin)
        panels[begin * padded : end * padded].view(-1, end - begin, WIDTH).copy_(part.transpose(1, 2))
    return panels.numpy(), block


def _block_depth(depth: int) -> int:
    count = -(-depth // DEEPEST)
    return -(-depth // (count * STEPS)) * STEPS


def _run(x: np.ndarray, packed: Any, y: np.ndarray, block: int, how: tuple[bool, int]) -> None:
    inputs, count = (x, _NO_SCALES), num_threads()
    if count == 1:
        _multiply_all(inputs, packed, y, block, how)
        return
    numba.set_num_threads(count)
    _multiply_shared(inputs, packed, y, block, how, count)


def _run_rounded(x: Tensor, packed: Any, y: np.ndarray, block: int, how: tuple[bool, int]) -> None:
    width, count = len(packed[0]) // len(packed[2]), num_threads()
    rounded = np.empty((len(x), width), dtype=np.float32), np.empty(len(x), dtype=np.float32)
    rows = x.numpy(), x.view(torch.int32).numpy()
    if count == 1:
        _round_and_multiply(rows, rounded, packed, y, block, how)
        return
    numba.set_num_threads(count)
    _round_and_multiply_shared(rows, rounded, packed, y, block, how, count)


_NO_SCALES = np.zeros(0, dtype=np.float32)


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply_all(inputs: Any, packed: Any, y: Any, block: Any, how: Any) -> None:
    _multiply(inputs, packed, y, block, how, 0, len(packed[2]) // WIDTH)


@njit(nogil=True, cache=True, parallel=True, error_model="numpy")
def _multiply_shared(inputs: Any, packed: Any, y: Any, block: Any, how: Any, num_threads: Any) -> None:
    count = y.shape[1] // WIDTH  # panels of results: a panel of gates stays together with the outputs that it gates
    for thread in prange(num_threads):
        together = len(packed[2]) // y.shape[1]
        first, last = count * thread // num_threads, count * (thread + 1) // num_threads
        _multiply(inputs, packed, y, block, how, first * together, last * together)


@njit(cache=True, **OPTIONS)
def _round_and_multiply(rows: Any, rounded: Any, packed: Any, y: Any, block: Any, how: Any) -> None:
    _round(rows, rounded, how, 0, len(rows[0]))
    _multiply(rounded, packed, y, block, how, 0, len(packed[2]) // WIDTH)


@njit(cache=True, **OPTIONS)
def _round_and_multiply_shared(
    rows: Any, rounded: Any, packed: Any, y: Any, block: Any, how: Any, num_threads: Any
) -> None:
    # These are separate functions because numba would fuse two loops of one function, and no thread would wait for rows
    # that other threads round.
    _round_shared(rows, rounded, how, num_threads)
    _multiply_shared(rounded, packed, y, block, how, num_threads)


@njit(parallel=True, **OPTIONS, **INNER)
def _round_shared(rows: Any, rounded: Any, how: Any, num_threads: Any) -> None:
    num_rows = len(rows[0])
    for thread in prange(num_threads):
        _round(rows, rounded, how, num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads)


@njit(**OPTIONS, **INNER)
def _round(rows: Any, rounded: Any, how: Any, first: Any, last: Any) -> None:
    x, bits = rows
    numbers, scale = rounded
    size = 1 if how[1] == INT8 else 2
    for i in range(first, last):
        row = numbers[i].view(np.uint8)
        scale[i] = round_row(x[i], bits[i], row, size)
        if size == 1:
            for d in range(len(row)):
                row[d] ^= np.uint8(128)


@njit(nogil=True, error_model="numpy", **INNER)
def _multiply(inputs: Any, packed: Any, y: Any, block: Any, how: Any, first: Any, last: Any) -> None:
    """Compute the outputs of panels [first, last)."""
    x, scale = inputs
    panels, begin, of_outputs, bias = packed
    is_gated, kind = how
    num_rows, depth = x.shape
    sums = y
    if is_gated:
        columns = 2 * WIDTH if depth <= block else (last - first) * WIDTH
        sums = np.empty((min(num_rows, CHUNK), columns), dtype=np.float32)
    width = sums.shape[1]
    arguments = np.empty(11, dtype=np.int64)
    for row in range(0, num_rows, CHUNK):
        count = min(CHUNK, num_rows - row)
        length = SLICE if count <= GROUP else block
        for start_of_block in range(0, depth, block):
            end = min(start_of_block + block, depth)
            for panel in range(first, last):
                column = panel * WIDTH
                place = (panel - first) * WIDTH % width if is_gated else row * width + column
                for start in range(start_of_block, end, length):
                    source = start_of_block * len(of_outputs) + column * (end - start_of_block)
                    source += (start - start_of_block) * WIDTH
                    between = start, min(start + length, end), length
                    arrays = x, at(panels, source), at(begin, column), at(sums, place)
                    _pass_slice(arrays, (row, count), width, between, how, arguments)
                if end == depth and kind == INT8:
                    of_panel = at(of_outputs, column), at(bias, column), at(scale, row)
                    _scale(at(sums, place), width, count, of_panel)
                if end == depth and is_gated and (panel - first) % 2 == 1:
                    result = at(y, row * y.shape[1] + panel // 2 * WIDTH)
                    _apply_gates(at(sums, place - WIDTH), width, count, result, y.shape[1])


@njit(**OPTIONS, **INNER)
def _scale(sums: Any, width: Any, count: Any, of_panel: Any) -> None:
    of_outputs, bias, of_rows = of_panel
    for i in range(count):
        of_row = of_rows[i]
        for d in range(WIDTH):
            total = np.float32(np.float32(sums[i * width + d]).view(np.int32))
            sums[i * width + d] = np.float32(total * of_outputs[d] * of_row + bias[d])


@njit(**OPTIONS, **INNER)
def _apply_gates(sums: Any, width: Any, count: Any, results: Any, results_width: Any) -> None:
    for i in range(count):
        for d in range(WIDTH):
            results[i * results_width + d] = gated(sums[i * width + d], sums[i * width + WIDTH + d])


@njit(nogil=True, error_model="numpy", **INNER)
def _pass_slice(arrays: Any, rows: Any, width: Any, inputs: Any, how: Any, arguments: Any) -> None:
    """Multiply rows, one group after the other, by a slice of a panel. Each group prefetches its share of the next
    slice.

    Args:
        arrays: the inputs, the start of the slice, the initial sums, and the sums, whose rows lie `width` apart.
        inputs: begin and end of the slice's inputs, and the number of inputs in a full slice.
    """
    x, panel, begin, sums = arrays
    row, count = rows
    _, kind = how
    start, end, length = inputs
    depth = x.shape[1]
    num_groups = max((count + GROUP - 1) // GROUP, 1 if count <= FEW else 2)
    turns, rest = (end - start) // STEPS, (end - start) % STEPS
    lines = max(LINES // num_groups, 1)
    soon = address(panel) + 4 * length * WIDTH
    arguments[X_STRIDE], arguments[Y_STRIDE] = 4 * depth, 4 * width
    arguments[WEIGHT], arguments[TURNS], arguments[REST] = address(panel), turns, rest
    for group in range(num_groups):
        first, stop = count * group // num_groups, count * (group + 1) // num_groups
        arguments[X] = address(x) + 4 * ((row + first) * depth + start)
        arguments[Y] = address(sums) + 4 * first * width
        arguments[BEGIN] = arguments[Y] if start else address(begin)
        arguments[BEGIN_STRIDE] = arguments[Y_STRIDE] if start else 0
        arguments[SOON] = soon + 64 * lines * turns * group
        arguments[SOON_LINES] = lines if num_groups > 1 and lines * group < LINES else 0
        if kind == FLOAT32:
            _multiply_float32(arguments, stop - first)
        elif kind == BFLOAT16:
            _multiply_bfloat16(arguments, stop - first)
        else:
            _multiply_int8(arguments, stop - first)


def _multiplying(instruction: str) -> Any:
    """Return the function that multiplies `num_rows` rows (1 to GROUP) by a slice of a panel.

    Its array `arguments` holds the addresses, the strides and the numbers of iterations.
    """

    @inlined
    def multiply_rows(typing_context: Any, arguments: Any, num_rows: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
            (place,) = pointers(context, builder, signature, values, 1)
            done = builder.append_basic_block("done")
            choice = builder.switch(values[1], done)
            for rows in range(1, GROUP + 1):
                block = builder.append_basic_block(f"rows{rows}")
                choice.add_case(ir.Constant(values[1].type, rows), block)
                builder.position_at_end(block)
                append_assembly(builder, place, _assembly(rows, instruction), _OVERWRITTEN)
                builder.branch(done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return types.void(arguments, types.intp), generate

    return multiply_rows


_OVERWRITTEN = (
    *("rax", "rcx", "rdx", "rsi", "r8", "r9", "r10", "r11", "r12", "r13"),
    *(f"zmm{number}" for number in range(32)),
    *("memory", "dirflag", "fpsr", "flags"),
)
_STARTS = ("%rsi", "%r8", "%r9", "%r10")
"""Registers with the addresses of the inputs of rows 0, 3, 6 and 9. With the stride in %rax, each of these registers
also addresses the next two rows."""


def _assembly(num_rows: int, instruction: str) -> str:
    """Return the inner loop. # %rdi: the arguments; zmm0, zmm1: weights; zmm2 to zmm7: inputs; zmm8 and on: sums"""
    starts = _STARTS[: -(-num_rows // 3)]
    sums = [(f"%zmm{8 + 2 * row}", f"%zmm{9 + 2 * row}") for row in range(num_rows)]

    def multiplication(value: str, weight: str, total: str) -> str:
        # In eight bits the inputs are unsigned; they are the first factor of the instruction, which assembly names
        # last.
        factors = (weight, value) if instruction == INSTRUCTIONS[INT8] else (value, weight)
        return f"{instruction} {', '.join(factors)}, {total}"

    def multiply(count: int, lines: int = 0) -> list[str]:
        """Return code that multiplies `count` inputs of each row by their weights and adds the products to the sums. In
        between, it prefetches `lines` cache lines. At the end, it advances the pointers to weights and inputs.
        """
        code = []
        for step in range(count):
            code += [f"vmovups {128 * step}(%rdx), %zmm0", f"vmovups {128 * step + 64}(%rdx), %zmm1"]
            code += [
                f"prefetcht1 {64 * line}(%r11)" for line in range(lines * step // count, lines * (step + 1) // count)
            ]
            for row, (left, right) in enumerate(sums):
                place = starts[row // 3] + ("", ",%rax", ",%rax,2")[row % 3]
                value = f"%zmm{2 + row % 6}"
                code += [f"vbroadcastss {4 * step}({place}), {value}"]
                code += [multiplication(value, "%zmm0", left), multiplication(value, "%zmm1", right)]
        return [*code, f"add $$128 * {count}, %rdx", *(f"add $$4 * {count}, {start}" for start in starts)]

    def spread(lines: int) -> list[str]:
        turn = [f"9{lines}:", *multiply(STEPS, lines), f"add $${64 * lines}, %r11", "dec %r13", f"jnz 9{lines}b"]
        return [f"cmp $${lines}, %r12", f"jne 8{lines}f", *turn, "jmp 5f", f"8{lines}:"]

    def each_sum(place: int, stride: int) -> list[str]:
        code = [f"mov {argument(place)}, %r11", f"mov {argument(stride)}, %r12"]
        for pair in sums:
            for offset, total in zip((0, 64), pair, strict=True):
                ends = f"{offset}(%r11)", total
                code.append("vmovups " + ", ".join(ends if place == BEGIN else ends[::-1]))
            code.append("add %r12, %r11")
        return code

    reach = ["lea (%rax,%rax,2), %rcx"]
    reach += [f"lea ({start},%rcx), {following}" for start, following in pairwise(starts)]
    code = [
        f"mov {argument(X)}, %rsi",
        f"mov {argument(X_STRIDE)}, %rax",
        *reach,
        f"mov {argument(WEIGHT)}, %rdx",
        *each_sum(BEGIN, BEGIN_STRIDE),
        f"mov {argument(SOON)}, %r11",
        f"mov {argument(SOON_LINES)}, %r12",
        *(f"mov {argument(TURNS)}, %r13", "test %r13, %r13", "jz 5f"),
        *[line for lines in SPREAD for line in spread(lines)],
        *("2:", "mov %r12, %rcx", "test %rcx, %rcx", "jz 4f"),
        *("3:", "prefetcht1 (%r11)", "add $$64, %r11", "dec %rcx", "jnz 3b", "4:"),
        *(*multiply(STEPS), "dec %r13", "jnz 2b"),
        *("5:", f"mov {argument(REST)}, %r13", "test %r13, %r13", "jz 7f"),
        *("6:", *multiply(1), "dec %r13", "jnz 6b"),
        *("7:", *each_sum(Y, Y_STRIDE)),
    ]
    return "\n".join(code)


_multiply_float32, _multiply_bfloat16, _multiply_int8 = map(_multiplying, INSTRUCTIONS)
