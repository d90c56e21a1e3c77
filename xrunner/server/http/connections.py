from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
from collections import OrderedDict
from contextlib import suppress
from enum import IntEnum
from typing import Any, cast

import h11
from h11 import RemoteProtocolError
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from xgpt.core.errors import MachineError
from xgpt.core.network import address_text
from xgpt.core.processes import raise_file_limit
from xrunner.server.access.hosts import OPEN_PATHS
from xrunner.server.api.errors import ApiError, ErrorResponse
from xrunner.server.api.writers import COMMENT
from xrunner.server.request_info import ABORT

HEAD_TIMEOUT_S = 10.0
"""Seconds for a TLS handshake, and for a request's head, including the wait for the first request."""
KEEP_ALIVE_S = 120
"""Seconds for which an idle connection is kept. Proxies and clients keep connections for less time (Go 90 s, nginx 60
s), so they close a connection first, and the server never closes one while a request arrives.
"""
WRITE_TIMEOUT_S = 30.0
"""Seconds in which a client must read bytes that were written to it. At most 64 KiB are written at a time."""
REST_TIMEOUT_S = 5.0
"""Seconds for the rest of a body whose request has been answered, and for the last bytes of a closing connection."""
READ_AT_ONCE = 16 << 10
"""Bytes given to the parser at once. The parser refuses a head that is longer than its limit only if the head arrives
in several pieces, so pieces must be small.
"""
BACKLOG = 2048
"""Number of connections that the operating system may queue until they are accepted."""
ACCEPT_AT_ONCE = 16
RESERVED_FILES = 64
"""Number of files that may be open besides counted connections: logs, checkpoints, pipes, and connections that are
accepted before another one is closed."""
SURPLUS = 16
"""Number of connections beyond the limit, for probes."""
MAX_CONNECTIONS = 8192
PROBE_S = 0.05, 1.0
"""Shortest and longest interval between two checks of whether a client that has stopped sending still reads."""

logger = logging.getLogger(__name__)
_uvicorn = logging.getLogger(f"{__name__}.uvicorn")
_uvicorn.setLevel(logging.ERROR)  # lower levels would log clients' mistakes, which answers already report


class Phase(IntEnum):
    """Phase of a connection. If there are too many connections, those in earlier phases are closed first."""

    HEAD = 0
    BODY = 1
    ANSWER = 2


def most_connections() -> int:
    """Raise the process's limit of open files as far as allowed. Return how many connections the process can then have.
    Raises MachineError: the limit of open files is too low to serve."""
    most = raise_file_limit()
    num_open = len(os.listdir("/dev/fd"))
    room = most - num_open - RESERVED_FILES - SURPLUS
    if room < SURPLUS:
        raise MachineError(f"{most} open files are too few to serve: raise the limit (ulimit -n 4096)")
    return min(room, MAX_CONNECTIONS)


FREE_CHUNKS = 512
"""Number of a body's chunks that may be short without being counted against `CHUNK_BYTES`."""
CHUNK_BYTES = 512
"""Least mean length, in bytes, of the other chunks. Each chunk takes about 40 us."""


class Parser(h11.Connection):
    """h11's parser of requests. A body in chunks is not parsed until the application asks for it, and its chunks are
    counted.
    """

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


class AcceptedSocket(socket.socket):
    """A client's socket, registered with its listener until it is closed."""

    listener: Listener
    protocol: Protocol | None = None
    """None until the TLS handshake has ended."""
    phase: Phase = Phase.HEAD

    def close(self) -> None:
        self.listener.forget(self)
        super().close()

    def drop(self) -> None:
        if self.protocol is not None:
            self.protocol.transport.abort()
            return
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)  # only asyncio may close the socket, which belongs to it


class Listener(socket.socket):
    """A listening socket that accepts `most` connections.

    A further connection replaces one that waits for a request's headers or, if there is none, for a body: the one that
    has waited the longest. If every connection has a complete request, up to `SURPLUS` more are accepted. They may only
    send probes.

    Args:
        bound: the bound socket. This object takes it over.
        most: limit of connections. None means as many as the process can have open.
    """

    def __init__(self, bound: socket.socket, most: int | None = None) -> None:
        self.most = most_connections() if most is None else most
        self._open: tuple[OrderedDict[int, AcceptedSocket], ...] = tuple(OrderedDict() for _ in Phase)
        """For each phase, its connections by file number, in the order in which they entered the phase."""
        self._failed = False
        super().__init__(fileno=bound.detach())
        # Accepted connections inherit this option. Otherwise a token would wait until the client has acknowledged the
        # previous token, which clients delay by 40 ms. Asyncio sets the option only on sockets with a given protocol
        # number.
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def at(cls, host: str, port: int) -> Listener:
        """Listen on an address. Port 0 means any free port. Raises MachineError: the address is not available, or too
        few files may be open."""
        with _bound(host, port) as bound:
            return cls(bound)

    def listen(self, _: int = 0) -> None:
        """The argument is ignored, since asyncio passes the number of connections that it accepts in one iteration."""
        super().listen(BACKLOG)

    def accept(self) -> tuple[AcceptedSocket, Any]:
        """Accept a connection. Raise BlockingIOError if none is waiting, or if no further connection can be open."""
        if self._failed:
            # After any other error, asyncio would retry without end and log each attempt.
            self._failed = False
            raise BlockingIOError
        try:
            plain, address = super().accept()
        except OSError as error:
            self._failed = error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
            raise
        accepted = AcceptedSocket(plain.family, plain.type, plain.proto, plain.detach())
        accepted.listener = self
        if self.num_open >= self.most:
            self._make_room()
        if self.num_open >= self.most + SURPLUS:
            accepted.close()
            raise BlockingIOError
        self._open[Phase.HEAD][accepted.fileno()] = accepted
        return accepted, address

    @property
    def num_open(self) -> int:
        return sum(map(len, self._open))

    def of(self, file_number: int) -> AcceptedSocket | None:
        return next((found for by_number in self._open if (found := by_number.get(file_number))), None)

    def enter(self, accepted: AcceptedSocket, phase: Phase) -> None:
        """Move a connection to the end of a phase, even if it is already in the phase."""
        if self._open[accepted.phase].pop(accepted.fileno(), None) is not None:
            accepted.phase = phase
            self._open[phase][accepted.fileno()] = accepted

    def forget(self, accepted: AcceptedSocket) -> None:
        self._open[accepted.phase].pop(accepted.fileno(), None)

    def _make_room(self) -> None:
        for phase in (Phase.HEAD, Phase.BODY):
            if self._open[phase]:
                accepted = next(iter(self._open[phase].values()))
                self.forget(accepted)
                accepted.drop()
                return


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
        way_out = "; give another `port`" if error.errno == errno.EADDRINUSE else ""
        raise MachineError(f"cannot listen on {address_text(host, port)}: {reason}{way_out}") from None


def check_address(host: str, port: int) -> None:
    """Check that a server can listen on an address. Raises MachineError: the address is not available."""
    _bound(host, port).close()


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
        the connection may be idle.
        """
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
        self._accepted.protocol = self
        if self._listener.num_open > self._listener.most:
            self.app = _probes_only(self.app)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection, and the reference cycles that would keep its memory until the next garbage collection."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # which uvicorn does only if there was no error
        if self._accepted is not None:
            self._accepted.protocol = None
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
        until the client reads or has gone.
        """
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
        key has been checked.
        """

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
        before the answer, or a comment within a stream of events.
        """
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
