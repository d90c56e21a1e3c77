"""Logs for machines: one JSON object a line."""

from __future__ import annotations

import datetime
import logging
import sys
from typing import IO

import msgspec


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


def log_json(level: str, stream: IO[str] | None = None) -> None:
    """Send the logs of the process to `stream` (standard error), from `level` on."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # What libraries say below a warning is about themselves.
    for name in ("uvicorn", "asyncio", "httpx", "numba", "torch"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
