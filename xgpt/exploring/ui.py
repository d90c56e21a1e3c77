"""Serve the planning page: an HTTP server on loopback, and a process that answers the page's questions.

Any user of the machine can connect to loopback, and answers may contain private files of the user who started the
server. So each request must contain a token. It is part of the address that `serve` reports.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from xgpt.core.documents import read_json
from xgpt.core.errors import InputError
from xgpt.core.io import config_names
from xgpt.core.processes import run_module
from xgpt.core.traces import SUFFIXES
from xgpt.pages import render_ui
from xgpt.resolve import load_workload
from xrunner.server.http.listener import Listener
from xrunner.server.http.process import GuardedServer

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOST = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost")
"""Host names that requests may contain. Other names come from pages of other sites, and are rejected."""
MOST_NAME = 64
MOST_BYTES = 64 * 2**20


class AnswerProcess:
    """The process that answers questions, one at a time. A new question ends the previous answer."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._asked = 0
        self._lines: asyncio.Queue[bytes] = asyncio.Queue()
        """Lines of the answer to the last question. Each is a JSON object, or is empty if the process has ended."""
        self._reading: asyncio.Task[None] | None = None
        self._is_ready = asyncio.Event()

    async def start(self) -> None:
        if self._reading is not None:
            await self._reading  # a line of the previous process must not count as an answer
        self._is_ready.clear()
        self._process = await asyncio.create_subprocess_exec(
            *run_module("xgpt.exploring.explore"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MOST_BYTES,
            process_group=0,  # Ctrl-C reaches only the server, which ends this process
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._reading = asyncio.create_task(self._read(self._process))

    @property
    def _has_ended(self) -> bool:
        if self._process is None or self._reading is None:
            return True
        return self._process.returncode is not None or self._reading.done()

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            await self._reading

    async def answers(self, asked: dict[str, Any]) -> AsyncIterator[bytes]:
        async with self._lock:
            if self._has_ended:
                await self.start()
            assert self._process is not None and self._process.stdin is not None
            await self._is_ready.wait()
            self._asked = number = self._asked + 1
            self._lines.put_nowait(b"{}")  # wakes up the reader of the previous question
            lines: asyncio.Queue[bytes] = asyncio.Queue()
            self._lines = lines
            # If the process has ended, the reader of its output reports this.
            with suppress(ProcessLookupError, ConnectionError):
                self._process.send_signal(signal.SIGUSR1)
                self._process.stdin.write(json.dumps({"id": number, "asked": asked}).encode() + b"\n")
                await self._process.stdin.drain()
        while number == self._asked:
            line = await lines.get()
            if not line:
                yield b'{"part": "error", "reason": "the planning process has ended; ask again"}\n'
                return
            part = json.loads(line)
            if part.get("id") == number:
                yield line
                if part["part"] == "end":
                    return

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self._is_ready.set()
            self._lines.put_nowait(line)
        self._is_ready.set()
        self._lines.put_nowait(b"")


def build_app(token: str) -> Starlette:
    """Return the application. It serves the page, the names of shipped configs to choose from, and the answers.

    Args:
        token: the token that every request must contain, in its query or in its header X-Token.
    """
    worker = AnswerProcess()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await worker.start()
        yield
        await worker.stop()

    async def page(request: Request) -> Response:
        return HTMLResponse(render_ui())

    async def names(request: Request) -> Response:
        return JSONResponse({kind: config_names(kind) for kind in ("models", "clusters", "workloads", "engines")})

    async def ask(request: Request, body: bytes) -> Response:
        try:
            asked = read_json(body)
        except ValueError:
            return JSONResponse({"error": "the question is not JSON"}, 400)
        if not isinstance(asked, dict):
            return JSONResponse({"error": "the question is not a JSON object"}, 400)
        return StreamingResponse(worker.answers(asked), media_type="application/x-ndjson")

    async def trace(request: Request, body: bytes) -> Response:
        name = Path(request.query_params.get("name", "")).name
        with tempfile.TemporaryDirectory() as directory:
            endings = [ending for ending in Path(name).suffixes[-2:] if ending in SUFFIXES]
            path = Path(directory) / f"trace{''.join(endings) or '.csv'}"
            path.write_bytes(body)
            try:
                workload = load_workload(str(path))
            except InputError as error:
                return JSONResponse({"error": str(error).replace(f"{directory}/", "")}, 400)
        workload = workload.but(name=Path(name).stem[:MOST_NAME] or "trace")
        means = {"input": workload.input.mean, "output": workload.output.mean}
        return JSONResponse({"workload": workload.model_dump(mode="json"), "mean": means})

    return Starlette(
        routes=[
            Route("/", page),
            Route("/names", names),
            Route("/ask", _of_this_page(ask), methods=["POST"]),
            Route("/trace", _of_this_page(trace), methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(NAMES)), Middleware(_WithToken, token=token)],
        lifespan=lifespan,
    )


class _WithToken:
    """Wraps an application so that it rejects requests without the token, and forbids browsers to show the page in a
    frame.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        request = Request(scope)
        given = request.headers.get("x-token") or request.query_params.get("token", "")
        if hmac.compare_digest(given.encode(), self._token):
            await self._app(scope, receive, send_on)
        else:
            says = "open the address that xgpt ui printed, with its token\n"
            await PlainTextResponse(says, 403)(scope, receive, send_on)


_HEADERS = [
    (b"x-frame-options", b"DENY"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]


def _of_this_page(answer: Callable[[Request, bytes], Any]) -> Callable[[Request], Any]:
    """Wrap a handler so that it rejects too long bodies and requests from other sites' pages.

    Browsers let other sites' pages send JSON only after a preflight request, which fails here.
    """

    async def checked(request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return JSONResponse({"error": "content-type: give application/json"}, 415)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                return JSONResponse({"error": f"at most {MOST_BYTES} bytes"}, 413)
        answered: Response = await answer(request, bytes(body))
        return answered

    return checked


def serve(port: int, on_ready: Callable[[str], None]) -> None:
    """Serve the page on loopback until SIGTERM or SIGINT."""
    token = secrets.token_urlsafe(24)
    with Listener.at(HOST, port) as listener:
        on_ready(f"http://{HOST}:{listener.getsockname()[1]}/?token={token}")
        GuardedServer(build_app(token), listener, grace_s=1).run([listener])
