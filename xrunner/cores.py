"""Give each thread that computes steps a core of its own.

Linux moves a thread away from a core on which another thread wakes up. If every core computes, the moved thread gets to
a core whose own thread must then wait. The two then alternate in slices of some milliseconds, and the waiting thread
spins during its slices.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

_MAPS = Path("/proc/self/maps")
_OPENMP = re.compile(r"/\S*/lib(?:gomp|iomp5|omp)\b[^/]*\.so\S*$", re.MULTILINE)
_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
"""The function that each thread of a team runs."""


def take_cores(part: int = 0, parts: int = 1) -> bool:
    """Pin each of the caller's OpenMP threads to its own core, if the threads of all teams together are as many as the
    cores that this process may use. Otherwise change nothing, because a thread may have to make way for other work.

    Threads and processes that the caller starts later inherit its core.

    Args:
        part: number of this team: the OpenMP threads that compute for the calling thread.
        parts: number of equally large teams that compute on this machine, each in its own process.

    Returns:
        Whether each thread now has its own core.
    """
    cores, count = _usable_cores(), torch.get_num_threads()
    if len(cores) < 2 or count * parts != len(cores):
        return False
    return _keep_to([[core] for core in cores[part * count : (part + 1) * count]])


@contextmanager
def own_cores(part: int = 0, parts: int = 1) -> Iterator[None]:
    """Pin the calling thread's team to cores until the block ends."""
    cores, count = _usable_cores(), torch.get_num_threads()
    taken = take_cores(part, parts)
    try:
        yield
    finally:
        if taken:
            _keep_to([cores] * count)


def _usable_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _keep_to(cores: Sequence[Sequence[int]]) -> bool:
    """Pin each thread of the team to its core; return False if the threads do not all use the same OpenMP library."""
    if len(cores) == 1:
        os.sched_setaffinity(0, cores[0])
        return True
    library = _openmp()
    if library is None:
        return False
    body = _BODY(lambda _: os.sched_setaffinity(0, cores[library.omp_get_thread_num()]))
    library.GOMP_parallel(body, None, len(cores), 0)
    return True


@cache
def _openmp() -> Any:
    """Return the OpenMP library that runs torch's threads, or None if its interface is not GNU's."""
    names = sorted(set(_OPENMP.findall(_MAPS.read_text())), key=lambda name: "/torch" not in name)
    libraries = map(ctypes.CDLL, names)
    return next((library for library in libraries if hasattr(library, "GOMP_parallel")), None)
