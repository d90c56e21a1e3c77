"""Find this machine's addresses and network interfaces."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import time

from xgpt.core.errors import MachineError

CONNECT_S = 5.0
NAMED_WITHIN_S = 30.0
SIOCGIFADDR = 0x8915
"""Linux's ioctl that returns the address of an interface."""


def interface_of(host: str) -> str | None:
    """Return the name of the interface that has this IPv4 address, or None if no interface has it."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened, contextlib.suppress(OSError):
            answer = fcntl.ioctl(opened, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    return None


def reach(address: str) -> None:
    """Connect to HOST:PORT, and close the connection.

    Raises:
        OSError: nothing listens at the address, or the connection takes too long.
        ValueError: the address has no port.
    """
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), CONNECT_S).close()


def address_towards(host: str, *, named_within_s: float = NAMED_WITHIN_S) -> str:
    """Return this machine's address on the route to another machine.

    Args:
        named_within_s: seconds for which to retry if `host` does not resolve yet, as while a pod starts.

    Raises:
        MachineError: there is no route.
    """
    until = time.monotonic() + named_within_s
    while True:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
                opened.connect((host, 1))
                return str(opened.getsockname()[0])
        except OSError as error:
            if not isinstance(error, socket.gaierror) or time.monotonic() > until:
                raise MachineError(f"there is no route to {host}: {error}") from None
            time.sleep(0.5)
