"""Parse HTTP/1.1 with limits on work: the time to parse a chunk of a body does not depend on its length."""

from __future__ import annotations

from typing import Any

import h11
from h11 import RemoteProtocolError

FREE_CHUNKS = 512
"""Number of a body's chunks that may have any length."""
CHUNK_BYTES = 512
"""Least mean length of further chunks. Each takes about 40 us, so a body of 16 MiB takes 1.3 s, in slices."""


class Parser(h11.Connection):
    """h11's parser of requests. A body in chunks is held back until the application asks for it, and its chunks are
    counted.

    Attributes:
        is_held: whether a body is held unparsed.
    """

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self.is_held = False
        self._num_chunks = self._num_bytes = 0

    def next_event(self) -> Any:
        """Return the next event; `h11.PAUSED` while a body is held.

        Raises:
            RemoteProtocolError: the bytes are not HTTP, or a body has too many chunks.
        """
        if self.is_held:
            return h11.PAUSED
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.is_held = any(name == b"transfer-encoding" for name, _ in event.headers)
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data) and event.chunk_start:
            self._num_chunks += 1
            self._num_bytes += len(event.data)
            if self._num_chunks > FREE_CHUNKS + self._num_bytes // CHUNK_BYTES:
                raise RemoteProtocolError(f"the body comes in more than {FREE_CHUNKS} short chunks")
        return event
