"""Fuse rotary embeddings and gates into one GPU kernel each.

Apart from reading weights, a decode step spends most of its time on launches. In plain torch, each rotation takes about
ten, for microseconds of work.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

GATE_BLOCK = 1024


@functools.cache
def runs_on(device_type: str) -> bool:
    return device_type == "cuda" and importlib.util.find_spec("triton") is not None


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Rotate queries or keys as `layers.Rotary` does.
    # [tokens, heads, dim], int64 [tokens], float32 [dim / 2] -> like x"""
    from xrunner.gpu import kernels

    num_tokens, num_heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = x if x.stride(2) == 1 else x.contiguous()
    kernels.rotate_kernel[(num_tokens,)](
        x,
        out,
        positions,
        frequencies,
        x.stride(0),
        x.stride(1),
        NUM_HEADS=num_heads,
        PADDED_HEADS=power_of_two(num_heads),
        HALF=dim // 2,
        PADDED_HALF=power_of_two(dim // 2),
    )
    return out


def gate(x: Tensor) -> Tensor:
    from xrunner.gpu import kernels

    num_tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    blocks = -(-width // GATE_BLOCK)
    kernels.gate_kernel[(num_tokens, blocks)](x.contiguous(), out, width, BLOCK=GATE_BLOCK)
    return out


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
