"""Functions that kernels call for a number or a row: exponentials, gates, and rounding to fewer bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

LARGEST = np.float32(127.0)
TINIEST = np.float32(np.finfo(np.float32).tiny)
MAGNITUDE = np.int32(0x7FFFFFFF)
"""Mask of a float32's bits without the sign. As integers, these bits are ordered by magnitude, with NaN above all."""
INFINITE = np.int32(0x7F800000)


OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
INNER: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Options of functions that only kernels call. Without an entry point for Python, compiling takes a fifth less time."""


@njit(inline="always")
def exp(x):
    """Return e^x for x <= 0, with a relative error of 1e-7. It is a polynomial, since compilers do not vectorise the
    library's function.
    """
    x = max(x, np.float32(-87.0))
    t = x * np.float32(1.4426950408889634)
    whole = np.floor(t + np.float32(0.5))
    f = t - whole
    p = np.float32(1.535336188319500e-4)
    p = p * f + np.float32(1.339887440266574e-3)
    p = p * f + np.float32(9.618437357674640e-3)
    p = p * f + np.float32(5.550332471162809e-2)
    p = p * f + np.float32(2.402264791363012e-1)
    p = p * f + np.float32(6.931472028550421e-1)
    p = p * f + np.float32(1.0)
    return p * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(error_model="numpy", fastmath={"contract", "reassoc"}, **INNER)
def gated(a: Any, b: Any) -> Any:
    small = exp(-abs(a))
    return a * (np.float32(1.0) if a >= 0 else small) / (np.float32(1.0) + small) * b


@njit(**OPTIONS, **INNER)
def largest_bits(bits: Any) -> Any:
    highest = np.int32(0)
    for d in range(len(bits)):
        highest = max(highest, np.int32(bits[d] & MAGNITUDE))
    return np.int32(highest)


@njit(**OPTIONS, **INNER)
def number(bits: Any) -> Any:
    return np.int32(bits).view(np.float32)


@njit(**OPTIONS, **INNER)
def quantise_row(x: Any, bits: Any, rounded: Any) -> Any:
    highest = largest_bits(bits)
    if highest >= INFINITE:
        rounded[:] = 0
        return np.float32(np.nan)
    scale = max(number(highest) / LARGEST, TINIEST)
    factor = np.float32(1.0) / scale
    for d in range(len(x)):
        rounded[d] = np.int8(np.int32(np.rint(x[d] * factor)))
    return scale


@njit(**OPTIONS, **INNER)
def _round_row(bits: Any, rounded: Any) -> None:
    """Round a row to the nearest bfloat16, ties to even. NaN stays NaN."""
    for d in range(len(bits)):
        pattern = np.uint32(bits[d])
        up = np.uint32(0x7FFF) + ((pattern >> np.uint32(16)) & np.uint32(1))
        nearest = np.uint16((pattern + up) >> np.uint32(16))
        is_nan = (pattern & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        rounded[d] = np.uint16(0x7FC0) if is_nan else nearest


@njit(**OPTIONS, **INNER)
def round_row(x: Any, bits: Any, rounded: Any, size: Any) -> Any:
    """Round a row to numbers of `size` bytes (bfloat16 or int8) and pad it with zeros. Return its scale. # float32,
    int32, uint8
    """
    depth = len(x)
    rounded[depth * size :] = 0
    if size == 1:
        return quantise_row(x, bits, rounded.view(np.int8)[:depth])
    _round_row(bits, rounded.view(np.uint16))
    return np.float32(1.0)
