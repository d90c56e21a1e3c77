"""Triton kernels of `fused`. This module needs triton."""

from __future__ import annotations

import triton
import triton.language as tl


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
    """Gate some columns of a token. Grid: tokens, blocks of columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + token * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + token * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * width + column, result.to(out.dtype.element_ty), mask=inside)
