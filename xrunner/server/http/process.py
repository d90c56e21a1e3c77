"""Run the server process: its sockets, TLS certificate, signals and shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import ssl
import sys
import threading
import time
from asyncio.sslproto import SSLProtocol
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp
from uvicorn.config import STARTUP_FAILURE

from xgpt.core.errors import InputError
from xgpt.core.network import address_text
from xrunner.server.engine_client import EngineClient
from xrunner.server.http.answer import LAST_WORDS_S
from xrunner.server.http.connections import (
    ACCEPT_AT_ONCE,
    HEAD_TIMEOUT_S,
    KEEP_ALIVE_S,
    READ_AT_ONCE,
    REST_TIMEOUT_S,
    Protocol,
)
from xrunner.server.http.listener import Listener
from xrunner.server.http.watchdog import Watchdog

logger = logging.getLogger(__name__)

DRAIN_S = 30.0
"""Seconds for which running requests may continue after the first signal (SIGTERM or SIGINT)."""
TICK_S = 0.1
LOOK_S = 0.5
"""Seconds between two checks for overdue connections."""


def serve(
    app: Starlette,
    host: str,
    port: int,
    *,
    drain_s: float = DRAIN_S,
    shutdown_delay_s: float = 0.0,
    tls: ssl.SSLContext | None = None,
    bound: socket.socket | None = None,
    restarts: bool = False,
) -> None:
    """Answer requests until SIGTERM, then return. SIGINT raises KeyboardInterrupt. Port 0 means any free port.

    After the first signal, /ready answers 503. For `shutdown_delay_s` seconds all else continues, so that load
    balancers can notice. After that, no new request is accepted, and running requests have `drain_s` seconds to finish
    before they end with an error. A second signal ends them immediately.

    Args:
        restarts: whether a hang of the event loop starts this process's command again (`watchdog`). Otherwise the
            process ends.

    Raises:
        MachineError: the address is not available, or the engine's workers cannot be restarted."""
    # uvicorn raises the signal again after its shutdown, but SIGTERM must not end this process before the caller has
    # cleaned up.
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with Listener.at(host, port) if bound is None else Listener(bound) as listener:
            watchdog = None
            if threading.current_thread() is threading.main_thread():
                watchdog = Watchdog(listener, restarts=restarts)
            Server(app, listener, drain_s=drain_s, shutdown_delay_s=shutdown_delay_s, tls=tls, watchdog=watchdog).run(
                [listener]
            )
        if app.state.engine.fatal is not None:
            raise app.state.engine.fatal
    finally:
        signal.signal(signal.SIGTERM, previous)


class GuardedServer(uvicorn.Server):
    """uvicorn's server with the connections of `connections`: all HTTP of xgpt goes through it.

    Args:
        listener: must also be passed to `run`.
        grace_s: seconds that answers have to end after a signal."""

    def __init__(
        self, app: ASGIApp, listener: Listener, tls: ssl.SSLContext | None = None, grace_s: int | None = None
    ) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=grace_s,
        )
        super().__init__(config)
        self._listener = listener
        self._tls = tls

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal. The event loop must be asyncio's, since other loops accept connections themselves."""
        asyncio.run(self.serve(sockets))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)

        def protocol() -> Protocol:
            return Protocol(self._listener, self.config, self.server_state, self.lifespan.state)

        timeouts: dict[str, Any] = {}
        if self._tls is not None:
            timeouts = {"ssl_handshake_timeout": HEAD_TIMEOUT_S, "ssl_shutdown_timeout": REST_TIMEOUT_S}
            SSLProtocol.max_size = READ_AT_ONCE  # size of a buffer that each connection has, by default 256 KiB
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(protocol, sock=self._listener, ssl=self._tls, backlog=ACCEPT_AT_ONCE, **timeouts)
        ]
        self.started = True
        self._looking = asyncio.create_task(self._end_overdue())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self._looking.cancel()

    async def _end_overdue(self) -> None:
        while True:
            for connection in tuple(self.server_state.connections):
                assert isinstance(connection, Protocol)
                connection.end_if_overdue()
            await asyncio.sleep(LOOK_S)


class Server(GuardedServer):
    def __init__(
        self,
        app: Starlette,
        listener: Listener,
        *,
        drain_s: float = DRAIN_S,
        shutdown_delay_s: float = 0.0,
        tls: ssl.SSLContext | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        super().__init__(app, listener, tls)
        self._watchdog = watchdog
        self._drain_s, self._shutdown_delay_s = drain_s, shutdown_delay_s
        self._app = app
        self._engine: EngineClient = app.state.engine
        self._engine.on_fatal = partial(setattr, self, "should_exit", True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._watchdog is not None:
            self._reporting = asyncio.create_task(self._watchdog.report())
            self._watchdog.start()
        # Loaded modules stay in memory. If the garbage collector examined them, every stream would pause for 100 ms.
        gc.collect()
        gc.freeze()
        address = address_text(*self._listener.getsockname()[:2])
        print(f"listening on http{'s' if self._tls else ''}://{address}", file=sys.stderr, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._leave()
        await self._drain()
        await super().shutdown(sockets)
        if self.force_exit:
            # After a second Ctrl-C the server does not wait for answers, but the engine must stop before the event loop
            # is closed.
            for task in self.server_state.tasks:
                task.cancel()
            await self.lifespan.shutdown()
        logger.info("stopped")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        super().handle_exit(sig, frame)

    async def _leave(self) -> None:
        self._app.state.is_leaving = True
        end_s = time.monotonic() + self._shutdown_delay_s
        while not self.force_exit and self._engine.failure is None and (left_s := end_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, TICK_S))

    async def _drain(self) -> None:
        self._engine.drain()
        end_s, num_requests = time.monotonic() + self._drain_s, self._engine.num_requests
        logger.info("draining %d requests, up to %g s; a second signal ends them at once", num_requests, self._drain_s)
        while not self.force_exit and self._engine.num_requests and time.monotonic() < end_s:
            await asyncio.sleep(TICK_S)
        # Generated tokens must still be written, but uvicorn closes its sockets before it waits for this.
        left_s = max(LAST_WORDS_S, end_s - time.monotonic())
        has_to_break_off = self._engine.num_requests and not self.force_exit
        self.config.timeout_graceful_shutdown = 0 if has_to_break_off else left_s  # type: ignore[assignment]


CERTIFICATE, KEY = "ssl_certfile", "ssl_keyfile"


def server_context(certificate: Path, key: Path | None = None) -> ssl.SSLContext:
    """Return a context for TLS 1.2 or later with this certificate.

    Args:
        certificate: a PEM file, followed by the intermediate certificates.
        key: the certificate's private key. None means that the key is in the same file.

    Raises:
        InputError: a file cannot be read, is not PEM, is encrypted, or the key belongs to another certificate."""
    for field, path in ((CERTIFICATE, certificate), (KEY, key)):
        try:
            if path is not None:
                path.open("rb").close()
        except OSError as error:
            says = f"it cannot be read: {error.strerror}; check the path and its permissions"
            raise InputError(field, str(path), says) from None

    def password() -> str:
        says = "it is encrypted, and a server cannot ask for a passphrase; decrypt it"
        raise InputError(KEY, str(key or certificate), says)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password)
    except ssl.SSLError as error:
        shown = f"{certificate} with {key}" if key else str(certificate)
        what = (
            "the key belongs to another certificate; give the certificate's own key"
            if error.reason == "KEY_VALUES_MISMATCH"
            else "it must contain a certificate and its key in PEM"
        )
        raise InputError(CERTIFICATE, shown, f"{what} ({error.reason or error})") from None
    return context
