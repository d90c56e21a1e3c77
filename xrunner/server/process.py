"""The server process: its socket, its signals, its end."""

from __future__ import annotations

import signal
import socket
import sys
from functools import partial

import uvicorn
from starlette.applications import Starlette

from xgpt.errors import MachineError
from xrunner.server.engine_thread import EngineThread

DRAIN_S = 30.0
"""How long running requests may go on after the first SIGTERM or SIGINT."""
KEEP_ALIVE_S = 60
"""Longer than clients keep idle connections, so that it is never the server who closes under a request."""
BACKLOG = 2048
"""Connections that may wait to be accepted."""


def serve(app: Starlette, host: str, port: int, *, drain_s: float = DRAIN_S) -> None:
    """Answer requests until SIGTERM, then return; SIGINT ends in KeyboardInterrupt. Port 0 takes a free one.

    After the first signal no new request is taken in; what runs has `drain_s` seconds to end, then it ends with an
    error. A second signal ends it at once.

    Raises:
        MachineError: the address cannot be had, or the engine's workers are gone for good.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        http="h11",  # httptools, taken where it is installed, reads a request's head however long it is
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(drain_s)),
    )
    # uvicorn raises a signal again when it has shut down; SIGTERM must not end us before our caller cleans up.
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with _listen(host, port) as listener:
            _Server(config, app.state.engine_thread).run(sockets=[listener])
        if app.state.engine_thread.fatal is not None:
            raise app.state.engine_thread.fatal
    finally:
        signal.signal(signal.SIGTERM, previous)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        raise MachineError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    # Accepted connections inherit it. Without, a token waits until the client has acknowledged the one before it,
    # which clients put off by 40 ms; asyncio sets it only on sockets whose protocol number is given.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, engine_thread: EngineThread) -> None:
        super().__init__(config)
        self._engine_thread = engine_thread
        engine_thread.on_fatal = partial(setattr, self, "should_exit", True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine_thread.is_draining = True
        await super().shutdown(sockets)
        if self.force_exit:
            # A second Ctrl-C does not wait for answers; the engine must still stop before its loop is closed.
            for task in self.server_state.tasks:
                task.cancel()
            await self.lifespan.shutdown()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"listening on http://{shown}:{port}", file=sys.stderr, flush=True)
