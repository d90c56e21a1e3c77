"""Accept connections, as many as the process can have open."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import OrderedDict
from contextlib import suppress
from enum import IntEnum
from typing import Any

from xgpt.core.errors import MachineError
from xgpt.core.network import address_text
from xgpt.core.processes import raise_file_limit

BACKLOG = 2048
"""Number of connections that the operating system may queue until they are accepted."""
RESERVED_FILES = 64
"""Number of files that may be open besides counted connections: logs, checkpoints, pipes, and connections that are
accepted before another one is closed."""
SURPLUS = 16
"""Number of connections beyond the limit, for probes."""
MAX_CONNECTIONS = 8192


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


class AcceptedSocket(socket.socket):
    """A client's socket, registered with its listener until it is closed."""

    listener: Listener
    transport: asyncio.Transport | None = None
    """None until the TLS handshake has ended."""
    phase: Phase = Phase.HEAD

    def close(self) -> None:
        self.listener.forget(self)
        super().close()

    def drop(self) -> None:
        if self.transport is not None:
            self.transport.abort()
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
        most: limit of connections. None means as many as the process can have open."""

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
