"""Return memory to the system after a large request has freed it. Otherwise the C library of an engine on a CPU would
keep it.
"""

from __future__ import annotations

import ctypes
import threading

GIVE_BACK_S = 1.0
"""Shortest time between two returns of memory."""
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
_is_due = threading.Lock()


def give_back_soon() -> None:
    """Return all freed memory to the system within `GIVE_BACK_S`, in another thread."""
    if _trim is not None and _is_due.acquire(blocking=False):
        timer = threading.Timer(GIVE_BACK_S, _give_back)
        timer.daemon = True
        timer.start()


def _give_back() -> None:
    _is_due.release()
    assert _trim is not None
    _trim(0)
