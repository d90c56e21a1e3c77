"""The facts about one HTTP request that all parts of the server use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xrunner.server.access.keys import NO_KEY, Key
from xrunner.server.access.quota import Quota

ABORT = "xgpt.abort"
"""Key in a request's scope: closes the connection at once, without sending pending bytes."""


@dataclass(slots=True)
class RequestInfo:
    """The facts about a request that are known before its body is read; routes fill in fields for the log.

    Attributes:
        received_s: `time.perf_counter` when its head had arrived.
        read_s: `time.perf_counter` when its body had arrived, or 0 before that.
        deadline_header: the value of X-Deadline-S.
        key: rights and limits of its client.
        quota: the requests and tokens that its key may still use. None means that the request asks for no tokens.
        phases: (name, start, end) of its waiting, encoding and decoding, on the clock of `received_s`.
        log: further fields of its log line, which never contain a prompt. The error of a refused request may name a
            field's value.
    """

    id: str
    received_s: float
    deadline_header: str | None
    log: dict[str, Any]
    read_s: float = 0.0
    phases: tuple[tuple[str, float, float], ...] = ()
    key: Key = NO_KEY
    quota: Quota | None = None
