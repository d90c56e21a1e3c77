"""Serve a plan with its engine in a process of its own, behind the Shepherd Model Gateway (`pip install smg`).

The gateway answers clients: it renders chats, tokenises, parses calls of functions and reasoning, and serves
Completions, Chat, Responses and Messages. The engine gets token ids over gRPC (`xrunner.engine_service`). This process
starts both, restarts the engine on the last plan that it followed, and shows the engine's pages on an admin port.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xgpt.core.errors import InputError, MachineError
from xgpt.core.schema import Plan
from xgpt.serving.checking import check_runs

if TYPE_CHECKING:
    from xgpt.serving.serve import ServeRequest

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
HEAD_S, IDLE_S = 10, 120
"""Seconds for the head of a request, and between two requests of one connection."""
START_S, STOP_S = 30.0, 40.0
RESTARTS, RESTARTS_S = 5, 600.0
"""Restarts of the engine in this many seconds; one more, and the server ends."""
ENDPOINT_FIELDS = (
    "api_key_file",
    "ssl_certfile",
    "allowed_hosts",
    "served_model_names",
    "answer_within_s",
    "answer_within_of",
    "otlp_endpoint",
)
"""Fields of what the endpoint does, and the gateway does not as it is started here."""


def check_gateway(plan: Plan, request: ServeRequest) -> None:
    """Check that the gateway is installed, and can do what is asked.

    Raises:
        InputError: it is not, or a field is the endpoint's only.
    """
    missing = [name for name in ("smg", "grpc", "smg_grpc_proto") if find_spec(name) is None]
    if missing:
        raise InputError("front", "smg", "install the gateway: pip install 'xgpt-serve[gateway]'")
    for field in ENDPOINT_FIELDS:
        if getattr(request, field):
            raise InputError(field, str(getattr(request, field)), "the gateway has no such thing: use front=endpoint")
    if request.host not in ("127.0.0.1", "localhost", "::1"):
        raise InputError("host", request.host, "the gateway has no keys here, so it listens on this machine only")
    if plan.checkpoint is None or not (Path(plan.checkpoint) / "tokenizer.json").is_file():
        raise InputError("checkpoint", plan.checkpoint, "the gateway needs a tokenizer.json: use front=endpoint")
    if request.nnodes > 1:
        raise InputError("nnodes", request.nnodes, "the gateway runs before one machine's engine: use front=endpoint")


def serve_behind_gateway(plan: Plan, request: ServeRequest) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        MachineError: the engine does not start, fails again and again, or a port is taken.
    """
    from xrunner.server.observe.logs import log_json

    check_runs(plan, request.nnodes, request.engine)
    log_json(request.log_level)
    asyncio.run(_serve(plan, request))


async def _serve(plan: Plan, request: ServeRequest) -> None:
    from xgpt.serving.admin import admin_server

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    engine = EngineProcess(plan, request)
    async with engine, _gateway(request, engine.port, plan) as gateway, admin_server(engine.port, request) as admin:
        print(f"listening on http://{_shown(request.host)}:{gateway.port}", file=sys.stderr, flush=True)
        print(f"pages, plan and metrics on http://127.0.0.1:{admin}", file=sys.stderr, flush=True)
        ends = [
            asyncio.ensure_future(each) for each in (stopping.wait(), gateway.process.wait(), engine.keep_running())
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if ends[2].done():
                ends[2].result()
            if ends[1].done() and not stopping.is_set():
                raise MachineError(f"the gateway has ended with exit code {gateway.process.returncode}")
        finally:
            for each in ends:
                each.cancel()


class EngineProcess:
    """An engine in a process of its own (`engine_process`), started again when it dies.

    Attributes:
        plan: the one that it followed last.
        port: where it listens, on this machine; the same after a restart.
    """

    def __init__(self, plan: Plan, request: ServeRequest) -> None:
        self.plan = plan
        self.port = 0
        self._request = request
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._started_s: list[float] = []

    async def __aenter__(self) -> EngineProcess:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None:
            await _end(self._process)

    async def keep_running(self) -> None:
        """Start the engine again whenever it dies.

        Raises:
            MachineError: it does so again and again, or does not start.
        """
        while True:
            assert self._process is not None
            code = await self._process.wait()
            now_s = asyncio.get_running_loop().time()
            self._started_s = [at for at in self._started_s if at > now_s - RESTARTS_S]
            if len(self._started_s) > RESTARTS:
                raise MachineError(
                    f"the engine's process has ended {len(self._started_s)} times; the last code: {code}"
                )
            logger.error("the engine's process has ended, and is started again", extra={"fields": {"code": code}})
            await self._start()

    async def _start(self) -> None:
        order = {"plan": self.plan.model_dump(mode="json"), "port": self.port}
        order["request"] = self._request.model_dump(mode="json")
        self._started_s.append(asyncio.get_running_loop().time())
        self._process = await _spawn("xgpt.serving.engine_process", order)
        assert self._process.stdout is not None
        first = await self._process.stdout.readline()
        if not first:
            code = await self._process.wait()
            raise MachineError(f"the engine's process does not start: exit code {code}")
        self.port = json.loads(first)["port"]
        self._reading = asyncio.create_task(self._read(self._process.stdout))

    async def _read(self, lines: asyncio.StreamReader) -> None:
        """Note each plan that the engine goes over to."""
        while line := await lines.readline():
            self.plan = Plan.model_validate(json.loads(line)["plan"])


class Gateway:
    """A running gateway."""

    def __init__(self, process: Process, port: int) -> None:
        self.process = process
        self.port = port


@asynccontextmanager
async def _gateway(request: ServeRequest, engine_port: int, plan: Plan) -> AsyncIterator[Gateway]:
    """Run the gateway before an engine, ready to answer.

    Raises:
        MachineError: it ends at once, or does not answer.
    """
    port = request.port or _free_port(request.host)
    process = await _spawn("xgpt.serving.gateway_process", gateway_arguments(plan, request, port, engine_port))
    try:
        await _until_ready(process, request.host, port, plan.model.name)
        yield Gateway(process, port)
    finally:
        await _end(process)


def gateway_arguments(plan: Plan, request: ServeRequest, port: int, engine_port: int) -> list[str]:
    """Return the gateway's command line: one engine, and a limit on everything that a client may send or hold."""
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
        "--prometheus-port": _free_port("127.0.0.1"),
        "--log-level": {"warning": "warn", "info": "warn"}.get(request.log_level, request.log_level),
        "--worker-startup-check-interval": 1,
    }
    options |= parsers(plan)
    flags = ["--disable-retries", "--disable-worker-overload-protection", "--log-json"]
    return [*(str(word) for option in options.items() for word in option), *flags]


def parsers(plan: Plan) -> dict[str, str]:
    """Return the gateway's parsers of calls and of reasoning, as the checkpoint's template writes both.

    Left to itself the gateway goes by the model's name, which is the name of a directory here.
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
    """Return the text of a checkpoint's chat template; empty: it has none."""
    if plan.checkpoint is None:
        return ""
    directory = Path(plan.checkpoint)
    with suppress(OSError, UnicodeDecodeError):
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    with suppress(OSError, ValueError):
        return str(json.loads((directory / "tokenizer_config.json").read_bytes()).get("chat_template") or "")
    return ""


async def _until_ready(process: Process, host: str, port: int, model: str) -> None:
    """Return once the gateway lists the model."""
    end_s = asyncio.get_running_loop().time() + START_S
    while asyncio.get_running_loop().time() < end_s:
        if process.returncode is not None:
            raise MachineError(f"the gateway does not start: exit code {process.returncode}")
        with suppress(OSError, ValueError, asyncio.IncompleteReadError):
            if await _lists(host, port, model):
                return
        await asyncio.sleep(0.2)
    raise MachineError(f"the gateway does not answer within {START_S:g} s")


async def _lists(host: str, port: int, model: str) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        return b" 200 " in head.split(b"\r\n")[0] and model.encode() in body
    finally:
        writer.close()


async def _spawn(module: str, order: Any) -> Process:
    """Start a module of ours as a process that ends when its input is closed, and write its order there."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, stdin=PIPE, stdout=PIPE, start_new_session=True, limit=1 << 26, env=os.environ
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(order).encode() + b"\n")
    with suppress(ConnectionError):
        await process.stdin.drain()
    return process


async def _end(process: Process) -> None:
    """End a process: by a signal, and if that does not help, at once."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as found:
        found.bind((host, 0))
        port: int = found.getsockname()[1]
        return port


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
