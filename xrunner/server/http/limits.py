"""Limits beyond which a server refuses requests."""

from __future__ import annotations

from dataclasses import dataclass

from xgpt.core.errors import InputError
from xgpt.core.schema import Plan
from xrunner.server.api.allowance import OutputRule


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits beyond which requests are refused.

    Attributes:
        max_waiting: number of outputs that may wait for their first step. Further outputs get 429. An API key may
            always have its share of this number waiting.
        answer_within_s: time from a request to its last token that is promised to each accepted request. A request that
            would take longer, by the plan and the recent pace, gets 429. None means no promise.
        request_timeout_s: longest time from a request to its last token, after which it ends with 504. None means no
            limit.
        default_max_tokens, max_max_tokens: see `OutputRule`.
        max_body_bytes: longer bodies are answered with 413.
        all_bodies_bytes: memory of all bodies together, from their first byte until their prompts are token ids,
            without the first 64 KiB of each. An account may use half of it. Further bodies get 503.
        all_requests_bytes: the same limit for requests after their prompts have become token ids, until the requests
            have ended.
        body_timeout_s: time in which a body must arrive; otherwise 408.
    """

    max_waiting: int = 4096
    answer_within_s: float | None = None
    request_timeout_s: float | None = 600
    default_max_tokens: int | None = None
    max_max_tokens: int | None = None
    max_body_bytes: int = 16 << 20
    all_bodies_bytes: int = 256 << 20
    all_requests_bytes: int = 1 << 30
    body_timeout_s: float = 60

    def __post_init__(self) -> None:
        """Raise InputError if limits contradict each other."""
        most = self.max_max_tokens
        if most is not None and (self.default_max_tokens or 0) > most:
            raise InputError(
                "default_max_tokens", self.default_max_tokens, f"it is more than `max_max_tokens={most}`; lower it"
            )

    def output_rule(self, plan: Plan | None) -> OutputRule:
        """Return the rule on the length of outputs under this plan."""
        if plan is None:
            return OutputRule(self.default_max_tokens, self.max_max_tokens)
        return OutputRule(self.default_max_tokens, self.max_max_tokens, plan.promised_output, plan.may_outgrow)
