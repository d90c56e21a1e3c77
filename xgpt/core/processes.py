"""End processes with their parent, detect processes that hang or fail too often, and stop on signals."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, current_thread, main_thread

MAX_FILES = 1 << 16
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = getattr(ctypes.CDLL(None), "prctl", None)
"""Looked up at import: a look-up takes a lock, which another thread might hold at a fork."""


def run_module(module: str) -> tuple[str, ...]:
    """Return the command that runs a module. It looks for no module in the current directory, which may be a
    stranger's checkpoint.
    """
    return sys.executable, "-P", "-m", module


def end_with_parent(parent: int | None = None, sent: signal.Signals = signal.SIGKILL) -> None:
    """On Linux, make the kernel send this process a signal when the thread that started it ends.

    Args:
        parent: id of the parent process. If it has already ended, this process exits at once.
    """
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, sent, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """On Linux, make this process adopt its descendants whose own parents end, so that it can wait for them."""
    if _prctl is not None:
        _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def wait_for_children(within_s: float) -> None:
    until_s = time.monotonic() + within_s
    with suppress(ChildProcessError):  # there are no more children
        while time.monotonic() < until_s:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)


def end(process: subprocess.Popen[bytes] | subprocess.Popen[str], within_s: float = 0.0) -> None:
    """Wait until a process ends. Kill it if it has not ended after `within_s` seconds."""
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def is_at_work(process: int) -> bool:
    """Return whether a thread of a process runs, or waits for a core or a disk. Always False except on Linux.

    A process at work may fail to report that it is alive, because cores are busy or one of its threads holds the
    interpreter's lock. A process that was stopped (SIGSTOP) is not at work.
    """
    return bool(_states(process) & {"R", "D"})


def _states(process: int) -> set[str]:
    states = set()
    with suppress(OSError):  # the process has ended
        for thread in Path(f"/proc/{process}/task").iterdir():
            with suppress(OSError, IndexError):  # the thread has ended meanwhile
                states.add((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return states


def cpu_s(process: int) -> float:
    """Return the processor seconds that a process has used. 0 if it has ended, and on systems other than Linux."""
    with suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def raise_file_limit() -> int:
    """Raise the limit of open files of this process and of those that it starts as far as allowed, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(soft, most)


def children_of(process: int) -> list[int]:
    started: list[int] = []
    with suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{process}/task").iterdir():
            started += map(int, (thread / "children").read_text().split())
    return started


def free_port() -> int:
    with socket.socket(socket.AF_INET) as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def too_often(failures_s: list[float], most: int, period_s: float) -> bool:
    """Add the present time to `failures_s`, and return whether more than `most` failures are from the last `period_s`
    seconds.
    """
    now_s = time.monotonic()
    failures_s[:] = [*(then_s for then_s in failures_s if now_s - then_s < period_s), now_s]
    return len(failures_s) > most


@contextmanager
def stops_on_signal(stop: Event) -> Iterator[None]:
    """Within the `with` block, set `stop` on SIGTERM or SIGINT. Outside the main thread, do nothing."""
    if current_thread() is not main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
