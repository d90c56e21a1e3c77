"""Open the control plane's sockets. They are encrypted with a key that all processes share.

On one machine, processes use Unix sockets, to which no other user can connect. On several machines, they bind to the
interface with a given address. Any peer can connect there, and the handshake checks that it has the key. A message
above a size limit ends the connection, both before and after the handshake.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass

import zmq

from xgpt.core.errors import MachineError
from xgpt.core.network import address_text

CONTROL_BYTES = 1 << 20
DATA_BYTES = 256 << 20
HANDSHAKE_S = 10
WAKEUP_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Secret:
    """A CurveZMQ key pair that all processes of a replica share. A peer without the public key gets no answer."""

    public: bytes
    private: bytes

    @classmethod
    def new(cls) -> Secret:
        return cls(*zmq.curve_keypair())

    @classmethod
    def of(cls, private: bytes) -> Secret:
        return cls(zmq.curve_public(private), private)


class Sockets:
    """Opens sockets with the same secret, and closes them. Only one thread may use it."""

    def __init__(self, secret: Secret, host: str) -> None:
        self._context = zmq.Context()
        self._secret = secret
        self._host = host
        self._opened: list[zmq.Socket[bytes]] = []

    def bind(self, kind: int, max_bytes: int = DATA_BYTES) -> tuple[zmq.Socket[bytes], str]:
        """Return a listening socket and its endpoint.

        If `host` is loopback, it is a Unix socket. On other interfaces, it has any free port.

        Raises:
            MachineError: this machine does not have the interface, or no port is free.
        """
        opened = self._open(kind)
        opened.curve_server = True
        opened.maxmsgsize = max_bytes
        opened.handshake_ivl = 1000 * HANDSHAKE_S
        if sys.platform == "linux" and ipaddress.ip_address(self._host).is_loopback:
            # An abstract name is not a file, so none remains when a process is killed.
            opened.set(zmq.IPC_FILTER_UID, os.getuid())
            endpoint = f"ipc://@xgpt-{secrets.token_hex(16)}"
            opened.bind(endpoint)
            return opened, endpoint
        try:
            opened.bind(f"tcp://{address_text(self._host, '*')}")
        except zmq.ZMQError as error:
            raise MachineError(
                f"cannot bind a control socket to {self._host}: {error}; if this is not an address of this machine, "
                "start Ray here with one as --node-ip-address"
            ) from None
        return opened, opened.get_string(zmq.LAST_ENDPOINT)

    def connect(self, kind: int, endpoint: str, identity: bytes = b"") -> zmq.Socket[bytes]:
        opened = self._open(kind)
        opened.curve_serverkey = self._secret.public
        if identity:
            opened.identity = identity
        opened.connect(endpoint)
        return opened

    def close(self, linger_ms: int = 0) -> None:
        self._context.destroy(linger=linger_ms)

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        opened: zmq.Socket[bytes] = self._context.socket(kind)
        opened.linger = 0
        opened.ipv6 = ":" in self._host
        opened.sndhwm = opened.rcvhwm = 0  # never drop a message: a lost step could not be repeated
        opened.curve_publickey, opened.curve_secretkey = self._secret.public, self._secret.private
        self._opened.append(opened)
        return opened


class Wakeup:
    """Wakes a thread that is polling sockets.

    Attributes:
        socket: the thread must also poll this socket. `wake` makes it readable.
    """

    def __init__(self) -> None:
        self.socket, self._waker = socket.socketpair()
        for end in (self.socket, self._waker):
            end.setblocking(False)

    def wake(self) -> None:
        """Wake the thread. Any thread may call this."""
        with suppress(OSError):  # if the socket is full, the thread is awake already; if it is closed, no thread waits
            self._waker.send(b"\0")

    def clear(self) -> None:
        """Read and discard all wake-ups so far. Call it only if there is at least one."""
        self.socket.recv(WAKEUP_BYTES)

    def close(self) -> None:
        self.socket.close()
        self._waker.close()
