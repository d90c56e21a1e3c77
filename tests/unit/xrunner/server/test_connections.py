"""Connections end in time, whatever the client does or leaves undone, and one more always finds a place."""

import gc
import json
import re
import socket
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.attack.client import read_all
from tests.fakes import FakeExecutor, eventually, fake_app, fake_engine, running
from tests.rings import few
from xrunner.server.http import answer, connections

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def connect(url: str) -> socket.socket:
    return socket.create_connection(url.removeprefix("http://").split(":"), timeout=10)


def post(body: object, headers: str = "", path: str = "/v1/completions") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n{headers}\r\n".encode() + content


def completion(**fields: object) -> dict[str, object]:
    return {"model": "fake", "prompt": [1], "max_tokens": 3, "ignore_eos": True, **fields}


def status(answer: bytes) -> int:
    return int(answer.split()[1])


def waits_to_be_read(server_port: int, client_port: int) -> int:
    """The bytes that the kernel holds for a client on the server's side."""
    ends = [f":{port:04X}" for port in (server_port, client_port)]
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return sum(int(row[4][:8], 16) for row in rows if [row[1][8:], row[2][8:]] == ends)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEAD_TIMEOUT_S", "WRITE_TIMEOUT_S", "REST_TIMEOUT_S"):
        monkeypatch.setattr(connections, name, 0.5)


def test_a_closed_connection_is_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reference cycles kept it until the next full garbage collection, with the buffers of TLS if there is any."""
    opened = weakref.WeakSet[connections.Protocol]()
    made = connections.Protocol.connection_made

    def note(self: connections.Protocol, transport: Any) -> None:
        opened.add(self)
        made(self, transport)

    monkeypatch.setattr(connections.Protocol, "connection_made", note)
    with running(fake_app(fake_engine(FakeExecutor()))) as url:
        gc.disable()
        try:
            for sent in (HEALTH, post(completion()), post(completion(stream=True))):
                with connect(url) as client:
                    client.sendall(sent)
                    assert status(client.recv(1 << 16)) == 200
                    assert len(opened) == 1
                assert eventually(lambda: not opened)
        finally:
            gc.enable()


@pytest.fixture
def url(short: None) -> Iterator[str]:
    with running(fake_app(fake_engine(FakeExecutor(step_s=0.01)))) as url:
        yield url


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /hea",
        HEALTH + b"GET /hea",  # kept alive, and half of another head
        HEALTH * 3 + b"GET",
        # Refused before its body, which never comes.
        b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n",
    ],
)
def test_a_client_that_says_no_more_is_let_go(url: str, sent: bytes) -> None:
    with connect(url) as client:
        client.sendall(sent)
        begin_s = time.monotonic()
        answer = read_all(client)
        assert time.monotonic() - begin_s < 4
    assert answer.count(b"HTTP/1.1") == (sent.count(HEALTH) or sent.startswith(b"POST"))


def test_a_client_that_rests_between_requests_is_kept(url: str) -> None:
    with connect(url) as client:
        for _ in range(2):
            client.sendall(HEALTH)
            answer = b""
            while b"ok" not in answer:
                answer += client.recv(1 << 16)
            assert status(answer) == 200
            time.sleep(0.8)


@pytest.mark.skipif(sys.platform != "linux", reason="buffers are read from /proc")
def test_a_client_that_does_not_read_is_let_go(short: None) -> None:
    engine = fake_engine(FakeExecutor(step_s=0.01))
    with running(fake_app(engine)) as url, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(10)
        client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        ports = client.getpeername()[1], client.getsockname()[1]
        client.sendall(post(completion(prompt=[[1]] * 64, max_tokens=400, logprobs=20, stream=True)))
        assert eventually(lambda: bool(engine.pool.running))
        assert eventually(lambda: not engine.pool.running, 60)  # cancelled, or all output waits for the client
        # The kernel kept megabytes for the client after the connection had been closed.
        assert eventually(lambda: waits_to_be_read(*ports) == 0)
        answer = read_all(client)
    assert status(answer) == 200
    assert not answer.endswith(b"0\r\n\r\n")


def test_a_half_closed_client_has_its_answers(url: str) -> None:
    with connect(url) as client:
        client.sendall(post(completion(max_tokens=50)) * 2 + post(completion(stream=True)))
        client.shutdown(socket.SHUT_WR)
        answer = read_all(client)
    assert answer.count(b"HTTP/1.1 200") == 3
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_client_that_has_gone_is_not_answered_on(short: None) -> None:
    engine = fake_engine(FakeExecutor(step_s=0.05))
    with running(fake_app(engine)) as url:
        with connect(url) as client:
            client.sendall(post(completion(max_tokens=500)))
            assert eventually(lambda: bool(engine.pool.running))
        begin_s = time.monotonic()
        assert eventually(lambda: not engine.pool.running)
        assert time.monotonic() - begin_s < 2


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_waiting_requests_of_clients_that_have_gone_are_never_encoded(
    fields: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams that waited had their heads; each was encoded, and ended at its second token."""
    monkeypatch.setattr(answer, "HEAD_S", 0.05)
    engine = fake_engine(FakeExecutor(step_s=0.01), max_batch=1)
    encoded: list[int] = []
    engine.listen(lambda record: encoded.extend(chunk[0] for chunk in record.encode))
    with running(fake_app(engine)) as url, connect(url) as stays:
        stays.sendall(post(completion(max_tokens=500)))
        assert eventually(lambda: bool(engine.pool.running))
        with ExitStack() as leaving:
            for headers in ("", "Connection: close\r\n"):
                client = leaving.enter_context(connect(url))
                client.sendall(post(completion(max_tokens=500, **fields), headers))
                assert not fields or b"200" in client.recv(1 << 16)  # the head, before any token
            assert eventually(lambda: len(engine.pool.waiting) == 2)
        assert eventually(lambda: not engine.pool.waiting, 4.0)
        assert engine.pool.running
    assert encoded == [0]


@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", [400]),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 40_000 + b"\r\n", [400]),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", [400]),
        (b"POST /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", [405]),  # not even parsed
    ],
)
def test_what_is_not_http_is_refused_in_one_form(url: str, sent: bytes, answers: list[int]) -> None:
    with connect(url) as client:
        with suppress(ConnectionError):
            client.sendall(sent)
        answer = read_all(client)
    found = [int(line.split()[1]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1")]
    assert found in (answers, [405, *answers], [])
    assert found == [] or b'"invalid_request_error"' in answer


def test_one_more_takes_the_place_of_the_one_that_has_rested_longest() -> None:
    with running(fake_app(fake_engine(FakeExecutor())), most=8) as url, ExitStack() as clients:
        idle = [clients.enter_context(connect(url)) for _ in range(100)]
        with connect(url) as client:
            client.sendall(HEALTH)
            assert status(client.recv(1 << 16)) == 200
        assert sum(read_or_none(client) == b"" for client in idle) >= 92


def read_or_none(client: socket.socket) -> bytes | None:
    """What has come; None: nothing, and the connection stands."""
    client.settimeout(0.05)
    try:
        return client.recv(1 << 16)
    except ConnectionError:
        return b""
    except TimeoutError:
        return None


def test_where_all_are_answered_only_probes_are() -> None:
    with running(fake_app(fake_engine(FakeExecutor(step_s=0.05))), most=4) as url, ExitStack() as clients:
        busy = [clients.enter_context(connect(url)) for _ in range(4)]
        for client in busy:
            client.sendall(post(completion(max_tokens=100, stream=True)))
            client.recv(100)
        for sent, expected in (
            (HEALTH, 200),
            (HEALTH.replace(b"/health", b"/metrics"), 503),
            (post(completion()), 503),
        ):
            with connect(url) as client:
                client.sendall(sent)
                assert status(client.recv(1 << 16)) == expected
        assert all(b"data:" in client.recv(1 << 16) for client in busy)


@pytest.mark.parametrize(
    "extra",
    [
        "Transfer-Encoding: chunked\r\n",
        "Host: y\r\n",
        "Authorization: Bearer a\r\nAuthorization: Bearer b\r\n",
        "X-Deadline-S: 1\r\nX-Deadline-S: 2\r\n",
        "Content-Length: 7\r\n",
    ],
)
def test_heads_that_two_readers_take_differently_are_refused(url: str, extra: str) -> None:
    with connect(url) as client:
        client.sendall(post(completion(), extra) + HEALTH)
        answer = read_all(client)
    assert status(answer) == 400
    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_failing_request_is_one_failing_request(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xrunner.server.submission.check_tokens", lambda *_: 1 / 0)
    with connect(url) as client:
        client.sendall(post(completion()) + HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        answer = read_all(client)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"500", b"200"]


@pytest.mark.parametrize("stream", few([False, True]))
def test_a_deadline_holds_also_where_the_client_does_not_read(stream: bool) -> None:
    engine = fake_engine(FakeExecutor(step_s=0.01), max_batch=64)
    with running(fake_app(engine)) as url, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(10)
        client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        body = completion(prompt=[[1]] * 1000, max_tokens=40, logprobs=20, deadline_s=2, stream=stream)
        begin_s = time.monotonic()
        client.sendall(post(body))
        assert eventually(lambda: bool(engine.pool.running))
        while engine.pool.running and time.monotonic() < begin_s + 10:
            time.sleep(0.02)
        assert time.monotonic() - begin_s < 3.5
        time.sleep(1.5)
        answer = client.recv(1000) if not stream else read_all(client)
    # A whole answer's 504 fits into any buffer; the end of a stream has not been read.
    assert status(answer) == (200 if stream else 504)
    assert not answer.endswith(b"0\r\n\r\n")


def chunked(parts: list[bytes], path: str = "/v1/completions") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in [*parts, b""])


def test_a_body_in_chunks_is_parsed_when_it_is_asked_for(url: str) -> None:
    """Chunks as clients write them are one body; nobody asks for that of an unknown path, and the connection ends."""
    content = json.dumps(completion()).encode()
    parts = [content[i : i + 1] for i in range(len(content))]
    with connect(url) as client:
        client.sendall(chunked(parts) + chunked([content]) + chunked([content], "/nowhere"))
        answers = read_all(client)
    assert [int(part[:3]) for part in answers.split(b"HTTP/1.1 ")[1:]] == [200, 200, 404]
    assert b"connection: close" in answers.lower()


def test_a_body_in_too_many_chunks_is_refused(url: str) -> None:
    with connect(url) as client:
        client.sendall(chunked([b" "] * 511 + [json.dumps(completion()).encode()]))
        assert status(client.recv(1 << 16)) == 200
    with connect(url) as client:
        client.sendall(chunked([b" "] * 600))
        answer = read_all(client)
    assert status(answer) == 400 and b"512 chunks" in answer


def test_idle_connections_outlive_the_pools_of_proxies() -> None:
    """Go's pools keep a connection for 90 s; one that was closed after 60 s lost the request that came next."""
    assert connections.KEEP_ALIVE_S > 90
