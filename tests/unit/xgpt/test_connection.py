"""The load client's connection: kept between exchanges, opened anew where it must be, and never without an answer."""

import asyncio
from collections.abc import Iterator

import pytest

from xgpt.connection import Connection, Failure
from xgpt.core.errors import InputError

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 404 Not Found\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n"
LAST = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
CUT = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhi"


class Server:
    """Gives the answers in order, whatever it is asked; after `LAST`, `CUT` or None it closes the connection."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers: Iterator[bytes | None] = iter(answers)
        self.asked: list[bytes] = []
        self.num_connections = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.read(1 << 16):
                self.asked.append(head)
                answer = next(self.answers)
                writer.write(answer or b"")
                if answer in (None, LAST, CUT):
                    break
        finally:
            writer.close()

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/prefix/"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await asyncio.sleep(0.01)  # until the connections that the client has closed are closed here, too


def exchanges(server: Server, count: int) -> list[object]:
    """(status, body) of each, or the kind of failure."""

    async def run() -> list[object]:
        found: list[object] = []
        async with server as url:
            connection = Connection(url)
            for i in range(count):
                try:
                    found.append((await connection.ask("POST", f"/{i}", b"{}"), await connection.read_all()))
                except Failure as error:
                    found.append(type(error).__name__)
                await asyncio.sleep(0.01)  # what the server has closed is closed here, too
            connection.close()
        return found

    return asyncio.run(run())


def test_a_connection_is_kept() -> None:
    server = Server(WHOLE, CHUNKED, WHOLE)
    assert exchanges(server, 3) == [(200, b"hi"), (404, b"abc"), (200, b"hi")]
    assert server.num_connections == 1
    head = server.asked[1].split(b"\r\n")
    assert head[0] == b"POST /prefix/1 HTTP/1.1" and b"content-length: 2" in head and head[-1] == b"{}"


@pytest.mark.parametrize(
    ("answer", "found"), [(LAST, (200, b"")), (CUT, "RemoteProtocolError"), (None, "RemoteProtocolError")]
)
def test_one_that_ended_is_opened_anew(answer: bytes | None, found: object) -> None:
    server = Server(WHOLE, answer, WHOLE)
    assert exchanges(server, 3) == [(200, b"hi"), found, (200, b"hi")]
    assert server.num_connections == 2


def test_an_answer_that_was_not_read_is_not_the_next_one() -> None:
    async def run(server: Server) -> bytes:
        async with server as url:
            connection = Connection(url)
            await connection.ask("GET", "/first")
            await connection.ask("GET", "/second")
            body = await connection.read_all()
            connection.close()
        return body

    server = Server(CHUNKED, WHOLE)
    assert asyncio.run(run(server)) == b"hi" and server.num_connections == 2


@pytest.mark.parametrize(
    "url", ["127.0.0.1:80", "ftp://host", "http://", "http://host:port", f"http://{'a' * 64}", "http://a..b"]
)
def test_what_is_no_server(url: str) -> None:
    with pytest.raises(InputError, match="http://HOST:PORT"):
        Connection(url)


def test_letters_beyond_ascii_in_a_url_are_encoded() -> None:
    """`xgpt bench` ended with an internal error."""
    server = Server(WHOLE)

    async def run() -> int:
        async with server as url:
            connection = Connection(f"{url}ä%20b")
            status = await connection.ask("GET", "/plan")
            connection.close()
        return status

    assert asyncio.run(run()) == 200
    assert server.asked[0].startswith(b"GET /prefix/%C3%A4%20b/plan ")
