"""Read the bodies of requests, within limits on time, on size, and on the memory of all bodies together."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from starlette.requests import Request

from xrunner.heap import give_back_soon
from xrunner.server.api.errors import ApiError
from xrunner.server.request_info import RequestInfo
from xrunner.server.submission import Limits

FREE_BYTES = 64 << 10
"""Bytes of each request that are not counted, so that requests of usual size are never refused."""
SHARE = 2
"""One account's requests may take 1 / SHARE of the memory."""
LONG_BYTES = 1 << 20
"""If a request has more bytes than this, the process returns freed memory to the system afterwards."""


class Budget:
    """Counts the memory of all requests, and limits it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: Counter[str] = Counter()

    def change(self, account: str, more: int) -> None:
        """Add `more` to the counted bytes. The number may be negative. Raises ApiError: 503, there is no memory for
        these bytes now. The count has not changed."""
        if more > 0 and (self._taken.total() + more > self._most or self._taken[account] + more > self._most // SHARE):
            says = "too many long requests are being handled; try again later"
            raise ApiError(503, says, code="too_many_bodies", retry_after_s=1)
        self._taken[account] += more
        if not self._taken[account]:
            del self._taken[account]

    def total(self) -> int:
        return self._taken.total()


class RequestMemory:
    """Counts the memory of one request. This is first the body, then the text, and then the parts that are kept until
    the request has ended."""

    def __init__(self, account: str, bodies: Budget, requests: Budget) -> None:
        self._account = account
        self._bodies, self._requests = bodies, requests
        self._budget, self._counted = bodies, 0

    def set(self, num_bytes: int) -> None:
        """Count `num_bytes` for the request instead of the previous number. Raises ApiError (503)."""
        counted = max(0, num_bytes - FREE_BYTES)
        self._budget.change(self._account, counted - self._counted)
        self._counted = counted

    def keep(self, num_bytes: int) -> None:
        """Count `num_bytes` instead of the text's bytes, until `free` is called. Raises ApiError (503)."""
        self.free()
        self._budget = self._requests
        self.set(num_bytes)

    def free(self) -> None:
        if self._counted > LONG_BYTES:
            give_back_soon()
        self._budget.change(self._account, -self._counted)
        self._counted = 0


class Turns:
    """Lets only one long body proceed in each iteration of the event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def next(self) -> None:
        """Return in a later iteration of the event loop, after earlier callers."""
        async with self._turn:
            await asyncio.sleep(0)


class Bodies:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bodies, self._requests = Budget(limits.all_bodies_bytes), Budget(limits.all_requests_bytes)
        self._turns = Turns()

    def memory(self, http: Request) -> RequestMemory:
        """Return an object that counts the memory of a new request. The caller must free it."""
        info: RequestInfo = http.scope["xgpt"]
        return RequestMemory(info.key.name, self._bodies, self._requests)

    async def read(self, http: Request, memory: RequestMemory) -> bytearray:
        """Return a request's body. Raises ApiError: 415, the body is compressed; 413, it is too long; 408, it arrives
        too slowly; 503, there is no memory for it now."""
        info: RequestInfo = http.scope["xgpt"]
        limits, body = self._limits, bytearray()
        encoding = http.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise ApiError(415, "the body has a Content-Encoding; send it uncompressed", code="unsupported_encoding")
        declared = http.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limits.max_body_bytes:
            raise self._too_long()
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                async for part in http.stream():
                    body += part
                    if len(body) > limits.max_body_bytes:
                        raise self._too_long()
                    memory.set(len(body))
                    if len(body) > FREE_BYTES:
                        await self._turns.next()
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {limits.body_timeout_s} s") from None
        info.read_s = time.perf_counter()
        return body

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self._limits.max_body_bytes} bytes; send a shorter one")
