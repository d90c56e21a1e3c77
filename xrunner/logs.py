"""Write logs for machines: one JSON object on each line."""

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

from xgpt.core.errors import cut

MAX_LINES = 4096
MAX_ITEMS = 100
END_S = 1.0
MAX_CHARACTERS, MAX_TRACEBACK = 1000, 8000
"""Largest number of characters that are written of a message, and of the end of a traceback."""
KINDS = 1000
"""Number of kinds of lines that are remembered. The most recent kinds are kept."""


class Rate(NamedTuple):
    at_once: float
    per_s: float


ANSWERED, OTHERS = Rate(2000, 1000), Rate(100, 2)
"""Rates for requests that succeeded, and for all other lines. A client or a fault may repeat the latter without end."""


class NoFlood(logging.Filter):
    """Drops lines if there are too many of a kind. The next line of that kind states how many were dropped
    (`left_out`).

    A kind is a logger, a level, a message (before its arguments are filled in) and an HTTP status. Each kind writes
    less than 100 MB a day, except for requests that succeeded.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._kinds: OrderedDict[tuple[object, ...], tuple[float, float, int]] = OrderedDict()

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
    """Formats records as {"time", "level", "logger", "message", ...}, followed by a record's `fields`.

    In JSON, text from clients cannot begin a new line of the log.
    """

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": cut(record.getMessage(), MAX_CHARACTERS),
            **{name: _short(value) for name, value in getattr(record, "fields", {}).items()},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)[-MAX_TRACEBACK:]
        return msgspec.json.encode(line, enc_hook=str).decode()


def _short(value: object) -> object:
    if isinstance(value, str):
        return cut(value)
    if isinstance(value, list):
        return [_short(item) for item in value[:MAX_ITEMS]]
    return value


class BackgroundHandler(logging.Handler):
    """Writes lines to a file descriptor in its own thread, so that an unread pipe blocks no other thread.

    If `MAX_LINES` lines are waiting, further lines are lost, and a later line states how many were lost.
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
        end_s = time.monotonic() + END_S
        while self._lines.unfinished_tasks and time.monotonic() < end_s:
            time.sleep(0.005)

    def _write(self) -> None:
        while True:
            left = memoryview(f"{self._lines.get()}\n".encode())
            with suppress(OSError):  # an error here cannot be reported anywhere
                while left:
                    left = left[os.write(self._descriptor, left) :]
            self._lines.task_done()


def log_json(level: str, stream: IO[str] | None = None) -> None:
    handler = BackgroundHandler(sys.stderr.fileno()) if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(NoFlood())
    logging.raiseExceptions = False  # a line that cannot be written must not lead to a traceback on standard error
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Below warnings, libraries log about themselves.
    for name in ("uvicorn", "asyncio", "httpx", "numba", "torch"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
