"""Requests of kinds that the other files do not have."""

from __future__ import annotations

import json
import socket
import struct
import time
from contextlib import suppress
from typing import Any

import pytest

from tests.attack.client import connect, read_all, request
from tests.attack.target import OURS, Target, Unharmed
from tests.rings import few

COMPLETIONS, CHAT, MESSAGES, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"


pytestmark = pytest.mark.parametrize("target", OURS, indirect=True, scope="module")


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "temperature": 0, **fields}


def held(**rule: Any) -> dict[str, Any]:
    return chat(structured_outputs=rule)


def called(*parameters: Any) -> dict[str, Any]:
    functions = [{"name": f"f{i}", "parameters": each} for i, each in enumerate(parameters)]
    return chat(tools=[{"type": "function", "function": each} for each in functions], tool_choice="required")


LONE = "\ud800"
"""A surrogate without its other half, which JSON can write and UTF-8 cannot."""
HALVES = {f"${i}": {"properties": {s: {"$ref": f"#/$defs/${i + 1}"} for s in "lr"}} for i in range(30)} | {"$30": {}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "a lone half in a function's name": (CHAT, chat(tools=[{"type": "function", "function": {"name": LONE}}])),
    "a lone half in a property": (CHAT, called({"properties": {LONE: {}}})),
    "a lone half in a value": (CHAT, called({"enum": [LONE]})),
    "a lone half in a choice": (CHAT, held(choice=[LONE])),
    "a lone half in an expression": (CHAT, held(regex=LONE)),
    "a lone half in a variable": (CHAT, chat(chat_template_kwargs={"a": LONE})),
    "a lone half in a stop string": (CHAT, chat(stop=[LONE])),
    "a lone half in metadata": (CHAT, chat(user=LONE, metadata={LONE: LONE})),
    "a lone half in a bias": (CHAT, chat(logit_bias={LONE: 1})),
    "a lone half in a system": (MESSAGES, chat(system=LONE)),
    "a lone half in instructions": (RESPONSES, {"input": "x", "instructions": LONE}),
    "a lone half to count": ("/tokenize", {"prompt": LONE}),
    "an escaped half in arguments": (
        CHAT,
        chat(messages=[{"role": "assistant", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]}]),
    ),
    "counts within counts": (CHAT, held(regex="((a{1000}){1000}){1000}")),
    "a million counted": (CHAT, held(regex="a{1000000}")),
    "an expression of no text": (CHAT, held(regex=r"[^\s\S]")),
    "classes counted": (CHAT, held(regex=r"(\p{L}|\p{N}){5000}")),
    "flags": (CHAT, held(regex="(?i)(?s)(?x) a b")),
    "ten thousand words": (CHAT, held(regex="|".join(f"w{i}" for i in range(10_000)))),
    "a half by its number": (CHAT, held(regex=r"\x{d800}")),
    "a backslash at the end": (CHAT, held(regex="a\\")),
    "groups without an end": (CHAT, held(regex="(" * 5000 + "a" + ")" * 5000)),
    "a choice of nothing": (CHAT, held(choice=[""])),
    "choices that begin each other": (CHAT, held(choice=["a" * i for i in range(1, 300)])),
    "all restrictions": (CHAT, held(choice=["a"], regex="a", json={}, json_object=True)),
    "a bias against what must follow": (CHAT, held(regex="[0-9]+") | {"logit_bias": {str(i): -9 for i in range(999)}}),
    "less than the least": (CHAT, held(regex="ab") | {"min_tokens": 8}),
    "no end where it ends": (CHAT, held(regex="ab") | {"ignore_eos": True}),
    "two to the thirtieth": (CHAT, called({"$defs": HALVES, "$ref": "#/$defs/$0"})),
    "itself for ever": (CHAT, called({"properties": {"n": {"$ref": "#"}}, "required": ["n"]})),
    "parameters that are true": (CHAT, called(True)),
    "words of later drafts": (CHAT, called({"$id": "http://x/", "$dynamicRef": "#a", "unevaluatedProperties": False})),
    "bounds that are none": (CHAT, called({"minItems": -1, "maxItems": 1.5, "items": {"minLength": 1e300}})),
    "as many functions as may be": (CHAT, called(*[{"properties": {"a": {"type": "string"}}}] * 128)),
    "as many prompts as may be": (COMPLETIONS, {"prompt": ["a"] * 1024, "max_tokens": 1}),
    "an empty prompt among others": (COMPLETIONS, {"prompt": ["a", "", "b"], "max_tokens": 1}),
    "an empty list among others": (COMPLETIONS, {"prompt": [[3], [], [4]], "max_tokens": 1}),
    "a hundred of the least seed": (COMPLETIONS, {"prompt": [3], "n": 100, "seed": -(2**63), "temperature": 2}),
    "the least temperature": (COMPLETIONS, {"prompt": [3], "temperature": 5e-324, "max_tokens": 4}),
    "the least of all": (COMPLETIONS, {"prompt": [3], "temperature": 1, "top_p": 5e-324, "min_p": 1, "max_tokens": 4}),
    "the least penalty": (COMPLETIONS, {"prompt": [3], "temperature": 1, "repetition_penalty": 1e-30}),
    "nothing that goes on": (
        CHAT,
        chat(messages=[{"role": "assistant", "content": ""}], continue_final_message=True, add_generation_prompt=False),
    ),
}  # fmt: skip
SPELLINGS = ("+5", " 5", "0x5", "5.0", "\u0665", "1_0", "-0", "\uff15", "5e0", "")
BODIES |= {f"a bias of {key!r}": (COMPLETIONS, {"prompt": [3], "logit_bias": {key: 1}}) for key in SPELLINGS}


@pytest.mark.parametrize("name", few(BODIES, 8))
def test_a_body(name: str, target: Target) -> None:
    path, body = BODIES[name]
    content = json.dumps({"model": target.model, **body} if path != "/tokenize" else body).encode()
    started = time.monotonic()
    status, answer = target.ask("POST", path, content)
    assert status in (200, 400), answer[:300]
    assert time.monotonic() - started < 20 and b"\n" not in answer


TEXTS = {
    "marks on a letter": "a" + "\u0301" * 100,
    "families": "\U0001f468\u200d\U0001f469\u200d\U0001f467" * 10,
    "no characters": "\ufdd0\uffff\U0010ffff" * 20,
    "tags": "\U000e0041" * 50,
    "parts of syllables": "\u1100\u1161\u11a8" * 30,
    "byte order marks": "\ufeff" * 50,
    "ends of lines": "\u2028\u2029\x85\x0b\x0c\x1c" * 20,
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("stream", [False, True])
def test_text_comes_back_as_it_was(name: str, stream: bool, target: Target) -> None:
    body = {"model": target.model, "prompt": TEXTS[name], "max_tokens": 3, "echo": True, "stream": stream}
    status, answer = target.ask("POST", COMPLETIONS, body)
    assert status == 200, answer[:300]
    whole = [answer]
    if stream:  # an end of a line within the text would break its event
        lines = [line for line in answer.split(b"\n") if line]
        assert all(line.startswith(b"data: ") for line in lines)
        whole = [line[6:] for line in lines if line != b"data: [DONE]"]
    choices = [choice for each in whole for choice in json.loads(each)["choices"]]
    assert "".join(choice["text"] for choice in choices).startswith(TEXTS[name])


HEADS: dict[str, tuple[bytes, set[bytes]]] = {
    "HTTP/0.9": (b"GET /health\r\n", {b"", b"400"}),
    "HTTP/2.0": (b"GET /health HTTP/2.0\r\nHost: 127.0.0.1\r\n\r\n", {b"200", b"400", b"505"}),
    "a trace": (b"TRACE / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: secret\r\n\r\n", {b"401", b"405"}),
    "a tunnel": (b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", {b"400", b"401", b"404", b"405"}),
    "a long method": (b"G" * 9000 + b" / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", {b"400", b"401", b"405"}),
    "a length and chunks": (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5c\r\nGPOST / HTTP/1.1\r\n0\r\n\r\n",
        {b"400", b"401"},
    ),
    "two codings in two headers": (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
        b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        {b"400", b"401", b"501"},
    ),
    "the id twice": (request({"prompt": [3]}, extra="X-Request-Id: a\r\nX-Request-Id: b\r\n"), {b"200", b"400"}),
    "the deadline twice": (request({"prompt": [3]}, extra="X-Deadline-S: 5\r\nX-Deadline-S: 1\r\n"), {b"200", b"400"}),
    "a deadline of another alphabet": (request({"prompt": [3]}, extra="X-Deadline-S: \u0663\r\n"), {b"400"}),
    "a deadline of no time": (request({"prompt": [3]}, extra="X-Deadline-S: 1e-300\r\n"), {b"429", b"504"}),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head(name: str, target: Target) -> None:
    sent, accepted = HEADS[name]
    with connect(target.address, 15) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        answer = read_all(client)
    assert answer[9:12] in accepted and b"secret" not in answer


@pytest.mark.parametrize("kind", ["application/json; charset=utf-16", "multipart/form-data; boundary=x", "\xff"])
def test_a_body_is_json_whatever_its_type(kind: str, target: Target) -> None:
    headers = {**target.headers, "Content-Type": kind}
    body = json.dumps({"model": target.model, "prompt": [3], "max_tokens": 1}).encode()
    assert target.ask("POST", COMPLETIONS, body, headers)[0] in (200, 415)
    form = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + b"x" * 1_000_000 + b"\r\n--x--"
    assert target.ask("POST", COMPLETIONS, form, headers)[0] in (400, 415)


@pytest.mark.long
def test_readers_of_a_byte_at_a_time(target: Target, unharmed: Unharmed) -> None:
    body = {"prompt": [3] * 50, "max_tokens": 100, "n": 20, "stream": True, "ignore_eos": True, "logprobs": 5}
    with unharmed(64):
        clients = [connect(target.address) for _ in range(150)]
        for client in clients:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.sendall(request(body))
            client.settimeout(0.001)
        for _ in range(8):
            for client in clients:
                with suppress(OSError):
                    client.recv(1)
            time.sleep(0.3)
        for client in clients:
            reset(client)


@pytest.mark.long
def test_streams_reset_at_odd_moments(target: Target, unharmed: Unharmed) -> None:
    with unharmed(64):
        for number in range(60):
            body = held(regex=f"[a-z]{{100,200}}{number}") | {"n": 8, "max_tokens": 200, "stream": True}
            client = connect(target.address)
            client.sendall(request(body, path=CHAT))
            time.sleep(0.01 * (number % 7))
            reset(client)
        client = connect(target.address)
        client.sendall(request({"prompt": [3], "max_tokens": 300, "stream": True, "ignore_eos": True}) * 100)
        client.recv(1000)
        reset(client)


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
