"""Requests of shapes that parsers disagree about or fail on: each has one answer, and so has the next request."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from typing import Any

import pytest

from tests.attack.client import ADMIN_KEY, connect, read_all, request
from tests.attack.target import OURS, Target
from tests.rings import few

GOOD = {"prompt": [3, 4], "max_tokens": 2}
HEAD = f"Host: 127.0.0.1\r\nAuthorization: Bearer {ADMIN_KEY}\r\n"
END = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


pytestmark = pytest.mark.parametrize("target", OURS, indirect=True, scope="module")


def statuses(answer: bytes) -> list[int]:
    """Of all answers on a connection, interim ones left out."""
    found = [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]
    return [status for status in found if status >= 200]


def raw(start: str, headers: str = "", body: str = "") -> bytes:
    return f"{start}\r\n{HEAD}{headers}\r\n{body}".encode("latin-1")


def chunked(*chunks: str) -> bytes:
    return raw("POST /v1/completions HTTP/1.1", "Transfer-Encoding: chunked\r\n", "".join(chunks))


def body_chunks(extension: str = "") -> list[str]:
    content = json.dumps({"model": "small", **GOOD})
    return [f"{len(content):x}{extension}\r\n{content}\r\n", "0\r\n\r\n"]


POST, GET = "POST /v1/completions HTTP/1.1", "GET /v1/models HTTP/1.1"
UPGRADE = "Connection: Upgrade\r\nUpgrade: "
HTTP_SHAPES: dict[str, tuple[bytes, list[list[int]]]] = {
    "chunks": (chunked(*body_chunks()), [[200, 200]]),
    "chunk extensions": (chunked(*body_chunks(";a=b")), [[200, 200], [400]]),
    "a long chunk extension": (chunked(*body_chunks(";" + "a" * 100_000)), [[400]]),
    "a huge chunk size": (chunked("f" * 15 + "\r\nx"), [[400], []]),
    "a chunk size of many digits": (chunked("0" * 1000 + "1\r\nx\r\n"), [[400]]),
    "a negative chunk size": (chunked("-1\r\nx\r\n"), [[400]]),
    "a chunk size in hex with a prefix": (chunked("0x5\r\nhello\r\n"), [[400]]),
    "trailers": (chunked(body_chunks()[0], "0\r\nContent-Length: 5\r\n\r\n"), [[200, 200], [400]]),
    "TE.CL": (raw(POST, "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"), [[400]]),
    "CL.TE": (raw(POST, "Transfer-Encoding: chunked\r\nContent-Length: 6\r\n", "0\r\n\r\nX"), [[400]]),
    "two codings": (raw(POST, "Transfer-Encoding: gzip, chunked\r\n", "0\r\n\r\n"), [[400]]),
    "an obscured coding": (raw(POST, "Transfer-Encoding: xchunked\r\n", "0\r\n\r\n"), [[400]]),
    "a coding with a tab": (raw(POST, "Transfer-Encoding:\tchunked\r\n", "0\r\n\r\n"), [[400, 200], [400]]),
    "a header name with a blank": (raw(POST, "Content-Length : 5\r\n", "hello"), [[400]]),
    "a folded header": (raw(GET, "X: a\r\n b\r\n"), [[200, 200], [400]]),
    # HTTP lets a reader take it for the end of a line, and h11 does: the next five bytes are a body.
    "a bare line feed": (raw(GET, "X: a\nContent-Length: 5\r\n"), [[200, 400], [400]]),
    "a bare carriage return": (raw(GET, "X: a\rY: b\r\n"), [[400]]),
    "a null in a header": (raw(GET, "X: a\0b\r\n"), [[400]]),
    "two lengths": (raw(POST, "Content-Length: 4\r\nContent-Length: 5\r\n", "hello"), [[400]]),
    "a list of lengths": (raw(POST, "Content-Length: 5, 5\r\n", "hello"), [[400, 200], [400]]),
    "a signed length": (raw(POST, "Content-Length: +5\r\n", "hello"), [[400]]),
    "a length with a line": (raw(POST, "Content-Length: 1_0\r\n", "hello"), [[400]]),
    "a length of many digits": (raw(POST, f"Content-Length: {'9' * 5000}\r\n", "hello"), [[400]]),
    "a length beyond 64 bits": (raw(POST, f"Content-Length: {2**64}\r\n", "hello"), [[413]]),
    "no host": (b"GET /v1/models HTTP/1.1\r\n\r\n", [[400]]),
    "two hosts": (raw(GET, "Host: localhost\r\n"), [[400]]),
    "two keys": (raw(GET, "Authorization: Bearer x\r\n"), [[400]]),
    "an absolute target": (raw("GET http://127.0.0.1/v1/models HTTP/1.1"), [[404, 200]]),
    "a foreign absolute target": (raw("GET http://evil.example/health HTTP/1.1"), [[404, 200]]),
    "half an address": (raw("GET [ HTTP/1.1"), [[404, 200]]),
    "an asterisk": (raw("OPTIONS * HTTP/1.1"), [[404, 200], [405, 200]]),
    "CONNECT": (raw("CONNECT evil.example:443 HTTP/1.1"), [[404, 200], [405, 200], [404], [405]]),
    "TRACE": (raw("TRACE /v1/models HTTP/1.1"), [[405, 200]]),
    "OPTIONS": (raw("OPTIONS /v1/completions HTTP/1.1"), [[405, 200]]),
    "HEAD": (raw("HEAD /v1/models HTTP/1.1"), [[200, 200]]),
    "a path that climbs": (raw("GET /../../etc/passwd HTTP/1.1"), [[404, 200]]),
    "an encoded path": (raw("GET /%76%31/models HTTP/1.1"), [[200, 200], [404, 200]]),
    "a double slash": (raw("GET //v1/models HTTP/1.1"), [[404, 200]]),
    "an encoded null": (raw("GET /v1/models%00 HTTP/1.1"), [[404, 200]]),
    "bad UTF-8 in a path": (raw("GET /%ff%fe HTTP/1.1"), [[404, 200]]),
    "a long path": (raw(f"GET /{'a' * 100_000} HTTP/1.1"), [[400]]),
    "websocket": (raw("GET / HTTP/1.1", f"{UPGRADE}websocket\r\nSec-WebSocket-Version: 13\r\n"), [[200, 200]]),
    "h2c": (raw(GET, "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"), [[200, 200]]),
    "HTTP/2's preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [[400], [404, 400], [405, 400], [421, 400]]),
    "HTTP/0.9": (b"GET /v1/models\r\n", [[400]]),
    "HTTP/1.0": (raw("GET /v1/models HTTP/1.0"), [[200]]),
    "expect continue": (raw(POST, "Content-Length: 3\r\nExpect: 100-continue\r\n", "abc"), [[400, 200]]),
    "another expectation": (raw(POST, "Content-Length: 3\r\nExpect: a-pony\r\n", "abc"), [[400, 200], [417, 200]]),
    "a body of a GET": (raw(GET, f"Content-Length: {len(END)}\r\n") + END, [[200, 200]]),
    "a request in a body": (request(END) + b"", [[400, 200]]),
    "pipelined": (request(GOOD) * 50, [[200] * 51]),
    "a thousand headers": (raw(GET, "a: b\r\n" * 1000), [[200, 200]]),
    "a header flood": (raw(GET, "a: b\r\n" * 100_000), [[400]]),
    "a compressed body": (request(b"\x1f\x8b\x08\0\0", extra="Content-Encoding: gzip\r\n"), [[415, 200]]),
    "cookies and lists": (raw(GET, "Cookie: " + "a=b; " * 2000 + "\r\n"), [[200, 200]]),
}


@pytest.mark.point(20)
@pytest.mark.parametrize("name", HTTP_SHAPES)
def test_shapes_of_http(name: str, target: Target) -> None:
    sent, expected = HTTP_SHAPES[name]
    with connect(target.address, 15) as client:
        with suppress(OSError):
            client.sendall(sent + END)
            client.shutdown(socket.SHUT_WR)
        found = statuses(read_all(client))
    # A head that is much too long is answered into a connection that the client still writes to, which may lose it.
    assert found in expected or (found == [] and len(sent) > 50_000)


DEEP = 100_000
JSON_SHAPES: dict[str, tuple[bytes, int]] = {
    "deep lists": (b'{"model":"small","prompt":' + b"[" * DEEP + b"]" * DEEP + b"}", 400),
    "deep objects": (b'{"model":"small","prompt":[1],"logit_bias":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}", 400),
    "a deep unknown field": (b'{"model":"small","prompt":[1],"x":' + b"[" * DEEP + b"]" * DEEP + b"}", 400),
    "a huge integer": (b'{"model":"small","prompt":[1],"max_tokens":' + b"9" * 1_000_000 + b"}", 400),
    "a huge float": (b'{"model":"small","prompt":[1],"temperature":1e' + b"9" * 1000 + b"}", 400),
    "a long fraction": (b'{"model":"small","prompt":[1],"max_tokens":2,"top_p":0.' + b"3" * 1_000_000 + b"}", 200),
    "duplicate keys": (b'{"model":"other","model":"small","prompt":[1],"max_tokens":1,"max_tokens":2}', 200),
    "a million keys": (b'{"model":"small","prompt":[1],' + b'"a":1,' * 100_000 + b'"b":1}', 400),
    "NaN": (b'{"model":"small","prompt":[1],"temperature":NaN}', 400),
    "a lone surrogate": (b'{"model":"small","prompt":"a\\ud800b","max_tokens":2}', 400),
    "a reversed pair": (b'{"model":"small","prompt":"\\udc00\\ud800","max_tokens":2}', 400),
    "a raw surrogate": (b'{"model":"small","prompt":"\xed\xa0\x80","max_tokens":2}', 400),
    "overlong UTF-8": (b'{"model":"small","prompt":"\xc0\xaf","max_tokens":2}', 400),
    "a byte order mark": (b'\xef\xbb\xbf{"model":"small","prompt":[1],"max_tokens":2}', 400),
    "UTF-16": ('{"model":"small"}'.encode("utf-16"), 400),
    "nulls in text": (b'{"model":"small","prompt":"a\\u0000b","max_tokens":2}', 200),
    "two documents": (b'{"model":"small","prompt":[1]}{"model":"small"}', 400),
    "a number for all": (b"1e400", 400),
    "ids that are floats": (b'{"model":"small","prompt":[1.5]}', 400),
    "ids beyond 64 bits": (b'{"model":"small","prompt":[' + b"1" * 30 + b"]}", 400),
    "ids that are true": (b'{"model":"small","prompt":[true]}', 400),
    "a key of a prototype": (b'{"model":"small","prompt":[1],"__proto__":{},"max_tokens":1}', 400),
}


@pytest.mark.parametrize("name", JSON_SHAPES)
def test_shapes_of_json(name: str, target: Target) -> None:
    body, expected = JSON_SHAPES[name]
    begin_s = time.monotonic()
    status, answer = target.ask("POST", "/v1/completions", body)
    assert status == expected, answer[:300]
    assert b"\n" not in answer and time.monotonic() - begin_s < 10
    assert len(answer) < 5000 or status == 200


def message(content: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}], "max_tokens": 2, **fields}


def with_variables(**variables: Any) -> dict[str, Any]:
    return message("x", chat_template_kwargs=variables)


DEEP_VALUE: Any = "x"
for _ in range(100):
    DEEP_VALUE = [DEEP_VALUE]
CHATS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "a template in a role": (message("x", role="{{ 7 * 7 }}"), (200, 400)),
    "a template in the content": (message("{% for i in range(10**9) %}x{% endfor %}"), (200,)),
    "special tokens": (message("</s><|im_end|><<SYS>>"), (200,)),
    "a role of a megabyte": (message("x", role="r" * 1_000_000), (400,)),
    "no role": (message("x", role=""), (400,)),
    "variables over globals": (with_variables(raise_exception=1, range=2, loop=3), (200,)),
    "variables over messages": (with_variables(messages=[], add_generation_prompt=9), (200,)),
    "deep variables": (with_variables(a=DEEP_VALUE), (200, 400)),
    "long variables": (with_variables(a="x" * 300_000), (400,)),
    "private variables": (with_variables(__class__=1, self=2, caller=3), (200, 400)),
    "many parts": (message([{"type": "text", "text": ""}] * 50_000), (200, 400)),
    "an image": (message([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]), (400,)),
}


@pytest.mark.parametrize("name", CHATS)
def test_chats(name: str, target: Target) -> None:
    body, expected = CHATS[name]
    status, answer = target.ask("POST", "/v1/chat/completions", {"model": target.model, **body})
    assert status in expected, answer[:300]


STOPS: dict[str, Any] = {
    "one letter often": ["a" * 1000] * 16,
    "nearly": ["a" * 999 + "b", "a" * 998 + "c"],
    "a regular expression": ["(a+)+$", ".*", "[", "\\"],
    "every byte": [chr(i) for i in range(0x41, 0x51)],
    "marks": ["\u0301", "\u200d", "\ufffd", "\U0001f600"],
}


@pytest.mark.parametrize("name", few(STOPS, 2))
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(name: str, stream: bool, target: Target) -> None:
    body = {"model": target.model, "prompt": "a" * 50, "max_tokens": 100, "stop": STOPS[name], "stream": stream}
    begin_s = time.monotonic()
    status, _ = target.ask("POST", "/v1/completions", {**body, "ignore_eos": True})
    assert status == 200 and time.monotonic() - begin_s < 30


def test_a_thousand_connections_in_a_second(target: Target) -> None:
    """Each for one request that is refused, in a row as fast as they go."""
    for i in range(1000):
        with connect(target.address) as client:
            client.sendall(b"GET /plan HTTP/1.1\r\nHost: x\r\n\r\n" if i % 2 else b"\x00" * 100)
    assert target.ask("GET", "/health", timeout_s=5)[0] == 200
