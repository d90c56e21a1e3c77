"""The front of a fleet: requests go to replicas that take them, and none is lost where one leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn import Config, Server

from xrunner.front import create_front


class Replica:
    """A server that says its name, after a while, in pieces."""

    def __init__(self, name: str, seconds: float = 0.0, status: int = 200) -> None:
        self.name, self.seconds, self.status, self.num = name, seconds, status, 0

    async def answer(self, request: Request) -> Response:
        self.num += 1
        if self.status != 200:
            return JSONResponse({}, self.status)
        body = await request.body()

        async def pieces() -> AsyncIterator[bytes]:
            yield b"data: " + self.name.encode() + b"\n\n"
            await asyncio.sleep(self.seconds)
            yield b"data: " + body + b"\n\n"

        return StreamingResponse(pieces(), media_type="text/event-stream")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[int]:
        app = Starlette(routes=[Route("/{path:path}", self.answer, methods=["GET", "POST"])])
        server = Server(Config(app, port=0, log_level="error"))
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
        server.should_exit = True
        await task


def show(directory: Path, name: str, port: int, *, takes: bool = True, rate: float = 1.0) -> None:
    text = json.dumps({"name": name, "port": port, "rate_per_s": rate, "takes": takes})
    (directory / f"{name}.json").write_text(text)


@asynccontextmanager
async def fronted(directory: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = create_front(directory)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://front", timeout=30) as client:
            yield client


async def ask(client: httpx.AsyncClient, number: int) -> str:
    answer = await client.post("/v1/completions?a=1", content=str(number))
    assert answer.status_code == 200
    first, second = answer.text.split("\n\n")[:2]
    assert second == f"data: {number}"
    return first.removeprefix("data: ")


def test_requests_go_where_the_fewest_are_for_the_rate(tmp_path: Path) -> None:
    async def run() -> None:
        async with Replica("slow", 0.3).running() as slow, Replica("fast", 0.3).running() as fast:
            show(tmp_path, "slow", slow)
            show(tmp_path, "fast", fast, rate=3.0)
            async with fronted(tmp_path) as client:
                names = await asyncio.gather(*(ask(client, i) for i in range(16)))
                assert names.count("fast") == 12
                state = (await client.get("/fleet")).json()
                assert state == {"arrived": 16, "outstanding": {}}

    asyncio.run(run())


def test_a_replica_that_leaves_ends_what_it_has_and_gets_no_more(tmp_path: Path) -> None:
    async def run() -> None:
        async with Replica("a", 0.5).running() as a, Replica("b").running() as b:
            show(tmp_path, "a", a)
            async with fronted(tmp_path) as client:
                before = [asyncio.create_task(ask(client, i)) for i in range(4)]
                await asyncio.sleep(0.2)
                show(tmp_path, "a", a, takes=False)
                show(tmp_path, "b", b)
                await asyncio.sleep(0.25)
                assert (await client.get("/fleet")).json()["outstanding"] == {"a": 4}
                assert {await ask(client, i) for i in range(4)} == {"b"}
                assert await asyncio.gather(*before) == ["a"] * 4

    asyncio.run(run())


def test_what_a_replica_refuses_or_cannot_be_asked_goes_to_another(tmp_path: Path) -> None:
    async def run() -> None:
        ending = Replica("ending", status=503)
        async with ending.running() as refusing, Replica("there").running() as there:
            show(tmp_path, "gone", 1, rate=100.0)  # nothing listens there
            show(tmp_path, "ending", refusing, rate=50.0)
            show(tmp_path, "there", there)
            async with fronted(tmp_path) as client:
                assert [await ask(client, i) for i in range(3)] == ["there"] * 3
                assert ending.num == 3

    asyncio.run(run())


def test_a_request_waits_for_the_first_replica(tmp_path: Path) -> None:
    async def run() -> None:
        async with Replica("late").running() as late, fronted(tmp_path) as client:
            assert (await client.get("/ready")).status_code == 503
            waiting = asyncio.create_task(ask(client, 1))
            await asyncio.sleep(0.2)
            show(tmp_path, "late", late)
            assert await waiting == "late"

    asyncio.run(run())
