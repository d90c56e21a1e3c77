"""A core of its own for each thread that computes steps.

Linux moves a thread off a core on which another one wakes up. Where every core computes, it comes to the core of a
thread that waits for it, and the two take turns of some milliseconds there, in which the one that waits spins.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
from numba import njit, prange, types
from numba.core.typing import signature

from xrunner.cpu.threads import num_threads

_sched_setaffinity: Any = types.ExternalFunction(
    "sched_setaffinity", signature(types.int32, types.int32, types.uintp, types.voidptr)
)
"""Of the C library: thread (0: the calling one), bytes of the mask, mask."""


def take_cores(part: int = 0, parts: int = 1) -> bool:
    """Keep each thread of the caller's team on a core of its own, where all teams together have as many threads as
    this process may use cores. Elsewhere nothing changes: a thread may have to make way for other work.

    A team are OpenMP's threads, which torch and numba share. Threads and processes that the caller starts from now on
    inherit its core.

    Args:
        part: number of this team.
        parts: teams of equally many threads that compute on this machine, each in its process.

    Returns:
        Whether each has a core of its own now.
    """
    cores, count = _usable_cores(), num_threads()
    if len(cores) < 2 or count * parts != len(cores):
        return False
    _keep_to([[core] for core in cores[part * count : (part + 1) * count]])
    return True


@contextmanager
def own_cores(part: int = 0, parts: int = 1) -> Iterator[None]:
    """Take cores for as long as this lasts, in the thread that computes."""
    cores, count = _usable_cores(), num_threads()
    taken = take_cores(part, parts)
    try:
        yield
    finally:
        if taken:
            _keep_to([cores] * count)


def _usable_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _keep_to(cores: Sequence[Sequence[int]]) -> None:
    """Let each thread of the team run on the cores given for it."""
    masks = np.zeros((len(cores), max(map(max, cores)) // 64 * 64 + 64), np.bool_)
    for mask, of_thread in zip(masks, cores, strict=True):
        mask[of_thread] = True
    numba.set_num_threads(len(cores))
    _set_affinities(np.packbits(masks, axis=1, bitorder="little"))


@njit(cache=True, nogil=True, parallel=True)
def _set_affinities(masks: Any) -> None:
    for thread in prange(len(masks)):
        _sched_setaffinity(0, masks.shape[1], masks[thread].ctypes)
