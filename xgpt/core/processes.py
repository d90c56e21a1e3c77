"""Start processes that end with the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
_prctl = getattr(ctypes.CDLL(None), "prctl", None)
"""Looked up here: between fork and exec no lock may be taken that another thread might have held."""


def end_with_parent(parent: int | None = None, sent: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel end this process when the thread that started it ends, where that is Linux.

    Args:
        parent: the number of the process that started it; where it has ended already, so does this one.
        sent: the signal that this process then gets.
    """
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, sent, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
