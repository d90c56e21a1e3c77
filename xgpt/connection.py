"""HTTP/1.1 connections to servers of others: h11 for the protocol, and asyncio's streams for the network.

The load client shares the machine with the measured engine, and on a few cores it takes time from the engine. A request
takes 1.6 ms of a core's time with httpx, and 0.6 ms with this module.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TypeVar
from urllib.parse import SplitResult, quote, urlsplit

import h11

from xgpt.core.errors import InputError

T = TypeVar("T")
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 600.0
"""A request has failed if the server sends nothing for this long. A server of xgpt answers 504 after this time."""
READ_BYTES = 1 << 16
MOST_BYTES = 1 << 26

Failure = (OSError, h11.ProtocolError)
"""Errors of a request: no answer in time, an answer that is not HTTP, or a broken connection."""


@cache
def tls_context(ca_file: Path | None = None) -> ssl.SSLContext:
    """Return a TLS context that trusts the authorities in `ca_file`. None means those in SSL_CERT_FILE or else the
    system's.

    The context is cached, since creating one reads the certificates of about a hundred authorities.

    Raises:
        InputError: the file contains no certificate.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise InputError("ca_file", str(ca_file), f"it must contain certificates in PEM: {error.strerror}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def own_api_key() -> str | None:
    """Return the key in XGPT_API_KEY, or None if the variable is not set.

    Raises:
        InputError: the key is malformed. The message never contains the key.
    """
    key = os.environ.get("XGPT_API_KEY")
    if key and not (key.isascii() and key.isprintable() and len(key.split()) == 1):
        raise InputError("XGPT_API_KEY", "*" * len(key), "a key consists of printable ASCII characters without blanks")
    return key or None


def parts_of(url: str, field: str = "url") -> tuple[SplitResult, str, int | None]:
    """Return the parts of a server's URL, its host and its port.

    Raises:
        InputError: `url` is not an http or https URL. Errors call it `field`.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # a label may be empty or too long
    except ValueError:
        parts, host, port = SplitResult("", "", "", "", ""), None, None
    if not host or parts.scheme not in ("http", "https"):
        raise InputError(field, url, "write it as http://HOST:PORT")
    return parts, host, port


async def within(seconds: float, work: Awaitable[T], late: str) -> T:
    """Await `work` for at most this time, and return its result.

    Raises:
        TimeoutError: `work` takes longer than `seconds`. The message begins with `late`.
    """
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise TimeoutError(f"{late} within {seconds:g} s") from None


def answer_of(
    url: str, *, seconds: float, body: bytes = b"", most: int = MOST_BYTES, api_key: str | None = None
) -> tuple[int, bytes]:
    """Ask a server once, and return its answer's status and body. Redirects are not followed.

    Args:
        seconds: limit on the whole exchange, however slowly the server sends.
        body: JSON to post. Without it, the request is a GET.
        most: limit on the answer's bytes.

    Raises:
        OSError, h11.ProtocolError: the request failed (see `Failure`).
        InputError: `url` is not an http or https URL.
    """

    async def ask() -> tuple[int, bytes]:
        connection = Connection(url, api_key=api_key, most=most)
        try:
            return await connection.ask("POST" if body else "GET", "", body), await connection.read_all()
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as apart:  # the caller may run in an event loop
        return apart.submit(asyncio.run, within(seconds, ask(), "no whole answer")).result()


class Connection:
    """A connection to one server. It carries one request at a time.

    The connection is opened for the first request. It is opened again if the server has closed it, or if the previous
    response was not read completely.

    Args:
        url: URL of the server. A path in it becomes a prefix of all requests' paths.
        ca_file: certificate authorities for an https server. None means the default of `tls_context`.

    Raises:
        InputError: `url` is not an http or https URL, or `ca_file` contains no certificate.
    """

    def __init__(
        self, url: str, ca_file: Path | None = None, api_key: str | None = None, most: int | None = None
    ) -> None:
        parts, host, port = parts_of(url)
        self._tls = tls_context(ca_file) if parts.scheme == "https" else None
        self._address = host, port or (443 if self._tls else 80)
        self._prefix = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
        self._query = "?" + quote(parts.query, safe="/?%:@!$&'()*+,;=~") if parts.query else ""
        self._most = most or MOST_BYTES
        address = parts.netloc.rpartition("@")[2]
        self._headers = [("host", address if address.isascii() else address.encode("idna").decode()), ("accept", "*/*")]
        if api_key is not None:
            self._headers.append(("authorization", f"Bearer {api_key}"))
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self._http: h11.Connection

    async def ask(self, method: str, path: str, body: bytes = b"") -> int:
        """Send a request with a JSON body, and return the response's status.

        Raises:
            OSError, h11.ProtocolError: the request failed (see `Failure`).
        """
        if self._writer is None or self._http.our_state is not h11.IDLE or self._reader.at_eof():
            self.close()
            opening = asyncio.open_connection(*self._address, ssl=self._tls)
            reader, writer = await within(CONNECT_TIMEOUT_S, opening, "the server accepted no connection")
            self._reader, self._writer, self._http = reader, writer, h11.Connection(h11.CLIENT)
        headers = self._headers
        if body:
            headers = [*headers, ("content-type", "application/json"), ("content-length", str(len(body)))]
        events = (
            h11.Request(method=method, target=(self._prefix + path or "/") + self._query, headers=headers),
            *([h11.Data(data=body)] if body else []),
            h11.EndOfMessage(),
        )
        self._writer.write(b"".join(self._http.send(event) or b"" for event in events))
        await self._writer.drain()
        while not isinstance(event := await self._next(), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise h11.RemoteProtocolError("the server closed the connection without an answer")
        return event.status_code

    async def get(self, path: str) -> tuple[int, bytes]:
        return await self.ask("GET", path), await self.read_all()

    async def read(self) -> bytes | None:
        event = await self._next()
        if isinstance(event, h11.Data):
            return bytes(event.data)
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        return None

    async def read_all(self) -> bytes:
        body = bytearray()
        while (piece := await self.read()) is not None:
            body += piece
            if len(body) > self._most:
                self.close()
                raise h11.RemoteProtocolError(f"its answer has over {self._most >> 20} MiB")
        return bytes(body)

    def close(self) -> None:
        if self._writer is not None:
            if self._tls:
                self._writer.transport.abort()  # a clean end of TLS needs the event loop, which may have ended
            self._writer.close()
            self._writer = None

    async def _next(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            read = within(READ_TIMEOUT_S, self._reader.read(READ_BYTES), "the server sent nothing")
            self._http.receive_data(await read)
        return event
