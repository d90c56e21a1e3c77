"""Serve a plan behind the Shepherd Model Gateway (`pip install smg`) instead of xgpt's endpoint.

The gateway answers clients: it renders chats, tokenises, parses tool calls and reasoning, and offers the APIs
Completions, Chat, Responses and Messages. It sends token ids to this process over gRPC (`xrunner.engine_service`). This
process connects to the engine as xgpt's endpoint does, and serves the live page, the plan and the metrics on an admin
port.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from xgpt.core.errors import InputError, MachineError, reason_of
from xgpt.core.network import address_text
from xgpt.core.processes import free_port, too_often
from xgpt.core.schema import Plan
from xgpt.serving.running import running
from xrunner.server.access.hosts import AllowedHosts
from xrunner.server.api.text import ServedModel
from xrunner.server.engine_client import EngineClient
from xrunner.server.http.app import create_admin_app
from xrunner.server.lasting_engine import PERIOD_S, RESTARTS
from xrunner.server.submission import Limits

if TYPE_CHECKING:
    from xgpt.serving.serve import ServeRequest


logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
HEAD_S, IDLE_S = 10, 120
"""Timeouts in seconds, for the head of a request and for the time between two requests of a connection."""
START_S, STOP_S = 30.0, 40.0
LOOK_S, HANG_S = 2.0, 15.0
"""Seconds between two health checks of the gateway, and seconds without an answer until it counts as hanging."""
DRAIN_S = 30.0
ENDPOINT_FIELDS = (
    "api_key_file",
    "ssl_certfile",
    "allowed_hosts",
    "served_model_names",
    "answer_within_s",
    "answer_within_of",
    "otlp_endpoint",
    "shutdown_delay_s",
)
"""Fields of `ServeRequest` that the gateway does not support."""


def check_gateway(plan: Plan, request: ServeRequest) -> None:
    """Check that the gateway is installed and supports the request.

    Raises:
        InputError: the gateway is not installed, or it does not support a field of the request.
    """
    missing = [name for name in ("smg", "grpc", "smg_grpc_proto") if find_spec(name) is None]
    if missing:
        raise InputError("front", "smg", "install the gateway: pip install 'xgpt-serve[gateway]'")
    for field in ENDPOINT_FIELDS:
        if getattr(request, field):
            raise InputError(field, str(getattr(request, field)), "the gateway does not offer it: use `front=endpoint`")
    if request.host not in ("127.0.0.1", "localhost", "::1"):
        raise InputError(
            "host",
            request.host,
            "the gateway checks no API keys here, so it may listen only on this machine: give 127.0.0.1",
        )
    if plan.checkpoint is None or not (Path(plan.checkpoint) / "tokenizer.json").is_file():
        raise InputError("checkpoint", plan.checkpoint, "the gateway needs a tokenizer.json: use `front=endpoint`")
    if request.nnodes > 1:
        raise InputError(
            "nnodes", request.nnodes, "the gateway serves the engine of only one machine: use `front=endpoint`"
        )


def serve_behind_gateway(plan: Plan, request: ServeRequest, limits: Limits) -> None:
    """Serve a plan behind the gateway until SIGTERM or SIGINT.

    Raises:
        MachineError: the engine does not start, the gateway does not start or fails too often, or a port is taken.
    """
    with running(plan, request) as (engine, model):
        asyncio.run(_serve(plan, request, limits, engine, model))


async def _serve(plan: Plan, request: ServeRequest, limits: Limits, engine: EngineClient, model: ServedModel) -> None:
    from xrunner.engine_service.server import service

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    engine.on_fatal = stopping.set
    drain_s = request.drain_s or DRAIN_S
    async with (
        service(engine, model, limits, request.classes(plan), drain_s=drain_s) as port,
        admin_server(engine, model, request.admin_port) as admin,
    ):
        gateway = Gateway(plan, request, port)
        try:
            await gateway.start()
            print(f"listening on http://{address_text(request.host, gateway.port)}", file=sys.stderr, flush=True)
            print(f"pages, plan and metrics on http://127.0.0.1:{admin}", file=sys.stderr, flush=True)
            ends = [asyncio.ensure_future(each) for each in (stopping.wait(), gateway.watch())]
            try:
                done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    each.result()
            finally:
                for each in ends:
                    each.cancel()
        finally:
            await gateway.end()


class Gateway:
    """The gateway's process in front of an engine.

    Attributes:
        port: port on which the gateway answers clients.
    """

    def __init__(self, plan: Plan, request: ServeRequest, engine_port: int) -> None:
        self.port = request.port or free_port(request.host)
        self._host, self._model = request.host, plan.model.name
        self._arguments = gateway_arguments(plan, request, self.port, engine_port)
        self._process: Process | None = None

    async def start(self) -> None:
        """Start the gateway, and wait until it lists the model.

        Raises:
            MachineError: the gateway ends, or does not answer in time.
        """
        self._process = process = await _started(self._arguments)
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            if process.returncode is not None:
                raise MachineError(
                    f"the gateway does not start: exit code {process.returncode}; its own messages are above"
                )
            if await self._answers(1.0):
                return
            await asyncio.sleep(0.2)
        raise MachineError(f"the gateway has not answered within {START_S:g} s; its own messages are above")

    async def watch(self) -> None:
        """Restart the gateway whenever it has ended or hangs, until this task is cancelled.

        Raises:
            MachineError: the gateway ends or hangs too often, or does not start again.
        """
        lost_s: list[float] = []
        while True:
            await asyncio.sleep(LOOK_S)
            assert self._process is not None
            if self._process.returncode is not None:
                why = f"the gateway has ended with exit code {self._process.returncode}"
            elif await self._answers(HANG_S) or self._process.returncode is not None:
                continue
            else:
                why = f"the gateway has not answered for {HANG_S:g} s"
            if too_often(lost_s, RESTARTS, PERIOD_S):
                raise MachineError(f"{why}, {len(lost_s)} times within {PERIOD_S / 60:.0f} minutes")
            logger.error("%s; starting it again", why)
            await self._kill(self._process)
            await self.start()

    async def _answers(self, within_s: float) -> bool:
        """Return whether the gateway lists the model within this time."""
        with suppress(OSError, ValueError, asyncio.IncompleteReadError):  # TimeoutError is an OSError
            return await asyncio.wait_for(_lists(self._host, self.port, self._model), within_s)
        return False

    async def _kill(self, process: Process) -> None:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def end(self) -> None:
        """End the gateway with SIGTERM or, if it does not end in time, with SIGKILL."""
        if (process := self._process) is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                await self._kill(process)


def gateway_arguments(plan: Plan, request: ServeRequest, port: int, engine_port: int) -> list[str]:
    """Return the gateway's arguments. They connect it to one engine, and limit each resource that clients use."""
    options: dict[str, object] = {
        "--host": request.host,
        "--port": port,
        "--worker-urls": f"grpc://127.0.0.1:{engine_port}",
        "--policy": "round_robin",
        "--max-payload-size": MAX_BODY_BYTES,
        "--max-buffered-request-bytes": 0,
        "--header-read-timeout-secs": HEAD_S,
        "--idle-connection-timeout-secs": IDLE_S,
        "--stream-body-stall-timeout-secs": HEAD_S,
        "--max-concurrent-requests": request.max_waiting,
        "--queue-size": 0,
        "--request-timeout-secs": round(request.request_timeout_s or 86400),
        "--shutdown-grace-period-secs": round(request.drain_s or 30),
        "--history-memory-max-responses": 1024,
        "--prometheus-host": "127.0.0.1",
        "--prometheus-port": free_port(),
        "--log-level": {"warning": "warn", "info": "warn"}.get(request.log_level, request.log_level),
        "--worker-startup-check-interval": 1,
    }
    options |= parsers(plan)
    origins = ["--cors-allowed-origins", *request.allowed_origins] if request.allowed_origins else []
    flags = [*origins, "--disable-retries", "--disable-worker-overload-protection", "--log-json"]
    return [*(str(word) for option in options.items() for word in option), *flags]


def parsers(plan: Plan) -> dict[str, str]:
    """Return the gateway's options for parsing tool calls and reasoning. They follow from the checkpoint's chat
    template.

    By default the gateway chooses parsers by the model's name. Here this would be the name of a directory.
    """
    template = _template(plan)
    found = {}
    if "<tool_call>" in template:
        found["--tool-call-parser"] = "qwen_xml" if "<function=" in template else "qwen"
    elif "[TOOL_CALLS]" in template:
        found["--tool-call-parser"] = "mistral"
    elif "<|python_tag|>" in template or '"parameters": dictionary' in template:
        found["--tool-call-parser"] = "llama"
    if found.get("--tool-call-parser", "").startswith("qwen") or "<think>" in template:
        found["--reasoning-parser"] = "qwen3"
    return found


def _template(plan: Plan) -> str:
    """Return a checkpoint's chat template, or "" if the checkpoint has no template."""
    if plan.checkpoint is None:
        return ""
    directory = Path(plan.checkpoint)
    with suppress(OSError, UnicodeDecodeError):
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    with suppress(OSError, ValueError):
        return str(json.loads((directory / "tokenizer_config.json").read_bytes()).get("chat_template") or "")
    return ""


async def _lists(host: str, port: int, model: str) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        return b" 200 " in head.split(b"\r\n")[0] and model.encode() in body
    finally:
        writer.close()


async def _started(arguments: list[str]) -> Process:
    """Start the gateway's process. It ends when its standard input is closed, and writes its log to this process's
    stderr.
    """
    command = (sys.executable, "-m", "xgpt.serving.gateway_process")
    log = sys.stderr.fileno()
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=log, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(json.dumps(arguments).encode() + b"\n")
    with suppress(ConnectionError):
        await process.stdin.drain()
    return process


ADMIN_HOST = "127.0.0.1"


@asynccontextmanager
async def admin_server(engine: EngineClient, model: ServedModel, port: int) -> AsyncIterator[int]:
    """Serve the engine's pages on 127.0.0.1 until the context ends, and yield the port.

    Args:
        port: port on which to listen. 0 means any free port.

    Raises:
        MachineError: the port is taken.
    """
    app = create_admin_app(engine, model, AllowedHosts(ADMIN_HOST, ()))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((ADMIN_HOST, port))
        except OSError as error:
            raise MachineError(
                f"port {port} of this machine is not available: {reason_of(error)}; give another `admin_port`"
            ) from None
        config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False, ws="none", lifespan="off")
        server = _Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await serving


class _Server(uvicorn.Server):
    """A uvicorn server that handles no signals. The process handles them itself."""

    def install_signal_handlers(self) -> None:
        """Install no handlers."""

    def capture_signals(self) -> Any:
        """Capture no signals."""
        return nullcontext()
