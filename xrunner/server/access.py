"""Who may ask: API keys, host names, origins."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from base64 import b64decode
from collections.abc import Collection, Iterable
from pathlib import Path
from urllib.parse import urlsplit

from xgpt.errors import InputError

OPEN_PATHS = frozenset({"/health", "/ready"})
"""What probes ask for; it says nothing about anybody's requests."""

MIN_KEY_LENGTH = 16


class ApiKeys:
    """Accepted keys, compared in a time that tells neither which key came near nor how near."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """Keys from a file, one a line; empty lines and those that begin with # are left out.

        Raises:
            InputError: it cannot be read, holds no key, or one that is too short. Never shows a key.
        """
        field = "--api-key-file"
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(field, str(path), f"it cannot be read: {error}") from None
        keys = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
        if not keys:
            raise InputError(field, str(path), "it must hold at least one key, one a line")
        for number, key in keys:
            if len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
                raise InputError(
                    field,
                    f"{path}, line {number}",
                    f"a key is at least {MIN_KEY_LENGTH} printable ASCII characters without blanks",
                )
        return cls(key for _, key in keys)

    def accept(self, authorization: bytes) -> bool:
        """Whether the value of an Authorization header (Bearer KEY, or Basic with the key as password) has a key."""
        scheme, _, credentials = authorization.partition(b" ")
        key = credentials.strip()
        if scheme.lower() == b"basic":
            try:
                key = b64decode(key, validate=True).partition(b":")[2]
            except ValueError:
                return False
        elif scheme.lower() != b"bearer":
            return False
        digest = _digest(key)
        # Every key is compared, whichever fits: sum() does not stop early as any() would.
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _digest(key: bytes) -> bytes:
    """All of one length, so that a comparison does not tell a key's."""
    return hashlib.sha256(key).digest()


class AllowedHosts:
    """Names under which this server may be asked for.

    A page of a foreign site whose name is made to point to this machine (DNS rebinding) sends that name: it is not
    among these. Nor is the origin of a foreign page that posts to us across sites.

    Args:
        bound: the host that the server listens on; of all addresses ("0.0.0.0", "::") any literal address will do.
        extra: further names, of a proxy or a service.
    """

    def __init__(self, bound: str, extra: Collection[str] = ()) -> None:
        self._names = {name.lower().rstrip(".") for name in (bound, *extra)}
        if is_loopback(bound):
            self._names |= {"localhost", "127.0.0.1", "::1"}
        self._any_address = bound in ("", "0.0.0.0", "::")
        if self._any_address:
            self._names |= {"localhost", socket.gethostname().lower()}

    def accept(self, host: str) -> bool:
        """Whether the value of a Host header names this server."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if self._any_address and _is_address(name):
            return True
        return name.rstrip(".") in self._names

    def accept_origin(self, origin: str) -> bool:
        """Whether a page of this origin may post to us: only our own."""
        scheme, separator, host = origin.partition("://")
        return bool(separator) and scheme in ("http", "https") and self.accept(host)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(info[4][0])).is_loopback for info in found)


def check_exposure(host: str, keys: ApiKeys | None) -> None:
    """Refuse to listen beyond this machine without keys.

    Raises:
        InputError: says how to go on.
    """
    if keys is None and not is_loopback(host):
        raise InputError("--host", host, "others could use it without a key: give --api-key-file, or take 127.0.0.1")
