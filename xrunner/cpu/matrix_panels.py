"""Multiply eight-bit numbers in a processor's matrix registers (AMX).

If there are few rows, oneDNN reads a weight at only half the memory's bandwidth. It also rounds inputs and scales sums
in separate passes. Here rows are rounded in one pass, sums are scaled as they leave the registers, and the next panel's
weights are prefetched between this panel's multiplications.

A weight is divided into panels of WIDTH outputs, and a panel into lines. A line holds each output's weights of four
consecutive inputs. Sixteen lines of sixteen outputs fill a register. The sums of up to GROUP rows by WIDTH outputs stay
in registers while all inputs are multiplied. Rounded rows are padded with zeros to a multiple of STEP bytes.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18, and Intel's optimisation
reference manual, chapter 20 (blocking).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange, types
from torch import Tensor
from torch.nn import functional as F

from xrunner import memory
from xrunner.cpu import amx
from xrunner.cpu.scalars import INNER, OPTIONS, round_row
from xrunner.cpu.simd import address, append_assembly, argument, enable_assembly, inlined, pointers
from xrunner.cpu.threads import compiled, num_threads, run
from xrunner.packing.base import PackedLinear

WIDTH = 32
HEIGHT = 16
GROUP = 32
"""Number of rows whose sums stay in registers. Sums take four of the eight registers, weights and inputs two each."""
STEP = 64
SUMS_BYTES = 4 * GROUP * WIDTH
SCRATCH = SUMS_BYTES + 64
LINE = 4 * WIDTH
STEP_LINES = HEIGHT * LINE // 64
CHUNK = 8
"""Largest number of groups that are multiplied each time a weight is read. Their inputs must fit in CHUNK_BYTES of the
second-level cache.
"""
CHUNK_BYTES = 5 * 2**18

INPUTS, INPUTS_STRIDE, WEIGHT, STEPS, SUMS, SOON, SOON_LINES, CONFIG = range(8)
Y, Y_STRIDE, ROWS, OF_ROWS, OF_OUTPUTS, BIAS = range(8, 14)
"""Positions of the inner loop's arguments in an array of int64: addresses, strides in bytes, and numbers. Each
iteration prefetches SOON_LINES cache lines from SOON. After the loop, ROWS rows of sums are scaled and written."""


def is_available() -> bool:
    return amx.is_available("int8")


def pack(weight: Tensor, scales: Tensor) -> PackedLinear:
    """Return a function of x and b that computes x W^T + b. Each row of x is rounded to eight bits.

    Args:
        weight: the weight. # int8 [out, in]
        scales: scale of each output. # float32 [out]
    """
    num_outputs, depth = weight.shape
    assert is_available(), "without the system's permission the process would be killed"
    enable_assembly()
    missing = -num_outputs % WIDTH
    inputs = -(-depth // STEP) * STEP
    padded = F.pad(weight, (0, inputs - depth, 0, missing))
    panels = memory.zeros((padded.numel(),), torch.uint8)
    lines = padded.view(torch.uint8).view(-1, WIDTH, inputs // 4, 4).transpose(1, 2)
    panels.view(lines.shape).copy_(lines)
    packed, of_output = panels.numpy(), F.pad(scales, (0, missing)).numpy()
    no_bias = np.zeros(num_outputs + missing, dtype=np.float32)

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.empty(len(x), num_outputs + missing)
        if not len(x):  # the processor refuses registers with 0 rows
            return y[:, :num_outputs]
        added = no_bias if bias is None else (F.pad(bias, (0, missing)) if missing else bias).numpy()
        rows, of_rows = _rounded(x, inputs, -(-len(x) // HEIGHT) * HEIGHT)
        _run(rows, packed, (of_rows, of_output, added), y.numpy())
        return y[:, :num_outputs].contiguous() if missing else y

    return product


def _rounded(x: Tensor, width: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Round rows to eight bits, as `eight_bits.quantise` does.

    Args:
        x: rows to round. # float32 [rows, in]
        width: width of the result. Zeros follow the numbers of x.
        num_rows: number of rows of the result. Rows beyond those of x are undefined.

    Returns:
        uint8 [num_rows, width], and each row's scale, float32 [num_rows].
    """
    x = x.contiguous()
    result, scale = np.empty((num_rows, width), dtype=np.uint8), np.empty(num_rows, dtype=np.float32)
    run(_ROUND, x.numel(), x.numpy(), x.view(torch.int32).numpy(), result, scale)
    return result, scale


def _round(x: Any, bits: Any, rounded: Any, scale: Any) -> None:
    for i in prange(x.shape[0]):
        scale[i] = round_row(x[i], bits[i], rounded[i], 1)


_ROUND = compiled(_round, fastmath={"contract"})


def _run(rows: np.ndarray, panels: np.ndarray, packed: Any, y: np.ndarray) -> None:
    count = num_threads()
    # Allocated here: compiled code would free an array once it has taken its address.
    scratch = np.empty((count, SCRATCH), dtype=np.uint8)
    if count == 1:
        _multiply_all(rows, panels, packed, y, scratch)
        return
    numba.set_num_threads(count)
    _multiply_shared(rows, panels, packed, y, scratch)


@njit(cache=True, **OPTIONS)
def _multiply_all(rows: Any, panels: Any, packed: Any, y: Any, scratch: Any) -> None:
    _multiply((rows, panels, y), packed, scratch[0], 0, y.shape[1] // WIDTH)


@njit(cache=True, parallel=True, **OPTIONS)
def _multiply_shared(rows: Any, panels: Any, packed: Any, y: Any, scratch: Any) -> None:
    count, num_threads = y.shape[1] // WIDTH, len(scratch)
    for thread in prange(num_threads):
        first, last = count * thread // num_threads, count * (thread + 1) // num_threads
        _multiply((rows, panels, y), packed, scratch[thread], first, last)


@njit(**OPTIONS, **INNER)
def _multiply(arrays: Any, packed: Any, scratch: Any, first: Any, last: Any) -> None:
    """Compute the outputs of panels [first, last)."""
    rows, panels, y = arrays
    of_rows, of_outputs, bias = packed
    num_rows, stride = rows.shape
    steps, panel_bytes = stride // STEP, stride * WIDTH
    num_groups = (num_rows + GROUP - 1) // GROUP
    chunk = max(2, min(CHUNK, CHUNK_BYTES // (GROUP * stride)))
    _configure(scratch[SUMS_BYTES:], min(len(y), HEIGHT))
    arguments = np.empty(14, dtype=np.int64)
    arguments[INPUTS_STRIDE], arguments[STEPS], arguments[Y_STRIDE] = stride, steps, 4 * y.shape[1]
    arguments[SUMS] = address(scratch)
    arguments[CONFIG] = arguments[SUMS] + SUMS_BYTES
    _begin(arguments)
    for start in range(0, num_groups, chunk):
        count = min(chunk, num_groups - start)
        lines = (STEP_LINES + count - 1) // count
        for panel in range(first, last):
            begin = address(panels) + panel * panel_bytes
            arguments[WEIGHT] = begin
            arguments[OF_OUTPUTS] = address(of_outputs) + LINE * panel
            arguments[BIAS] = address(bias) + LINE * panel
            for group in range(count):
                row = (start + group) * GROUP
                arguments[INPUTS] = address(rows) + row * stride
                arguments[SOON] = begin + panel_bytes + 64 * lines * steps * group
                arguments[SOON_LINES] = min(lines, max(STEP_LINES - lines * group, 0))
                arguments[ROWS] = min(GROUP, len(y) - row)
                arguments[OF_ROWS] = address(of_rows) + 4 * row
                arguments[Y] = address(y) + row * 4 * y.shape[1] + LINE * panel
                _multiply_rows(arguments, num_rows - row > HEIGHT)
    _end(arguments)


@njit(**OPTIONS, **INNER)
def _configure(config: Any, num_rows: Any) -> None:
    """Write a register configuration into `config`: sums and inputs have `num_rows` rows, weights 16. # uint8 [64 or
    more]
    """
    config[:64] = 0
    config[0] = 1
    for register in range(8):
        config[16 + 2 * register] = 64
        config[48 + register] = HEIGHT if register >= 6 else num_rows


def _assembled(code: Callable[[bool], list[str]]) -> Any:

    @inlined
    def run(typing_context: Any, arguments: Any, two: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
            (place,) = pointers(context, builder, signature, values, 1)
            with builder.if_else(values[1]) as (then, otherwise):
                for block, is_second in ((then, True), (otherwise, False)):
                    with block:
                        append_assembly(builder, place, "\n".join(code(is_second)), _OVERWRITTEN)
            return context.get_dummy_value()

        return types.void(arguments, types.boolean), generate

    return run


_OVERWRITTEN = (
    *("rax", "rcx", "rdx", "rsi", "r8", "r11", "r12", "r13"),
    *(f"zmm{number}" for number in range(8)),
    *("memory", "dirflag", "fpsr", "flags"),
)


def _multiplication(two: bool) -> list[str]:
    """Return the inner loop in assembly. # %rdi: the arguments; tmm0 to tmm3: sums; tmm4, tmm5: inputs; tmm6, tmm7:
    weights
    """
    rows = (0, 1) if two else (0,)
    sums = [(f"%tmm{2 * row + half}", row, half) for row in rows for half in (0, 1)]
    starts = ("%rsi", "%r8")
    return [
        f"mov {argument(INPUTS)}, %rsi",
        f"mov {argument(INPUTS_STRIDE)}, %rax",
        *("mov %rax, %r8", f"shl $${HEIGHT.bit_length() - 1}, %r8", "add %rsi, %r8"),
        f"mov {argument(WEIGHT)}, %rdx",
        f"mov $${LINE}, %rcx",
        f"mov {argument(STEPS)}, %r13",
        f"mov {argument(SOON)}, %r11",
        *(f"tilezero {total}" for total, _, _ in sums),
        "2:",
        *(f"tileloadd ({starts[row]},%rax,1), %tmm{4 + row}" for row in rows),
        *("tileloadd (%rdx,%rcx,1), %tmm6", "tileloadd 64(%rdx,%rcx,1), %tmm7"),
        *(f"tdpbssd %tmm{6 + half}, %tmm{4 + row}, {total}" for total, row, half in sums),
        *(f"mov {argument(SOON_LINES)}, %r12", "test %r12, %r12", "jz 4f"),
        *("3:", "prefetcht1 (%r11)", "add $$64, %r11", "dec %r12", "jnz 3b", "4:"),
        *(f"add $${STEP}, {starts[row]}" for row in rows),
        *(f"add $${HEIGHT * LINE}, %rdx", "dec %r13", "jnz 2b"),
        f"mov {argument(SUMS)}, %rsi",
        f"lea {HEIGHT * LINE}(%rsi), %r8",
        *(f"tilestored {total}, {64 * half}({starts[row]},%rcx,1)" for total, row, half in sums),
        *_finishing(),
    ]


def _finishing() -> list[str]:
    total, factor, bias = ("%zmm0", "%zmm1"), ("%zmm2", "%zmm3"), ("%zmm4", "%zmm5")
    code = [f"mov {argument(BIAS)}, %rax"]
    code += [f"vmovups {64 * half}(%rax), {bias[half]}" for half in (0, 1)]
    code += [f"mov {argument(OF_OUTPUTS)}, %rax"]
    code += [f"vmovups {64 * half}(%rax), {factor[half]}" for half in (0, 1)]
    code += [f"mov {argument(OF_ROWS)}, %rdx", f"mov {argument(Y)}, %r11", f"mov {argument(Y_STRIDE)}, %r12"]
    code += [f"mov {argument(ROWS)}, %r13", "5:"]
    code += ["vbroadcastss (%rdx), %zmm7", "add $$4, %rdx"]
    code += [f"vcvtdq2ps {64 * half}(%rsi), {total[half]}" for half in (0, 1)]
    code += [f"vmulps {factor[half]}, {total[half]}, {total[half]}" for half in (0, 1)]
    code += [f"vfmadd213ps {bias[half]}, %zmm7, {total[half]}" for half in (0, 1)]
    code += [f"vmovups {total[half]}, {64 * half}(%r11)" for half in (0, 1)]
    return [*code, f"add $${LINE}, %rsi", "add %r12, %r11", "dec %r13", "jnz 5b"]


_multiply_rows = _assembled(_multiplication)


@inlined
def _begin(typing_context: Any, arguments: Any) -> Any:
    return types.void(arguments), _single([f"mov {argument(CONFIG)}, %rax", "ldtilecfg (%rax)"])


@inlined
def _end(typing_context: Any, arguments: Any) -> Any:
    return types.void(arguments), _single(["tilerelease"])


def _single(code: list[str]) -> Callable[..., ir.Value]:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        (place,) = pointers(context, builder, signature, values, 1)
        append_assembly(builder, place, "\n".join(code), _OVERWRITTEN)
        return context.get_dummy_value()

    return generate
