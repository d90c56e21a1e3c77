"""The C library's heap: what is freed stays, all threads share it, and it grows in huge pages."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
"""Parameters of glibc's mallopt."""
GROWTH = 2**28
"""Bytes by which the heap grows at least; they take no memory before they are written to."""
MADV_HUGEPAGE = 14


def keep_freed_memory() -> None:
    """Have the C library keep freed memory and share it between threads, where it is glibc.

    It would hand every large tensor back to the system, and taking it again costs a page fault for each 4 KiB: 5 to
    13% of a step of 500 tokens or more.

    Call it before the process has other threads: one that has taken memory keeps its own arena, which is no part of
    the heap, and which `ask_for_heap` does not reach.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in (
            (M_MMAP_THRESHOLD, 2**30),
            (M_TRIM_THRESHOLD, 2**31 - 1),
            (M_ARENA_MAX, 1),
            (M_TOP_PAD, GROWTH),
        ):
            mallopt(parameter, value)


def ask_for_heap() -> None:
    """Have what the heap has grown by, and not written to, come in huge pages: there libraries keep their weights."""
    begin = _heap_begin()
    if begin is None:
        return
    library = ctypes.CDLL(None)
    library.sbrk.restype, library.sbrk.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t,)
    library.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.madvise(begin, library.sbrk(0) - begin, MADV_HUGEPAGE)


@cache
def _heap_begin() -> int | None:
    """The address of its first page; None where the system does not say."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    return next((int(line.split("-")[0], 16) for line in maps.read_text().split("\n") if line.endswith("[heap]")), None)
