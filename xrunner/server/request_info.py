"""What is known of one HTTP request, for all parts of the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xrunner.server.access.keys import NO_KEY, Key
from xrunner.server.access.quota import Quota

ABORT = "xgpt.abort"
"""In a request's scope: breaks the connection off, with anything that has not been sent yet."""


@dataclass(slots=True)
class RequestInfo:
    """What is known of a request before its body is read; routes fill in what the log shall tell.

    Attributes:
        received_s: `time.perf_counter` when its head had come.
        read_s: the same when its body had; 0: not yet.
        deadline_header: the value of X-Deadline-S.
        key: what its client may do.
        quota: what its key has left; None: it asks for no tokens.
        phases: (name, start, end) of its waiting, encoding and decoding, on the clock of `received_s`.
        log: further fields of its line. Never anything that a prompt could have come into.
    """

    id: str
    received_s: float
    deadline_header: str | None
    log: dict[str, Any]
    read_s: float = 0.0
    phases: tuple[tuple[str, float, float], ...] = ()
    key: Key = NO_KEY
    quota: Quota | None = None
