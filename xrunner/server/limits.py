"""What a server takes in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What comes beyond is refused.

    Attributes:
        max_waiting: outputs that may wait for their first step; then 429.
        answer_within_s: time from a request to its last token that is promised to who is taken in; who would take
            longer, by the plan and by the pace of late, gets 429. None: nothing is promised.
        max_body_bytes: longer bodies are answered with 413.
        body_timeout_s: how long a body may take to come in; then 408.
    """

    max_waiting: int = 4096
    answer_within_s: float | None = None
    max_body_bytes: int = 32 << 20
    body_timeout_s: float = 60
