"""Define the properties of one HTTP request that all parts of the server use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xrunner.server.access.keys import NO_KEY, Key
from xrunner.server.access.quota import Quota

ABORT = "xgpt.abort"
"""Key, in a request's scope, of the function that closes the connection without sending pending bytes."""


@dataclass(slots=True)
class RequestInfo:
    """The properties of a request that are known before its body is read. Routes add fields for the log.

    Attributes:
        received_s: `time.perf_counter` when the headers had arrived.
        read_s: `time.perf_counter` when the body had arrived, or 0 until then.
        quota: the requests and tokens that the key may still use. None means that the request does not generate tokens.
        phases: (name, start, end) of the phases waiting, encoding and decoding, on the clock of `received_s`.
        log: further fields of the log line. They never contain a prompt. The error of a refused request may contain a
            field's value."""

    id: str
    received_s: float
    deadline_header: str | None
    log: dict[str, Any]
    read_s: float = 0.0
    phases: tuple[tuple[str, float, float], ...] = ()
    key: Key = NO_KEY
    quota: Quota | None = None
