from __future__ import annotations

import asyncio
import logging
import socket
import struct
from contextlib import suppress
from typing import Any, cast

import h11
from h11 import RemoteProtocolError
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from xrunner.server.access.hosts import OPEN_PATHS
from xrunner.server.api.errors import ApiError, ErrorResponse
from xrunner.server.api.writers import COMMENT
from xrunner.server.http.listener import AcceptedSocket, Listener, Phase
from xrunner.server.request_info import ABORT

HEAD_TIMEOUT_S = 10.0
"""Seconds for a TLS handshake, and for a request's head, including the wait for the first request."""
KEEP_ALIVE_S = 120
"""Seconds for which an idle connection is kept. Proxies and clients keep connections for less time (Go 90 s, nginx 60
s), so they close a connection first, and the server never closes one while a request arrives."""
WRITE_TIMEOUT_S = 30.0
"""Seconds in which a client must read bytes that were written to it. At most 64 KiB are written at a time."""
REST_TIMEOUT_S = 5.0
"""Seconds for the rest of a body whose request has been answered, and for the last bytes of a closing connection."""
READ_AT_ONCE = 16 << 10
"""Bytes given to the parser at once. The parser refuses a head that is longer than its limit only if the head arrives
in several pieces, so pieces must be small."""
ACCEPT_AT_ONCE = 16
PROBE_S = 0.05, 1.0
"""Shortest and longest interval between two checks of whether a client that has stopped sending still reads."""

logger = logging.getLogger(__name__)
_uvicorn = logging.getLogger(f"{__name__}.uvicorn")
_uvicorn.setLevel(logging.ERROR)  # lower levels would log clients' mistakes, which answers already report


FREE_CHUNKS = 512
"""Number of a body's chunks that may be short without being counted against `CHUNK_BYTES`."""
CHUNK_BYTES = 512
"""Least mean length, in bytes, of the other chunks. Each chunk takes about 40 us."""


class Parser(h11.Connection):
    """h11's parser of requests. A body in chunks is not parsed until the application asks for it, and its chunks are
    counted."""

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self.is_held = False
        self._num_chunks = self._num_bytes = 0

    def next_event(self) -> Any:
        """Return the next event, or `h11.PAUSED` while `is_held`. Raises RemoteProtocolError: the bytes are not HTTP,
        or a body has too many chunks."""
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


class Protocol(H11Protocol):
    """A client's connection. Every wait on it has a time limit."""

    def __init__(self, listener: Listener, config: Config, state: ServerState, app_state: dict[str, Any]) -> None:
        super().__init__(config, state, app_state)
        self.conn: Parser = Parser(READ_AT_ONCE)
        self.app = self._on_demand(self.app)
        self.logger = _uvicorn
        self.access_log = False
        self._listener = listener
        self._accepted: AcceptedSocket | None = None
        self._now = self.loop.time
        self._head_since: float | None = self._now()
        """Time since which the head of a request has been awaited. None means that a request is being answered, or that
        the connection may be idle."""
        self._stalled_since: float | None = None
        """Time since which the client has not read the bytes that were written."""
        self._resting_since: float | None = None
        """Time since which the rest of an answered request's body, or the end of a closing connection, has been
        awaited."""
        self._has_sent_all = False
        self._streams_events = False
        self._unparsed = b""
        """Bytes that have arrived of a body that the parser does not parse yet."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._accepted = self._listener.of(transport.get_extra_info("socket").fileno())
        if self._accepted is None:  # the connection was dropped during its handshake
            transport.abort()
            return
        self._accepted.transport = transport
        if self._listener.num_open > self._listener.most:
            self.app = _probes_only(self.app)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection, and the reference cycles that would keep its memory until the next garbage collection."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # which uvicorn does only if there was no error
        if self._accepted is not None:
            self._accepted.transport = None
            self._accepted = None
        self.app = self.cycle = self.scope = cast(Any, None)

    def data_received(self, data: bytes) -> None:
        if self._head_since is None and self._is_at_rest and not self._has_unread_body:
            self._head_since = self._now()
        try:
            for start in range(0, len(data), READ_AT_ONCE):
                if self.transport.is_closing():
                    return
                if self.conn.is_held:
                    self._unparsed += data[start:]
                    self.flow.pause_reading()
                    break
                super().data_received(data[start : start + READ_AT_ONCE])
        except Exception:
            logger.exception("a connection has failed")
            self.transport.abort()
            return
        self._note_phase()

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None:
            cast(Scope, self.scope)[ABORT] = self._let_go

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection: a client that sends no more may still read answers. Over TLS, asyncio closes the
        connection."""
        if self._is_at_rest or self.cycle.more_body:
            return None
        self._has_sent_all = True
        self._probe(PROBE_S[0])
        return True

    def pause_writing(self) -> None:
        self._stalled_since = self._now()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stalled_since = None
        super().resume_writing()

    def on_response_complete(self) -> None:
        if self.app is None:  # the connection is lost, although a TLS transport is then not closing
            return
        super().on_response_complete()
        if self._is_at_rest:
            if self._has_sent_all:
                self.transport.close()
            elif self.conn.trailing_data[0] and not self._has_unread_body:
                self._head_since = self._now()  # a part of the next head has already arrived
        self._note_phase()

    def end_if_overdue(self) -> None:
        now = self._now()
        if not (self.transport.is_closing() or self._has_unread_body):
            self._resting_since = None
        elif self._resting_since is None:
            self._resting_since = now
        limits = (
            (self._head_since, HEAD_TIMEOUT_S),
            (self._stalled_since, WRITE_TIMEOUT_S),
            (self._resting_since, REST_TIMEOUT_S),
        )
        if any(since is not None and now - since > seconds for since, seconds in limits):
            self._let_go()

    def _let_go(self) -> None:
        """If the client has not read all, reset the connection, so that the operating system does not hold up to 4 MB
        until the client reads or has gone."""
        if self._stalled_since is not None:
            opened = self.transport.get_extra_info("socket")
            with suppress(OSError):
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Send an error in the same format as all other errors, unless an answer has begun."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        if not self._is_at_rest:
            self.cycle.disconnected = True  # the request is answered here
        says = (
            "the request is not HTTP/1.1, or its head is longer than 16 KiB, or its body comes in more than "
            f"{FREE_CHUNKS} chunks of less than {CHUNK_BYTES} bytes"
        )
        error = ApiError(400, says, code="bad_http")
        body = error.body()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _on_demand(self, app: ASGIApp) -> Any:
        """Return the app, changed so that a body's chunks are parsed only when the app asks for them. It asks after the
        key has been checked."""

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            async def receive_more() -> Message:
                if self.conn.is_held and self.app is not None and not self.transport.is_closing():
                    self.conn.is_held = False
                    rest, self._unparsed = self._unparsed, b""
                    self.handle_events()
                    self.data_received(rest)
                return await receive()

            async def send_on(message: Message) -> None:
                if message["type"] == "http.response.start":
                    headers = list(message.get("headers", ()))
                    self._streams_events = dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")
                    if self.conn.is_held:
                        message = {**message, "headers": [*headers, (b"connection", b"close")]}
                await send(message)

            await app(scope, receive_more, send_on)

        return run

    def _should_upgrade(self) -> bool:
        return False

    @property
    def _is_at_rest(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _has_unread_body(self) -> bool:
        return self._is_at_rest and self.conn.their_state is h11.SEND_BODY

    def _note_phase(self) -> None:
        phase = Phase.HEAD
        if not self._is_at_rest:
            self._head_since = None
            phase = Phase.BODY if self.cycle.more_body else Phase.ANSWER
        if self._accepted is not None and phase is not self._accepted.phase:
            self._listener.enter(self._accepted, phase)

    def _probe(self, delay_s: float) -> None:
        """Check whether a client that has stopped sending still reads. Only a write can show this: an interim response
        before the answer, or a comment within a stream of events."""
        if self.transport.is_closing() or self._is_at_rest:
            return
        if self.conn.our_state is h11.SEND_RESPONSE and self.scope["http_version"] != "1.0":
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        elif self.conn.our_state is h11.SEND_BODY and self._streams_events:
            self.transport.write(self.conn.send(h11.Data(data=COMMENT)) or b"")
        self.loop.call_later(delay_s, self._probe, min(2 * delay_s, PROBE_S[1]))


def _probes_only(app: ASGIApp) -> Any:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            await app(scope, receive, send)
            return
        headers = {"connection": "close"}
        error = ApiError(
            503,
            "all connections are in use; try again later",
            code="too_many_connections",
            retry_after_s=1,
            headers=headers,
        )
        await ErrorResponse(error)(scope, receive, send)

    return answer
