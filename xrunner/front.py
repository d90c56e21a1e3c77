"""The front of a fleet on one machine: sends each request to the replica with the fewest outstanding ones for its rate.

    python -m xrunner.front DIRECTORY --port 8000

Replicas stand in the directory, a JSON file each (`Backend`), which the fleet's controller writes; the front is a
process of its own, so it goes on where the controller is restarted. A request that no replica has begun to answer goes
to another one where its replica cannot be reached; one that is being answered is never sent twice.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

LOOK_S = 0.1
"""Between two looks into the directory."""
PATIENCE_S = 30.0
"""For which a request waits for a replica that takes any."""
MOST_BODY_BYTES = 32 << 20
HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"}
)
BUSY = 503
DRAIN_S = 600.0
TRIES = 5


class Backend(msgspec.Struct, frozen=True):
    """A replica, as its file says.

    Attributes:
        name: of the file, too.
        port: on this machine.
        rate_per_s: what it holds: a replica of twice the rate gets twice the requests.
        takes: whether it is to get further requests.
    """

    name: str
    port: int
    rate_per_s: float
    takes: bool


class Front:
    """Routes requests; on one event loop."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._backends: dict[str, Backend] = {}
        self._outstanding: dict[str, int] = {}
        self._num_arrived = 0
        self._changed = asyncio.Event()
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=5.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,
        )

    async def watch(self) -> None:
        """Read the directory again and again."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Read which replicas there are."""
        found = {}
        for path in self._directory.glob("*.json"):
            with suppress(OSError, msgspec.MsgspecError):  # it is being taken away
                backend = msgspec.json.decode(path.read_bytes(), type=Backend)
                found[backend.name] = backend
        if found != self._backends:
            self._backends = found
            self._changed.set()
            self._changed = asyncio.Event()

    async def close(self) -> None:
        await self._client.aclose()

    def state(self) -> dict[str, object]:
        """Return what has arrived, and what is outstanding at each replica."""
        return {"arrived": self._num_arrived, "outstanding": {name: n for name, n in self._outstanding.items() if n}}

    @property
    def is_ready(self) -> bool:
        return any(backend.takes for backend in self._backends.values())

    async def forward(self, request: Request) -> Response:
        """Send a request to a replica, and its answer back as it comes."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_BODY_BYTES:
                return _error(413, f"a body holds at most {MOST_BODY_BYTES} bytes")
        self._num_arrived += request.method == "POST"
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP_BY_HOP]
        avoided: set[str] = set()
        for _ in range(TRIES):
            backend = await self._choose(avoided)
            if backend is None:
                break
            url = httpx.URL(f"http://127.0.0.1:{backend.port}").copy_with(raw_path=_raw_path(request))
            outgoing = self._client.build_request(request.method, url, headers=headers, content=bytes(body))
            self._add(backend.name, 1)
            try:
                answer = await self._client.send(outgoing, stream=True)
            except httpx.TransportError:
                self._add(backend.name, -1)
                avoided.add(backend.name)
                continue
            except BaseException:
                self._add(backend.name, -1)
                raise
            if answer.status_code == BUSY and self._others(avoided | {backend.name}):
                # It is about to end, and has refused: another one takes the request.
                await answer.aclose()
                self._add(backend.name, -1)
                avoided.add(backend.name)
                continue
            kept = {name: value for name, value in answer.headers.items() if name not in HOP_BY_HOP}
            return StreamingResponse(self._pass_on(answer, backend.name), answer.status_code, kept)
        return _error(BUSY, "no replica takes requests at the moment; try again later")

    async def _pass_on(self, answer: httpx.Response, name: str) -> AsyncIterator[bytes]:
        try:
            async for piece in answer.aiter_raw():
                yield piece
        finally:
            await answer.aclose()
            self._add(name, -1)

    def _others(self, avoided: set[str]) -> list[Backend]:
        return [backend for backend in self._backends.values() if backend.takes and backend.name not in avoided]

    async def _choose(self, avoided: set[str]) -> Backend | None:
        """Return the replica with the fewest outstanding requests for its rate; None: none takes any for long."""
        deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            open_ = self._others(avoided)
            if open_:
                return min(open_, key=lambda one: (self._outstanding.get(one.name, 0) + 1) / max(one.rate_per_s, 1e-9))
            left_s = deadline_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                return None
            avoided.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left_s, 1.0))

    def _add(self, name: str, number: int) -> None:
        self._outstanding[name] = self._outstanding.get(name, 0) + number


def _raw_path(request: Request) -> bytes:
    path: bytes = request.scope["raw_path"]
    query: bytes = request.scope["query_string"]
    return path + (b"?" + query if query else b"")


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "server_error"}}, status)


def create_front(directory: Path) -> Starlette:
    """Return the front as an app."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        front = app.state.front = Front(directory)
        front.look()
        watching = asyncio.create_task(front.watch())
        try:
            yield
        finally:
            watching.cancel()
            await front.close()

    async def state(request: Request) -> Response:
        return JSONResponse(request.app.state.front.state())

    async def ready(request: Request) -> Response:
        return JSONResponse({"status": "ok"}) if request.app.state.front.is_ready else _error(BUSY, "no replica yet")

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def forward(request: Request) -> Response:
        front: Front = request.app.state.front
        return await front.forward(request)

    return Starlette(
        routes=[
            Route("/fleet", state),
            Route("/ready", ready),
            Route("/health", health),
            Route("/{path:path}", forward, methods=["GET", "POST"]),
        ],
        lifespan=lifespan,
    )


def main(arguments: list[str]) -> None:
    """Serve until SIGTERM; what is being answered then is answered."""
    directory, _, port = arguments
    config = uvicorn.Config(
        create_front(Path(directory)),
        host="127.0.0.1",
        port=int(port),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=int(DRAIN_S),
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the controller, which ends the front
    uvicorn.Server(config).run()


if __name__ == "__main__":
    main(sys.argv[1:])
