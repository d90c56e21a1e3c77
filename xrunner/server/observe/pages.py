"""Make pages in one thread beside the event loop that carries tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec


class Pages:
    """Makes each page at most once at a time. Requests that come meanwhile get the same page."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "pages")
        self._making: dict[str, asyncio.Future[bytes]] = {}

    async def get(self, path: str, read: Callable[[], Callable[[], Any]]) -> bytes:
        """Return a page, as JSON if it is not bytes. `read` runs in the loop; what it returns runs in the thread."""
        if path not in self._making:
            making = asyncio.get_running_loop().run_in_executor(self._thread, _made, read())
            self._making[path] = making
            making.add_done_callback(lambda _: self._making.pop(path))
        return await asyncio.shield(self._making[path])

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _made(make: Callable[[], Any]) -> bytes:
    value = make()
    return value if isinstance(value, bytes) else msgspec.json.encode(value)
