"""Memory of a CPU in huge pages: what a step reads once is then found without page tables being walked every 4 KiB."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

HUGE_PAGE = 2**21
"""Bytes; less than one is left to the allocator."""


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory before they are written to, and then take it in huge pages where the system has them.

    A page fault costs microseconds on a virtual machine; at 4 KiB each, touching fresh K/V made a step of 2048 prompt
    tokens 15 to 25% longer.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
