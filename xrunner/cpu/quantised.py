"""Round rows before a product in eight bits or bfloat16, and scale its sums after it, each in one pass.

Compiled by numba. In plain torch, finding a row's scale, rounding it and scaling its sums back takes eight passes over
memory, as long as a third of the products. Shares torch's OpenMP threads, as attention does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from xrunner.cpu.threads import compiled, run

LARGEST = np.float32(127.0)
TINIEST = np.float32(np.finfo(np.float32).tiny)
MAGNITUDE = np.int32(0x7FFFFFFF)
"""Bits of a float32 without its sign: as whole numbers they are in the order of the magnitudes, NaN above all."""
INFINITE = np.int32(0x7F800000)
"""Those of infinity."""


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to eight bits. A row that is not finite gets a scale that is not. # float32 [rows, n]

    Returns:
        int8 [rows, n], and each row's scale, float32 [rows].
    """
    x = x.contiguous()
    rounded = torch.empty(x.shape, dtype=torch.int8)
    scale = torch.empty(len(x))
    run(_QUANTISE, x.numel(), x.numpy(), x.view(torch.int32).numpy(), rounded.numpy(), scale.numpy())
    return rounded, scale


def rounded(x: Tensor, size: int, width: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Round each row to numbers of `size` bytes: two for bfloat16, one for eight bits as `quantise` does.

    Args:
        x: float32 [rows, in].
        width: bytes of a row of the result; what the numbers do not fill is zero.
        num_rows: of the result; those beyond x's hold anything.

    Returns:
        uint8 [num_rows, width], and each row's scale, float32 [num_rows]: 1 in bfloat16.
    """
    x = x.contiguous()
    result, scale = np.empty((num_rows, width), dtype=np.uint8), np.empty(num_rows, dtype=np.float32)
    run(_ROUND, x.numel(), x.numpy(), x.view(torch.int32).numpy(), result, scale, size)
    return result, scale


def rescale(y: Tensor, scale: Tensor, bias: Tensor | None, *, relu: bool) -> Tensor:
    """y = y * scale + bias in place, without what is negative on demand. # float32 [rows, n], [rows], [n] -> like y"""
    added = _NOTHING if bias is None else bias.numpy()
    run(_RESCALE, y.numel(), y.numpy(), scale.numpy(), added, relu)
    return y


_NOTHING = np.zeros(0, dtype=np.float32)


OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}


@njit(**OPTIONS)
def largest_bits(bits: Any) -> Any:
    """Those of the largest magnitude, without its sign. # int32 [n]"""
    highest = np.int32(0)
    for d in range(len(bits)):
        highest = max(highest, np.int32(bits[d] & MAGNITUDE))
    return np.int32(highest)


@njit(**OPTIONS)
def number(bits: Any) -> Any:
    """The float32 of some bits."""
    return np.int32(bits).view(np.float32)


@njit(**OPTIONS)
def quantise_row(x: Any, bits: Any, rounded: Any) -> Any:
    """Round a row; return its scale."""
    highest = largest_bits(bits)
    if highest >= INFINITE:
        rounded[:] = 0
        return np.float32(np.nan)
    scale = max(number(highest) / LARGEST, TINIEST)
    factor = np.float32(1.0) / scale
    for d in range(len(x)):
        rounded[d] = np.int8(np.int32(np.rint(x[d] * factor)))
    return scale


def _quantise(x: Any, bits: Any, rounded: Any, scale: Any) -> None:
    for i in prange(x.shape[0]):
        scale[i] = quantise_row(x[i], bits[i], rounded[i])


@njit(**OPTIONS)
def _round_row(bits: Any, rounded: Any) -> None:
    """To the nearest bfloat16, of two as near to the even one; NaN stays."""
    for d in range(len(bits)):
        pattern = np.uint32(bits[d])
        up = np.uint32(0x7FFF) + ((pattern >> np.uint32(16)) & np.uint32(1))
        nearest = np.uint16((pattern + up) >> np.uint32(16))
        is_nan = (pattern & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        rounded[d] = np.uint16(0x7FC0) if is_nan else nearest


@njit(**OPTIONS)
def round_row(x: Any, bits: Any, rounded: Any, size: Any) -> Any:
    """Round a row to numbers of `size` bytes, and fill it up with zeros; return its scale. # float32, int32, uint8"""
    depth = len(x)
    rounded[depth * size :] = 0
    if size == 1:
        return quantise_row(x, bits, rounded.view(np.int8)[:depth])
    _round_row(bits, rounded.view(np.uint16))
    return np.float32(1.0)


def _round(x: Any, bits: Any, rounded: Any, scale: Any, size: Any) -> None:
    for i in prange(x.shape[0]):
        scale[i] = round_row(x[i], bits[i], rounded[i], size)


def _rescale(y: Any, scale: Any, bias: Any, relu: Any) -> None:
    for i in prange(y.shape[0]):
        factor = scale[i]
        if len(bias):
            for d in range(y.shape[1]):
                y[i, d] = y[i, d] * factor + bias[d]
        else:
            for d in range(y.shape[1]):
                y[i, d] *= factor
        if relu:
            for d in range(y.shape[1]):
                y[i, d] = np.float32(0.0) if y[i, d] < np.float32(0.0) else y[i, d]


_QUANTISE, _RESCALE = compiled(_quantise, fastmath={"contract"}), compiled(_rescale, fastmath={"contract"})
_ROUND = compiled(_round, fastmath={"contract"})
