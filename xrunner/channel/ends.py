"""Define the two ends of the channel: frames of messages over Unix sockets.

A frame is a message preceded by its length in four bytes. Decoding a message executes no part of it.
"""

from __future__ import annotations

import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

from xrunner.channel.messages import Shortening, encode

READ_BYTES = 1 << 18
FRAME_BYTES = 256 << 20
T = TypeVar("T")
Decode = Callable[[bytes], T]
_LENGTH = struct.Struct("!I")


class _Frames:
    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, some: bytes) -> None:
        self._bytes += some

    def whole(self) -> Iterator[bytes]:
        """Raises EOFError if a frame is longer than `FRAME_BYTES`."""
        start, size = 0, _LENGTH.size
        while len(self._bytes) >= start + size:
            (length,) = _LENGTH.unpack_from(self._bytes, start)
            if length > FRAME_BYTES:
                raise EOFError
            if len(self._bytes) < start + size + length:
                break
            yield bytes(self._bytes[start + size : start + size + length])
            start += size + length
        del self._bytes[:start]


def _frame(message: object) -> bytes:
    content = encode(message)
    return _LENGTH.pack(len(content)) + content


class EngineEnd(Generic[T]):
    """The engine process's end of the channel. Any thread may send. One thread receives."""

    def __init__(self, connected: socket.socket, decode: Decode[T]) -> None:
        connected.setblocking(True)
        self._socket = connected
        self._decode = decode
        self._frames = _Frames()
        self._received: deque[bytes] = deque()
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: object) -> None:
        with self._lock, suppress(OSError):
            self._socket.sendall(_frame(message))

    def receive(self, timeout_s: float) -> T | None:
        """Return the next message, or None if none comes in time.

        Raises:
            EOFError: the front has closed the channel.
        """
        end_s = time.monotonic() + timeout_s
        while not self._received:
            if not self._poll.poll(max(0.0, 1000 * (end_s - time.monotonic()))):
                return None
            try:
                some = self._socket.recv(READ_BYTES)
            except OSError:
                some = b""
            if not some:
                raise EOFError
            self._frames.add(some)
            self._received.extend(self._frames.whole())
        return self._decode(self._received.popleft())

    def end(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Call this only when no other thread receives."""
        self._socket.close()


class FrontEnd(Generic[T]):
    """The front's side of the channel. Only one thread may use it. Only `wait` blocks."""

    def __init__(self, connected: socket.socket, decode: Decode[T]) -> None:
        connected.setblocking(False)
        self.has_gone = False
        self._decode = decode
        self._socket = connected
        self._frames = _Frames()
        self._received: deque[bytes] = deque()
        self._unsent = bytearray()
        self._shortened = Shortening()
        self._is_blocked = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(connected, selectors.EVENT_READ)

    def fileno(self) -> int:
        # The selector's descriptor, not the socket's: it is also readable when unsent bytes can be written.
        descriptor: int = self._selector.fileno()
        return descriptor

    def wait(self, timeout_s: float) -> None:
        if not self._received:
            self._selector.select(timeout_s)

    def send(self, message: object) -> None:
        is_first = not self._unsent
        self._unsent += _frame(self._shortened(message))
        if is_first:
            self._write()

    def receive(self) -> T | None:
        if not self._received and not self.has_gone:
            for _, mask in self._selector.select(0):
                if mask & selectors.EVENT_WRITE:
                    self._write()
                if mask & selectors.EVENT_READ:
                    self._read()
        return self._decode(self._received.popleft()) if self._received else None

    def _read(self) -> None:
        try:
            some = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            some = b""
        self._frames.add(some)
        try:
            self._received.extend(self._frames.whole())
        except EOFError:
            some = b""
        if not some:
            self.has_gone = True
            self._selector.unregister(self._socket)

    def _write(self) -> None:
        if self.has_gone:
            self._unsent.clear()
            return
        with suppress(BlockingIOError):
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except (BrokenPipeError, ConnectionError):
                self._unsent.clear()  # `receive` then reports that the engine has gone
        if bool(self._unsent) != self._is_blocked:
            self._is_blocked = not self._is_blocked
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._is_blocked else 0)
            self._selector.modify(self._socket, wanted)

    def close(self) -> None:
        """The engine's process then ends."""
        self._selector.close()
        self._socket.close()


def pair() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends:
        # Large enough for the messages of many steps, which accumulate while the front is busy.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    return ends
