"""The admin port of a server whose engine is another process: its pages, plan and metrics, on this machine only."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import grpc
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from xgpt.core.errors import MachineError
from xgpt.pages import render_live
from xrunner.engine_service.state import get_state
from xrunner.server.access.hosts import AllowedHosts

if TYPE_CHECKING:
    from xgpt.serving.serve import ServeRequest

HOST = "127.0.0.1"
PATHS = ("/plan", "/plan/history", "/plan/decision", "/live", "/metrics", "/ready")
STATUS = {grpc.StatusCode.NOT_FOUND: 404, grpc.StatusCode.UNAVAILABLE: 503}


@asynccontextmanager
async def admin_server(engine_port: int, request: ServeRequest) -> AsyncIterator[int]:
    """Serve the engine's pages; yields the port.

    Raises:
        MachineError: the port is taken.
    """
    hosts = AllowedHosts(HOST, ())
    async with grpc.aio.insecure_channel(f"{HOST}:{engine_port}") as channel:

        async def show(http: Request) -> Response:
            if not hosts.accept(http.headers.get("host", "")):
                return Response("the Host header names another server", 421)
            path = http.url.path
            if path == "/":
                return Response(page, media_type="text/html; charset=utf-8")
            try:
                content = await get_state(channel, path)
            except grpc.aio.AioRpcError as error:
                return Response(error.details() or "", STATUS.get(error.code(), 500))
            return Response(
                content, media_type="text/plain; version=0.0.4" if path == "/metrics" else "application/json"
            )

        page = render_live("engine", None).encode()
        app = Starlette(routes=[Route(path, show, methods=["GET"]) for path in ("/", *PATHS)])
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((HOST, request.admin_port))
            except OSError as error:
                raise MachineError(f"port {request.admin_port} of this machine is not available: {error}") from None
            server = _Server(uvicorn.Config(app, log_config=None, access_log=False, server_header=False, ws="none"))
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
