"""The server's TLS certificate."""

from __future__ import annotations

import ssl
from pathlib import Path

from xgpt.core.errors import InputError

CERTIFICATE, KEY = "ssl_certfile", "ssl_keyfile"


def server_context(certificate: Path, key: Path | None = None) -> ssl.SSLContext:
    """Return a context for TLS 1.2 or newer with this certificate.

    Args:
        certificate: a PEM file, followed by the intermediate certificates.
        key: its private key. None means that it is in the same file.

    Raises:
        InputError: a file cannot be read, is not PEM, is encrypted, or the key belongs to another certificate.
    """
    for field, path in ((CERTIFICATE, certificate), (KEY, key)):
        try:
            if path is not None:
                path.open("rb").close()
        except OSError as error:
            raise InputError(field, str(path), f"it cannot be read: {error.strerror}") from None

    def password() -> str:
        raise InputError(
            KEY, str(key or certificate), "it is encrypted, and a server cannot ask for a passphrase; decrypt it"
        )

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password)
    except ssl.SSLError as error:
        shown = f"{certificate} with {key}" if key else str(certificate)
        what = (
            "the key belongs to another certificate"
            if error.reason == "KEY_VALUES_MISMATCH"
            else "it must contain a certificate and its key in PEM"
        )
        raise InputError(CERTIFICATE, shown, f"{what} ({error.reason or error})") from None
    return context
