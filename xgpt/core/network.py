"""Find this machine's addresses and network interfaces."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import time
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from xgpt.core.errors import MachineError

CONNECT_S = 5.0
NAMED_WITHIN_S = 30.0
SIOCGIFADDR = 0x8915


def address_text(host: str, port: int | str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str, port: int | None = None) -> tuple[str, int]:
    """Return the host and the port of an address. An IPv6 address with a port must be in brackets.

    Args:
        port: the default port. None means that the address must state its port.

    Raises:
        ValueError: the text is not such an address.
    """
    is_bare = text.count(":") > 1 and not text.startswith("[")
    parts = urlsplit(f"//[{text}]" if is_bare else f"//{text}")
    host, number = parts.hostname, port if parts.port is None else parts.port
    if not host or number is None or text.lower() not in (host, f"[{host}]", address_text(host, number)):
        raise ValueError(text)
    return host, number


def interface_of(host: str) -> str | None:
    """Return the name of the interface that has this IP address, or None if no interface has it."""
    if ":" in host:
        with contextlib.suppress(OSError):
            for line in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines():
                address, *_, name = line.split()
                if address == ip_address(host).packed.hex():
                    return name
        return None
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened, contextlib.suppress(OSError):
            answer = fcntl.ioctl(opened, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    return None


def reach(address: str) -> None:
    """Check that something listens at HOST:PORT, by connecting once.

    Raises:
        OSError: nothing listens at the address, or the connection takes too long.
        ValueError: the address has no port.
    """
    socket.create_connection(split_address(address), CONNECT_S).close()


def listen_towards(host: str, port: int) -> socket.socket:
    """Return a socket that listens at `port` on this machine's address on the route to `host`.

    Raises:
        MachineError: there is no route, or `host` does not resolve.
        OSError: the port is taken.
    """
    address = address_towards(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family)


def address_towards(host: str, *, named_within_s: float = NAMED_WITHIN_S) -> str:
    """Return this machine's address on the route to `host`.

    Args:
        named_within_s: seconds for which to retry if `host` does not resolve yet, for example while a pod starts.
    """
    until = time.monotonic() + named_within_s
    while True:
        try:
            # If the host has addresses of both kinds, the IPv4 address is the first.
            family, *_, address = min(socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM))
            with socket.socket(family, socket.SOCK_DGRAM) as opened:
                opened.connect(address)
                return str(opened.getsockname()[0])
        except OSError as error:
            if not isinstance(error, socket.gaierror) or time.monotonic() > until:
                raise MachineError(f"there is no route to {host}: {error}; check the address") from None
            time.sleep(0.5)
