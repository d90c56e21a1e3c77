"""Hostile clients of a server: what they send, and how they are answered.

Traffic goes to the loopback interface alone.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPException, HTTPResponse
from typing import Any

MIB = 1 << 20
ADMIN_KEY = "attack-suite-key-0123456789"

_process: ProcessPoolExecutor | None = None


def elsewhere(attack: Callable[..., Any], *arguments: Any) -> Any:
    """What an attack returns that runs in a process of its own: it would hold up what is felt here.

    One process serves all attacks, one after the other; it is started at the first one.
    """
    global _process
    if _process is None:
        _process = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    try:
        return _process.submit(attack, *arguments).result(timeout=200)
    except TimeoutError:
        _process = None  # it is still at it
        raise


def connect(address: tuple[str, int], timeout_s: float = 30.0) -> socket.socket:
    return socket.create_connection(address, timeout=timeout_s)


def request(
    body: Any, *, method: str = "POST", length: int | None = None, extra: str = "", path: str = "", key: str = ADMIN_KEY
) -> bytes:
    """A whole request; `length`: another Content-Length than its body's."""
    content = body if isinstance(body, bytes) else json.dumps({"model": "small", **body}).encode()
    lines = [
        f"{method} {path or '/v1/completions'} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {key}",
        f"Content-Length: {len(content) if length is None else length}",
    ]
    return "\r\n".join([*lines, extra + "\r\n"]).encode() + content


def read_all(client: socket.socket) -> bytes:
    parts = []
    try:
        while part := client.recv(1 << 16):
            parts.append(part)
    except OSError:
        pass
    return b"".join(parts)


def statuses(address: tuple[str, int], requests: list[bytes], at_once: int = 60) -> list[int]:
    """Sends each on a connection of its own; 0: no answer."""

    def ask(raw: bytes) -> int:
        with connect(address, 150) as client:
            try:
                client.sendall(raw)
                answer = HTTPResponse(client)
                answer.begin()
                answer.read()
                return answer.status
            except (OSError, HTTPException):
                return 0

    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(ask, requests))


def send_unfinished(address: tuple[str, int], count: int) -> None:
    raw = request(b" " * (15 * MIB), length=16 * MIB)
    with ExitStack() as clients:

        def begin(_: int) -> None:
            client = clients.enter_context(connect(address))
            with suppress(OSError):
                client.sendall(raw)

        with ThreadPoolExecutor(16) as threads:
            list(threads.map(begin, range(count)))
        time.sleep(1)


def answers_of(address: tuple[str, int], sent: bytes) -> list[int]:
    """Statuses of all answers, interim ones left out, to a client that sends this and no more."""
    with connect(address) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        found = [int(part[:3]) for part in read_all(client).split(b"HTTP/1.1 ")[1:]]
    return [status for status in found if status >= 200]


def flood(address: tuple[str, int], raw: bytes, seconds: float, at_once: int = 40) -> Counter[int]:
    """Statuses that as many clients get which send the same again and again, each on one connection."""
    end_s = time.monotonic() + seconds

    def repeat(_: int) -> Counter[int]:
        found: Counter[int] = Counter()
        with connect(address) as client:
            while time.monotonic() < end_s:
                client.sendall(raw)
                answer = HTTPResponse(client)
                answer.begin()
                answer.read()
                found[answer.status] += 1
        return found

    with ThreadPoolExecutor(at_once) as threads:
        return sum(threads.map(repeat, range(at_once)), Counter())


def tiny_chunks(path: str, count: int = 400_000, key: str = "") -> bytes:
    """A body of blanks, one byte a chunk."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    return head.encode() + b"\r\n" + b"1\r\n \r\n" * count


def send_and_read_nothing(address: tuple[str, int], raw: bytes, count: int, seconds: float) -> None:
    """Send the same on as many connections, and leave the answers unread for so long."""
    with ExitStack() as clients:

        def send(_: int) -> None:
            client = clients.enter_context(connect(address, seconds))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            with suppress(OSError):
                client.sendall(raw)

        with ThreadPoolExecutor(16) as threads:
            list(threads.map(send, range(count)))
        time.sleep(seconds)
