"""Limit the requests and tokens per minute of each API key, with token buckets."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from xrunner.server.access.keys import Key
from xrunner.server.api.errors import ApiError


class Quotas:
    """The requests and tokens that each key may use now. They are stored by the key's name, so that a change of
    settings does not reset them."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, str], _Bucket] = {}

    def begin(self, key: Key) -> Quota:
        """Count one more request of this key. Raises ApiError: 429, the key's limit of requests per minute is
        reached."""
        quota = Quota(
            self._bucket(key, "requests", key.requests_per_minute), self._bucket(key, "tokens", key.tokens_per_minute)
        )
        if quota.requests is not None:
            quota.requests.take(1)
        return quota

    def _bucket(self, key: Key, kind: str, per_minute: float | None) -> _Bucket | None:
        if per_minute is None:
            return None
        bucket = self._buckets.get((key.name, kind))
        if bucket is None:
            bucket = self._buckets[key.name, kind] = _Bucket(key.name, kind, per_minute, self._clock)
        bucket.per_minute = per_minute
        return bucket


class Quota:
    """Tokens of a key that are reserved for one request."""

    def __init__(self, requests: _Bucket | None = None, tokens: _Bucket | None = None) -> None:
        self.requests = requests
        self.tokens = tokens
        self._reserved = 0

    def reserve(self, num_tokens: int) -> None:
        """Reserve tokens for a request's prompts and for the largest outputs that it may get. Raises ApiError: 429, the
        key's limit of tokens per minute is reached."""
        if self.tokens is not None:
            self.tokens.take(num_tokens)
            self._reserved = num_tokens

    def settle(self, num_tokens: int) -> None:
        """Account for the tokens that the request has actually used."""
        if self.tokens is not None:
            self.tokens.give(self._reserved - num_tokens)
            self._reserved = num_tokens


class _Bucket:
    """A token bucket. It holds at most the limit for one minute, and fills evenly.

    A cost above the capacity is taken once the bucket is full. The bucket's level then becomes negative."""

    def __init__(self, name: str, kind: str, per_minute: float, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._level = self._capacity
        self._what = f"{kind} a minute of key {name!r}"
        self._clock = clock
        self._at_s = clock()

    def take(self, cost: float) -> None:
        self._fill()
        missing = min(cost, self._capacity) - self._level
        if missing > 1e-9:
            wait_s = math.ceil(60 * missing / self.per_minute)
            says = f"this exceeds the {self.per_minute:g} {self._what}; try again in {wait_s} s"
            raise ApiError(429, says, code="rate_limit_exceeded", retry_after_s=wait_s)
        self._level -= cost

    def give(self, cost: float) -> None:
        """Return unused tokens to the bucket. A negative number charges further tokens."""
        self._fill()
        self._level = min(self._level + cost, self._capacity)

    @property
    def _capacity(self) -> float:
        return max(1.0, self.per_minute)

    def _fill(self) -> None:
        now_s = self._clock()
        filled = self._level + (now_s - self._at_s) * self.per_minute / 60
        self._level, self._at_s = min(filled, self._capacity), now_s
