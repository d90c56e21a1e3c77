"""The longest time for which one client can block the event loop, in seconds of its thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.attack.client import ADMIN_KEY, elsewhere, request, send_unfinished, statuses, tiny_chunks
from tests.fakes import CHAT_TEMPLATE, FakeExecutor, byte_tokenizer, fake_app, fake_engine, running
from tests.heap import set_heap_aside
from tests.rings import few
from xrunner.server.access.keys import ApiKeys
from xrunner.server.api.chat import ChatTemplate
from xrunner.server.api.formats import HERMES, call_formats
from xrunner.server.api.reader import OutputReader
from xrunner.server.api.text import TextCodec

LONGEST_S = 0.1
"""Of one callback, whatever a client sends: 5 to 45 ms on a machine at rest, twice that beside two other tests."""
TURN_S = 0.2
"""Of one turn of the loop, which runs all callbacks that are ready: a probe waits for one or two turns."""


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A server in this process, of which no turn may have been longer."""
    longest: list[tuple[float, str]] = [(0.0, "")]
    turns = [0.0]
    run, run_once = asyncio.events.Handle._run, asyncio.BaseEventLoop._run_once  # type: ignore[attr-defined]

    def turn(loop: asyncio.BaseEventLoop) -> None:
        begin_s = time.thread_time()
        run_once(loop)
        turns.append(time.thread_time() - begin_s)

    def timed(handle: asyncio.Handle) -> None:
        begin_s = time.thread_time()
        run(handle)
        if (took_s := time.thread_time() - begin_s) > longest[0][0]:
            longest.insert(0, (took_s, repr(handle)[:200]))

    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["y" * 300])  # so that a text of 300 times the context is not refused by its length alone
    codec = TextCodec(tokenizer, ChatTemplate(CHAT_TEMPLATE, {"eos_token": "</s>"}))
    with running(fake_app(fake_engine(FakeExecutor(step_s=0.002)), codec=codec)) as url:
        at = "127.0.0.1", int(url.rpartition(":")[2])
        assert statuses(at, [fake(prompt=[1])]) == [200]
        monkeypatch.setattr(asyncio.events.Handle, "_run", timed)
        monkeypatch.setattr(asyncio.BaseEventLoop, "_run_once", turn)
        set_heap_aside()
        yield at
        monkeypatch.undo()
    assert longest[0][0] < LONGEST_S, longest
    assert max(turns) < TURN_S


def fake(**fields: Any) -> bytes:
    return request({"model": "fake", "ignore_eos": True, **fields})


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ITEM = {"type": "message", "role": "user", "content": "x"}
BLOCK = {"type": "text", "text": ""}


def message(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}], **fields}


LONG_PATH = {
    "name": "a",
    "schema": {"properties": {"k" * 60_000: {"properties": {f"p{number}": {} for number in range(6000)}}}},
}
TOO_MUCH: dict[str, Callable[[], list[bytes]]] = {
    "prompts": lambda: [fake(prompt="the quick brown fox " * 7500)] * 60,
    "a long body": lambda: [fake(prompt="x" * 15_000_000)] * 4,
    "many ids": lambda: [fake(prompt=[1] * 260_000)] * 4,
    "deep JSON": lambda: [request(b'{"prompt":' + b"[" * 1_000_000)] * 4,
    "messages": lambda: (
        [request({"model": "fake", "messages": [{"role": "user", "content": "x"}] * 100_000}, path=CHAT)] * 4
    ),
    "a long model": lambda: [fake(model="m" * 15_000_000)] * 4,
    "a long user": lambda: [fake(prompt=[1], user="\U0001f600" * 1_250_000)] * 4,
    "a long unknown field": lambda: [fake(**{"m" * 7_000_000: 1})] * 4,
    "variables": lambda: (
        [request({"model": "fake", "messages": [], "chat_template_kwargs": {"a": "x" * 15_000_000}}, path=CHAT)] * 4
    ),
    "parts": lambda: (
        [
            request(
                {"model": "fake", "messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 380_000}]},
                path=CHAT,
            )
        ]
        * 4
    ),
    "items": lambda: [request({"model": "fake", "input": [ITEM] * 70_000}, path=RESPONSES)] * 4,
    "parts of an item": lambda: (
        [
            request(
                {"model": "fake", "input": [ITEM | {"content": [{"type": "input_text", "text": ""}] * 60_000}]},
                path=RESPONSES,
            )
        ]
        * 4
    ),
    "long instructions": lambda: (
        [request({"model": "fake", "input": "x", "instructions": "y" * 15_000_000}, path=RESPONSES)] * 4
    ),
    "results of calls": lambda: (
        [
            request(
                {"model": "fake", "input": [{"type": "function_call_output", "call_id": "c", "output": "o"}] * 60_000},
                path=RESPONSES,
            )
        ]
        * 4
    ),
    "blocks": lambda: [request(message(messages=[{"role": "user", "content": [BLOCK] * 80_000}]), path=MESSAGES)] * 4,
    "a system of blocks": lambda: [request(message(system=[BLOCK] * 80_000), path=MESSAGES)] * 4,
    "arguments of calls": lambda: (
        [
            request(
                message(
                    messages=[
                        {
                            "role": "assistant",
                            "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"a": [1] * 200_000}}],
                        }
                    ]
                ),
                path=MESSAGES,
            )
        ]
        * 4
    ),
    "blocks to count": lambda: [request(message(system=[BLOCK] * 80_000), path=f"{MESSAGES}/count_tokens")] * 4,
    "headers": lambda: [request(b"", extra="a:\r\n" * 60_000)] * 20,
    # What messages of errors once said of them took seconds, or gigabytes.
    "a long role": lambda: (
        [request({"model": "fake", "messages": [{"role": "r" * 15_000_000, "content": "x"}]}, path=CHAT)] * 4
    ),
    "a long name of a field": lambda: [fake(**{"m" * 2_000_000: 1})] * 4,
    "a long type of an item": lambda: (
        [request(b'{"model":"fake","input":[{"type":"' + b"\x7f" * 15_000_000 + b'"}]}', path=RESPONSES)] * 4
    ),
    "a long path in a schema": lambda: (
        [request(message(response_format={"type": "json_schema", "json_schema": LONG_PATH}), path=CHAT)] * 4
    ),
    "a stored prompt": lambda: (
        [
            request(
                b'{"model":"fake","input":"x","prompt":{"a":["'
                + b"x" * 12_000_000
                + b'"'
                + b",[]" * 1_200_000
                + b"]}}",
                path=RESPONSES,
            )
        ]
        * 4
    ),
    "the input of a call": lambda: (
        [
            request(
                b'{"model":"fake","max_tokens":2,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a",'
                b'"name":"f","input":{"a":["' + b"x" * 12_000_000 + b'"' + b",[]" * 1_200_000 + b"]}}]}]}",
                path=MESSAGES,
            )
        ]
        * 4
    ),
    # A number that may stand for an integer once had the whole body decoded again, as objects of Python.
    "a fraction before a million lists": lambda: (
        [
            request(
                b'{"model":"fake","max_tokens":1.5,"messages":["'
                + b"x" * 12_000_000
                + b'"'
                + b",[]" * 1_200_000
                + b"]}",
                path=CHAT,
            )
        ]
        * 4
    ),
}


QUICK = ("prompts", "a long body", "deep JSON", "messages", "parts", "items", "blocks", "headers")
"""One for each reader of requests."""


@pytest.mark.point(11)
@pytest.mark.parametrize("name", few([*QUICK, *(name for name in TOO_MUCH if name not in QUICK)], len(QUICK)))
def test_what_is_refused_costs_little(name: str, address: tuple[str, int]) -> None:
    assert set(elsewhere(statuses, address, TOO_MUCH[name]())) <= {400, 413}


@pytest.mark.point(21)
@pytest.mark.parametrize(("path", "status"), few([("/v1/completions", 400), ("/nowhere", 404)]))
def test_a_body_in_chunks_of_one_byte(path: str, status: int, address: tuple[str, int]) -> None:
    """400,000 of them once took 15 s, with a key or without. What is not asked for is not even parsed."""
    # The client still writes when it is answered, and may lose the answer.
    assert set(elsewhere(statuses, address, [tiny_chunks(path)] * 8)) <= {status, 0}
    assert set(elsewhere(statuses, address, [tiny_chunks(path, 600)] * 8)) <= {status, 0}


ANSWERS = {
    "log probabilities": fake(prompt=[[1]] * 4, n=128, max_tokens=90, logprobs=20),
    "tokens": fake(prompt=[[1]] * 8, n=128, max_tokens=100),
    "text": fake(prompt="\u20ac" * 30, n=64, max_tokens=200),
    "a stream": fake(prompt=[[1]] * 4, n=128, max_tokens=90, logprobs=20, stream=True),
    "a chat": request(
        {"model": "fake", "messages": [{"role": "user", "content": "x"}], "n": 100, "max_tokens": 90, "logprobs": True}
        | {"top_logprobs": 20, "ignore_eos": True},
        path=CHAT,
    ),
}


@pytest.mark.point(13)
@pytest.mark.long
@pytest.mark.parametrize("name", ANSWERS)
def test_the_largest_answers_are_written_in_slices(name: str, address: tuple[str, int]) -> None:
    assert elsewhere(statuses, address, [ANSWERS[name]]) == [200]


@pytest.mark.point(13)
def test_larger_answers_are_refused(address: tuple[str, int]) -> None:
    raw = fake(prompt=[[1]] * 4, n=128, max_tokens=400, logprobs=20)
    assert elsewhere(statuses, address, [raw]) == [400]


@pytest.mark.point(22)
def test_long_bodies_take_turns(address: tuple[str, int]) -> None:
    """36 of them at once kept a probe waiting for the reading of all."""
    raw = fake(prompt=[1], user="\U0001f600" * 100_000 + "x" * 3_000_000)
    assert set(elsewhere(statuses, address, [raw] * 36, 36)) <= {400, 413, 503}


@pytest.mark.point(5)
def test_unfinished_bodies(address: tuple[str, int]) -> None:
    elsewhere(send_unfinished, address, 30)


@pytest.mark.point(28)
def test_keys_are_looked_up_by_their_digests() -> None:
    """CVE-2025-59425 (vLLM): characters were compared one by one, and the clock told how many were right."""
    keys = ApiKeys.parse(ADMIN_KEY)
    assert keys.find(f"Bearer {ADMIN_KEY}".encode()) is not None
    assert ADMIN_KEY not in repr(vars(keys))


CALL = '<tool_call>{"name": "f", "arguments": {}}'


@pytest.mark.point(28)
@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        ('<tool_call>{"name": "f", "arguments": {', '"a": [["a": [["a": [[}}]]\\"<tool_call>'),
        (f"{CALL}</tool_call>", " " * 64),
        (CALL, " " * 64),
        (CALL[:-1], " " * 64),
        ("<tool_call>x", "x" * 64),
    ],
)
def test_reading_calls_takes_time_in_proportion(begin: str, piece: str) -> None:
    """CVE-2025-48887 (vLLM): an expression that looked for calls in an output took exponential time. White space after
    a call once took ours quadratic time."""

    def took_s(count: int) -> float:
        reader, begin_s = OutputReader(call_formats()[HERMES]), time.thread_time()
        for part in [begin, *[piece] * count]:
            reader.push(part)
            reader.found.pieces()
        reader.push("", is_end=True)
        return time.thread_time() - begin_s

    took_s(100)
    set_heap_aside()
    assert took_s(16_000) < 50 * max(took_s(1000), 0.002)
