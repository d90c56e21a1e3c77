"""The limits on what a server accepts."""

from __future__ import annotations

from dataclasses import dataclass

from xgpt.errors import InputError
from xgpt.schema import Plan
from xrunner.server.api.allowance import OutputRule


@dataclass(frozen=True, slots=True)
class Limits:
    """What comes beyond is refused.

    Attributes:
        max_waiting: outputs that may wait for their first step; then 429. An API key may always have its share of them.
        answer_within_s: time from a request to its last token that is promised to each that is taken in; one that would
            take longer, by the plan and by the recent pace, gets 429. None: nothing is promised.
        request_timeout_s: time from a request to its last token; then 504. None: as long as it takes.
        default_max_tokens, max_max_tokens: see `OutputRule`.
        max_body_bytes: longer bodies are answered with 413.
        all_bodies_bytes: what bodies on their way in may take together, what each has up to 64 KiB left out; of it an
            account has half at most; then 503.
        body_timeout_s: how long a body may take to come in; then 408.
    """

    max_waiting: int = 4096
    answer_within_s: float | None = None
    request_timeout_s: float | None = 600
    default_max_tokens: int | None = None
    max_max_tokens: int | None = None
    max_body_bytes: int = 16 << 20
    all_bodies_bytes: int = 256 << 20
    body_timeout_s: float = 60

    def __post_init__(self) -> None:
        """Raises InputError: they contradict each other."""
        most = self.max_max_tokens
        if most is not None and (self.default_max_tokens or 0) > most:
            raise InputError(
                "default_max_tokens", self.default_max_tokens, f"it is more than `max_max_tokens={most}`; lower it"
            )

    def output_rule(self, plan: Plan | None) -> OutputRule:
        """Return how long outputs may be while this plan runs."""
        if plan is None:
            return OutputRule(self.default_max_tokens, self.max_max_tokens)
        return OutputRule(self.default_max_tokens, self.max_max_tokens, plan.promised_output, plan.may_outgrow)
