"""Compile kernels with numba. Large inputs are divided among torch's threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import torch
from numba import njit

# Torch already computes on OpenMP threads; numba's own pool of threads would compete with them for the cores (twice as
# slow).
numba.config.THREADING_LAYER = "omp"  # type: ignore[attr-defined]

LEAST_SHARED = 2**15

Kernel = tuple[Callable[..., None], Callable[..., None]]


def compiled(kernel: Callable[..., None], **options: Any) -> Kernel:
    return (
        njit(cache=True, nogil=True, error_model="numpy", **options)(kernel),
        njit(cache=True, nogil=True, error_model="numpy", parallel=True, **options)(kernel),
    )


def num_threads() -> int:
    return min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]


def run(kernel: Kernel, size: int, *arguments: Any) -> None:
    count = num_threads()
    if size < LEAST_SHARED or count == 1:
        kernel[0](*arguments)
        return
    numba.set_num_threads(count)
    kernel[1](*arguments)
