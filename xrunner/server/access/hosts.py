"""Check the host names and origins that requests name."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from xgpt.core.errors import InputError
from xrunner.server.access.keys import ApiKeys

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths for probes. Their answers contain no information about requests."""

GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
ADMIN_PATHS = frozenset({"/", "/live", "/plan", "/plan/history", "/plan/decision", "/metrics"})
"""Paths that show all clients' requests."""


class AllowedHosts:
    """The host names by which this server may be addressed.

    The check keeps out web pages of other sites: pages whose host name was made to point to this machine (DNS
    rebinding), and pages that post to this server.

    Args:
        bound: the host that the server listens on. With "0.0.0.0" or "::" any literal address is accepted.
        origins: origins of other sites whose pages may use this server."""

    def __init__(self, bound: str, extra: Collection[str] = (), origins: Collection[str] = ()) -> None:
        self.origins = frozenset(origins)
        self._extra = {name.lower().rstrip(".") for name in extra}
        self._names = {bound.lower().rstrip("."), *self._extra}
        if is_loopback(bound):
            self._names |= {"localhost", "127.0.0.1", "::1"}
        self._any_address = bound in ("", "0.0.0.0", "::")
        if self._any_address:
            self._names |= {"localhost", socket.gethostname().lower()}

    def accept(self, host: str) -> bool:
        try:
            parts = urlsplit(f"//{host}")
            name = parts.hostname or ""
            if (parts.netloc, parts.username) != (host, None) or parts.port == 0:
                return False  # not a name, with or without a port: other parsers may find another name
        except ValueError:
            return False
        if self._any_address and _is_address(name):
            return True
        return name.rstrip(".") in self._names

    def accept_origin(self, origin: str, scheme: str = "http", host: str = "") -> bool:
        """Return whether a page of this origin may post to this server. The server's own pages and those of `origins`
        may.

        A page on another port of this machine belongs to another server. A name from `extra` may have any port, since a
        proxy chooses the port.

        Args:
            scheme: scheme of the request. Behind a proxy, "http" may mean https."""
        if origin in self.origins:
            return True
        origin_scheme, separator, named = origin.partition("://")
        if not separator or origin_scheme not in ("https", scheme) or not self.accept(named):
            return False
        return urlsplit(f"//{named}").hostname in self._extra or named.lower() == host.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(info[4][0])).is_loopback for info in found)


def check_exposure(host: str, keys: ApiKeys | None) -> None:
    """Refuse to listen on an address that other machines can reach if there are no keys."""
    if keys is None and not is_loopback(host):
        raise InputError("host", host, "others could use it without a key: give `api_key_file`, or listen on 127.0.0.1")
