"""Memory of a CPU in huge pages: what a step reads once is then found without page tables being walked every 4 KiB.

A core of a virtual machine reads weights a fifth faster from them.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

HUGE_PAGE = 2**21
"""Bytes; less than one is left to the allocator."""


def zeros(shape: tuple[int, ...], dtype: torch.dtype, *, huge: bool = True) -> Tensor:
    """Zeros that take no memory before they are written to, and then take it in huge pages where the system has them.

    Args:
        huge: in pages of usual size if not, as keys and values have it: written to block by block, they made steps of
            a server 13% longer in huge pages on a virtual machine, where weights, read whole, are read faster.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        memory = mmap.mmap(-1, size)
    else:
        # Of memory that processes could share, systems give no huge pages.
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge:
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
