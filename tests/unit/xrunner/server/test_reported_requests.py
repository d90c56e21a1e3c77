"""Requests from public reports about other servers, which refused them or wrote their answers in another form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fakes import VOCAB_SIZE, SayingExecutor, byte_tokenizer, fake_app, fake_engine, running
from xrunner.server.api.chat import ChatTemplate
from xrunner.server.api.text import TextCodec

TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>
{%- if enable_thinking is false %}<think></think>{% endif %}{# <tool_call> #}"""
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NAMES = ("a", "b")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PLACE}} for name in NAMES]
RESPONSE_TOOLS = [{"type": "function", "name": name, "parameters": PLACE} for name in NAMES]
CLIENT_TOOLS = [{"name": name, "input_schema": PLACE} for name in NAMES]
A, B = (f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "Rome"}}}}\n</tool_call>' for name in NAMES)
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    codec, executor = TextCodec(byte_tokenizer(), ChatTemplate(TEMPLATE)), SayingExecutor(byte_tokenizer())
    with running(fake_app(fake_engine(executor), codec=codec, eos_token_ids=frozenset({VOCAB_SIZE - 1}))) as url:
        yield url


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"SAY[{text}]YAS"}]


def post(url: str, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json={"model": "fake"} | fields)


def stream(url: str, path: str, **fields: Any) -> list[dict[str, Any]]:
    lines = post(url, path, stream=True, **fields).text.split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"]


def test_a_call_that_is_cut_ends_with_length_also_in_a_stream(url: str) -> None:
    chunks = stream(url, CHAT, messages=say(A + B), tools=TOOLS, max_tokens=55)
    assert any(chunk["choices"][0]["delta"].get("tool_calls") for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    cut = post(url, MESSAGES, messages=say(A), tools=CLIENT_TOOLS, max_tokens=50).json()
    assert cut["stop_reason"] == "max_tokens"


def test_chunks_have_one_id_and_the_last_has_the_usage_alone(url: str) -> None:
    """Each token has its log probability, those of reasoning and calls too."""
    fields = {"tools": TOOLS, "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}
    *chunks, last = stream(url, CHAT, messages=say(f"<think>Hm.</think>Yes.{A}"), **fields)
    assert len({(chunk["id"], chunk["model"]) for chunk in (*chunks, last)}) == 1
    assert last["choices"] == [] and all(chunk["choices"] for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [each["delta"].get("role") for each in choices] == ["assistant", *[None] * (len(choices) - 1)]
    assert all(each["logprobs"] for each in choices if each["delta"].get("reasoning_content"))
    scored = sum(len(each["logprobs"]["content"]) for each in choices if each["logprobs"])
    assert scored == last["usage"]["completion_tokens"]


def test_two_calls_are_two_items(url: str) -> None:
    events = stream(url, RESPONSES, input=say(A + B), tools=RESPONSE_TOOLS)
    done = [each for each in events if each["type"] == "response.output_item.done"]
    assert [(each["output_index"], each["item"]["name"]) for each in done] == [(0, "a"), (1, "b")]
    assert not any("output_text" in each["type"] for each in events)
    assert [each["sequence_number"] for each in events] == list(range(len(events)))


def test_a_call_alone_begins_with_no_empty_text(url: str) -> None:
    events = stream(url, MESSAGES, messages=say(A), tools=CLIENT_TOOLS, max_tokens=200)
    blocks = [each["content_block"]["type"] for each in events if each["type"] == "content_block_start"]
    assert blocks == ["tool_use"] and events[-2]["delta"]["stop_reason"] == "tool_use"


def test_an_image_in_a_result_is_named(url: str) -> None:
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "a", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "see"}, IMAGE]}
    messages = [*say("x"), used, {"role": "user", "content": [result]}]
    refused = post(url, MESSAGES, messages=messages, tools=CLIENT_TOOLS, max_tokens=9)
    assert refused.status_code == 400 and "'image'" in refused.text


HINT = {"type": "text", "text": "", "cache_control": {"type": "ephemeral"}}
THOUGHTS = [
    {"type": "text", "text": "y"},
    {"type": "thinking", "thinking": "z", "signature": "s"},
    {"type": "redacted_thinking", "data": "q"},
]
CALL = {"type": "function_call", "name": "a", "call_id": "c", "arguments": '{"city": "Rome"} and more'}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (MESSAGES, {"messages": [{"role": "user", "content": [HINT]}, *say("x")]}),
        (MESSAGES, {"messages": [*say("x"), {"role": "assistant", "content": THOUGHTS}, *say("x")]}),
        (RESPONSES, {"input": [*say("x"), {"role": "assistant", "content": []}]}),
        (RESPONSES, {"input": [*say("x"), CALL, {"type": "function_call_output", "call_id": "c", "output": "18"}]}),
        (CHAT, {"messages": say("x"), "tools": [], "tool_choice": "none"}),
        (CHAT, {"messages": say("x"), "tools": None, "functions": None, "logprobs": None, "stop": None, "n": None}),
    ],
)
def test_what_clients_send_back_is_accepted(url: str, path: str, fields: dict[str, Any]) -> None:
    limit = {} if path == RESPONSES else {"max_tokens": 9}
    assert post(url, path, **fields, **limit).status_code == 200
