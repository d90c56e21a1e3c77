"""Restart a server whose event loop hangs. The watchdog is a thread, and the loop reports to it.

The limits are processor seconds of the main thread, so that a loaded machine is no hang. A restart keeps the process id
and the listening socket: clients that connect meanwhile wait. Running answers break off."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

from xgpt.core.processes import children_of, too_often, wait_for_children

BEAT_S, LOOK_S = 0.5, 1.0
HANG_CPU_S, HANG_IDLE_S = 10.0, 30.0
"""Processor seconds of the main thread without a report, and seconds in which it did nothing at all, after which it
hangs."""
HARD_CPU_S = 120.0
"""Processor seconds of the process without a report after which the kernel ends it. No thread can run if compiled code
holds the interpreter's lock."""
RESTARTS, PERIOD_S = 3, 600.0
END_S = 10.0
LISTENER, LOSSES = "XGPT_LISTENER", "XGPT_FRONT_LOSSES"
"""Variables that a restarted server inherits: the listening socket's file, and the times of earlier hangs."""

logger = logging.getLogger(__name__)


def inherited_listener() -> socket.socket | None:
    """Return the listening socket of the server that this process was before its restart, or None."""
    number = os.environ.pop(LISTENER, "")
    if not number.isdigit():
        return None
    with suppress(OSError):
        found = socket.socket(fileno=int(number))
        os.set_inheritable(found.fileno(), False)
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return found
        found.detach()
    return None


class Watchdog(threading.Thread):
    """Watches the event loop of the main thread. Start it in that thread, and let the loop run `report`.

    Args:
        listener: kept open over a restart.
        restarts: whether to start this process's command again. Otherwise the process ends with exit code 3."""

    def __init__(self, listener: socket.socket, *, restarts: bool) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._listener = listener
        self._restarts = restarts
        main = threading.main_thread()
        assert main.ident is not None
        self._thread, self._clock = main.ident, time.pthread_getcpuclockid(main.ident)
        self._native = main.native_id or 0
        self._over = threading.Event()
        self._beat()

    async def report(self) -> None:
        try:
            while True:
                self._beat()
                await asyncio.sleep(BEAT_S)
        finally:
            self._over.set()
            signal.setitimer(signal.ITIMER_PROF, 0)

    def run(self) -> None:
        looked_s = time.monotonic()
        while not self._over.wait(LOOK_S):
            now_s, used_s = time.monotonic(), self._used_s()
            if now_s - looked_s > HANG_IDLE_S / 4:  # the process was suspended
                self._beat_s = now_s
            looked_s = now_s
            if used_s - self._beat_used_s > HANG_CPU_S:
                self._end(f"it has reported nothing for {used_s - self._beat_used_s:.0f} processor seconds")
            idle_s = now_s - self._beat_s
            if idle_s > HANG_IDLE_S and self._sleeps():
                self._end(f"it has done nothing for {idle_s:.0f} s")

    def _sleeps(self) -> bool:
        with suppress(OSError):
            state = Path(f"/proc/self/task/{self._native}/stat").read_text().rpartition(")")[2].split()[0]
            return state not in "RD"
        return True

    def _used_s(self) -> float:
        return time.clock_gettime(self._clock)

    def _beat(self) -> None:
        self._beat_s, self._beat_used_s = time.monotonic(), self._used_s()
        signal.setitimer(signal.ITIMER_PROF, HARD_CPU_S)

    def _end(self, why: str) -> None:
        frame = sys._current_frames().get(self._thread)
        where = "" if frame is None else "".join(traceback.format_stack(frame)[-8:])
        losses = [float(each) for each in os.environ.get(LOSSES, "").split(",") if each]
        is_last = not self._restarts or too_often(losses, RESTARTS, PERIOD_S)
        then = "the server ends" if is_last else "the server starts again; running answers break off"
        logger.error("the event loop hangs: %s; %s", why, then, extra={"fields": {"traceback": where}})
        end_children(END_S)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if is_last:
            os._exit(3)
        os.set_inheritable(self._listener.fileno(), True)
        os.environ |= {LISTENER: str(self._listener.fileno()), LOSSES: ",".join(map(str, losses))}
        with suppress(Exception):
            sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def end_children(within_s: float) -> None:
    """Kill this process's children, whose own children end with them, and wait for them."""
    for child in children_of(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    wait_for_children(within_s)
