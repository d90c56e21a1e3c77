"""Read the bodies of requests, within limits on time, on size, and on the memory of all together."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from xrunner.server.api.errors import ApiError
from xrunner.server.http.limits import Limits
from xrunner.server.request_info import RequestInfo

FREE_BYTES = 64 << 10
"""Bytes of each body that do not count, so that requests of usual size always get through."""
SHARE = 2
"""An account's bodies may take this part of the memory: one half."""


class Bodies:
    """Memory that bodies take from their first byte until their prompts are token ids."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held: Counter[str] = Counter()
        """Bytes that count, by account."""

    @asynccontextmanager
    async def read(self, http: Request) -> AsyncIterator[bytearray]:
        """Read a request's body, and hold its memory until the end of the block.

        Raises:
            ApiError: 413, the body is too long; 408, it arrives too slowly; 503, there is no memory for it now.
        """
        info: RequestInfo = http.scope["xgpt"]
        name, limits = info.key.name, self._limits
        body, counted = bytearray(), 0
        declared = http.headers.get("content-length", "")
        try:
            if declared.isdecimal() and int(declared) > limits.max_body_bytes:
                raise self._too_long()
            try:
                async with asyncio.timeout(limits.body_timeout_s):
                    async for part in http.stream():
                        body += part
                        if len(body) > limits.max_body_bytes:
                            raise self._too_long()
                        self._hold(name, more := max(0, len(body) - FREE_BYTES) - counted)
                        counted += more
            except TimeoutError:
                raise ApiError(408, f"the body did not come within {limits.body_timeout_s} s") from None
            info.read_s = time.perf_counter()
            yield body
        finally:
            self._held[name] -= counted
            if not self._held[name]:
                del self._held[name]

    def _hold(self, name: str, more: int) -> None:
        most = self._limits.all_bodies_bytes
        if self._held.total() + more > most or self._held[name] + more > most // SHARE:
            raise ApiError(
                503, "too many long bodies are being read; try again later", code="too_many_bodies", retry_after_s=1
            )
        self._held[name] += more

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self._limits.max_body_bytes} bytes")
