"""Measure how long steps waited for a processor core, by the counters of Linux."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from xgpt.core.schema.step_log import StepRecord

TASKS = Path("/proc/self/task")


class CoreWaitMeter:
    """Adds to each step's record the longest time for which a thread of this process was ready to run but had no core,
    and passes the record on. Must be called in the thread that executes steps.

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
"""Open files, by path. Every step reads them, and opening a file takes six times as long as reading it."""
