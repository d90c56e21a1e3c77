"""Pin each thread that computes steps to its own core, and measure how long steps waited for a core.

Linux moves a thread away from a core on which another thread wakes up. If all cores are computing, the moved thread
shares a core with another thread.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from xgpt.core.schema.step_log import StepRecord

_MAPS = Path("/proc/self/maps")
_OPENMP = re.compile(r"/\S*/lib(?:gomp|iomp5|omp)\b[^/]*\.so\S*$", re.MULTILINE)
_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def take_cores(part: int = 0, parts: int = 1) -> bool:
    """Pin each of the caller's OpenMP threads to its own core, if all teams together have one thread for each core that
    this process may use. Otherwise change nothing.

    Threads and processes that the caller starts later inherit the caller's core.

    Args:
        part: index of the caller's team. A team is the OpenMP threads that compute for one thread.
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
    """Pin thread i of the team to `cores[i]`. Return False if no OpenMP library with GNU's interface runs torch's
    threads.
    """
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
    names = sorted(set(_OPENMP.findall(_MAPS.read_text())), key=lambda name: "/torch" not in name)
    libraries = map(ctypes.CDLL, names)
    return next((library for library in libraries if hasattr(library, "GOMP_parallel")), None)


TASKS = Path("/proc/self/task")


class CoreWaitMeter:
    """Adds to each step's record the longest time for which a thread of this process was ready to run but had no core.
    It must be called in the thread that executes steps.

    If another thread executes steps, the main thread is left out, since it answers requests and no step waits for it.
    Time for which a thread waited for a core between two steps counts towards the second step.
    """

    def __init__(self, on_step: Callable[[StepRecord], None]) -> None:
        self._on_step = on_step
        self._before = waited_ns()

    def __call__(self, record: StepRecord) -> None:
        now = waited_ns()
        of_steps = now.keys() - ({os.getpid()} - {threading.get_native_id()})
        longest = max((now[id_] - self._before.get(id_, 0) for id_ in of_steps), default=None)
        self._before = now
        if longest is not None:
            longest = min(longest, record.end_ns - record.start_ns)
        self._on_step(record._replace(core_wait_ns=longest))


def waited_ns() -> dict[int, int]:
    """Return how long each thread of this process has waited for a core so far, or {} if the operating system does not
    report this."""
    found = {}
    paths = [TASKS / task / "schedstat" for task in os.listdir(TASKS)] if TASKS.is_dir() else []
    for path in _files.keys() - paths:  # the threads of these files have ended
        os.close(_files.pop(path))
    for path in paths:
        try:
            if path not in _files:
                _files[path] = os.open(path, os.O_RDONLY)
            found[int(path.parent.name)] = int(os.pread(_files[path], 64, 0).split()[1])
        except (OSError, IndexError):  # the thread has ended, or the kernel does not count
            continue
    return found


_files: dict[Path, int] = {}
