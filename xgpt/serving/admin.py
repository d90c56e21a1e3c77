"""The admin port of a server behind a gateway: the engine's pages, plan and metrics, on this machine only."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import uvicorn

from xgpt.core.errors import MachineError
from xrunner.server import AllowedHosts, EngineClient, ServedModel
from xrunner.server.http.app import create_admin_app

HOST = "127.0.0.1"


@asynccontextmanager
async def admin_server(engine: EngineClient, model: ServedModel, port: int) -> AsyncIterator[int]:
    """Serve the engine's pages, and yield the port.

    Args:
        port: port to listen on. 0 means any free port.

    Raises:
        MachineError: the port is taken.
    """
    app = create_admin_app(engine, model, AllowedHosts(HOST, ()))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError as error:
            raise MachineError(f"port {port} of this machine is not available: {error}") from None
        config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False, ws="none", lifespan="off")
        server = _Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await serving


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    def install_signal_handlers(self) -> None:
        """Install none."""

    def capture_signals(self) -> Any:
        """Capture none."""
        return nullcontext()
