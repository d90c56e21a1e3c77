"""Write logs for machines: one JSON object a line."""

from __future__ import annotations

import atexit
import datetime
import logging
import os
import queue
import sys
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from http import HTTPStatus
from typing import IO, NamedTuple

import msgspec

MAX_LINES = 4096
"""That may wait to be written."""
END_S = 1.0
"""For what still waits when the process ends."""
KINDS = 1000
"""Kinds of lines that are told apart: those that came last."""


class Rate(NamedTuple):
    """How many lines of a kind are written at once, and how many a second."""

    at_once: float
    per_s: float


ANSWERED, OTHERS = Rate(2000, 1000), Rate(100, 10)
"""Of requests that were answered as they asked; of everything else, which a client or a fault can have repeated."""


class NoFlood(logging.Filter):
    """Leaves lines out where too many of a kind come; the next one that stands says how many (`left_out`).

    Of a kind are lines of one logger, level, message (before its arguments are filled in) and HTTP status.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._kinds: OrderedDict[tuple[object, ...], tuple[float, float, int]] = OrderedDict()
        """Of each kind: lines that may still come at once, when that was said, and how many were left out since."""

    def filter(self, record: logging.LogRecord) -> bool:
        fields: dict[str, object] = getattr(record, "fields", {})
        status = fields.get("status")
        answered = isinstance(status, int) and HTTPStatus.OK <= status < HTTPStatus.BAD_REQUEST
        rate = ANSWERED if answered else OTHERS
        kind = (record.name, record.levelno, record.msg, status)
        with self._lock:
            now_s = time.monotonic()
            room, said_s, left_out = self._kinds.pop(kind, (rate.at_once, now_s, 0))
            room = min(rate.at_once, room + (now_s - said_s) * rate.per_s)
            stands = room >= 1
            self._kinds[kind] = (room - 1, now_s, 0) if stands else (room, now_s, left_out + 1)
            if len(self._kinds) > KINDS:
                self._kinds.popitem(last=False)
        if stands and left_out:
            record.__dict__["fields"] = fields | {"left_out": left_out}
        return stands


class JsonFormatter(logging.Formatter):
    """{"time", "level", "logger", "message", ...}: what stands in a record's `fields` follows.

    Encoded as JSON, whatever comes from outside cannot begin a line of its own.
    """

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class BackgroundHandler(logging.Handler):
    """Writes lines to a file descriptor in a thread of its own: a pipe that is not read holds up nothing else.

    What comes while `MAX_LINES` wait is lost; a line says how much was, once there is room again.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: queue.Queue[str] = queue.Queue(MAX_LINES)
        self._num_lost = 0
        threading.Thread(target=self._write, name="log", daemon=True).start()
        atexit.register(self.flush)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._num_lost:
                lost = logging.LogRecord(__name__, logging.WARNING, "", 0, "log lines were lost", (), None)
                lost.fields = {"lines": self._num_lost}
                self._lines.put_nowait(self.format(lost))
                self._num_lost = 0
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._num_lost += 1

    def flush(self) -> None:
        """Wait until all is written, but no longer than `END_S`."""
        end_s = time.monotonic() + END_S
        while self._lines.unfinished_tasks and time.monotonic() < end_s:
            time.sleep(0.005)

    def _write(self) -> None:
        while True:
            left = memoryview(f"{self._lines.get()}\n".encode())
            with suppress(OSError):  # there is nothing that could be told of it
                while left:
                    left = left[os.write(self._descriptor, left) :]
            self._lines.task_done()


def log_json(level: str, stream: IO[str] | None = None) -> None:
    """Send the logs of the process to `stream` (standard error, then in a thread of its own), from `level` on."""
    handler = BackgroundHandler(sys.stderr.fileno()) if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(NoFlood())
    logging.raiseExceptions = False  # a line that cannot be written must not become twenty on standard error
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # What libraries say below a warning is about themselves.
    for name in ("uvicorn", "asyncio", "httpx", "numba", "torch"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
