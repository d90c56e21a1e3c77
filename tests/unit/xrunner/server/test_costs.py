"""What a request costs a server is bounded: memory until it has ended, characters in errors, lines of log."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest

from tests.fakes import FakeExecutor, byte_codec, byte_tokenizer, eventually, fake_app, fake_engine, running
from xgpt.core.errors import MAX_SHOWN
from xrunner.channel.ends import EngineEnd, FrontEnd, pair
from xrunner.channel.messages import DecodeDown, Submit, decode_up
from xrunner.generation import Generation, SamplingParams, of_choices
from xrunner.logs import log_json
from xrunner.prefixes import Prefixes
from xrunner.server.access.keys import ApiKeys
from xrunner.server.api.chat_request import ChatRequest, TokenizeRequest
from xrunner.server.api.choices import Delta, TokenReport
from xrunner.server.api.errors import ApiError
from xrunner.server.api.messages import MessagesRequest
from xrunner.server.api.parsing import (
    FREE_FIELDS,
    MAX_FREE_BYTES,
    parse_chat,
    parse_completion,
    parse_responses,
    parse_tokenize,
)
from xrunner.server.api.protocol import CompletionRequest, DetokenizeRequest
from xrunner.server.api.response_tools import CallItems
from xrunner.server.api.responses import ResponsesRequest, ResponsesWriter
from xrunner.server.api.text import TextCodec
from xrunner.server.api.writers import PromptTokens
from xrunner.server.http import bodies, outputs
from xrunner.server.submission import Limits

COMPLETION: dict[str, Any] = {"model": "fake", "prompt": [5, 6], "max_tokens": 2, "ignore_eos": True}
CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
LONG = "".join(chr(0x4E00 + i % 9000) for i in range(3 * MAX_SHOWN))
"""A text of which no piece of more than `MAX_SHOWN` characters may come back."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(fake_app(fake_engine(FakeExecutor()), codec=byte_codec())) as url:
        yield url


def post(url: str, body: dict[str, Any], path: str = "/v1/completions", **options: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, trust_env=False, timeout=60, **options)


ECHOING: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({**COMPLETION, "model": LONG}, "/v1/completions"),
    "an unknown field": ({**COMPLETION, LONG: 1}, "/v1/completions"),
    "a token of a bias": ({**COMPLETION, "logit_bias": {LONG: 1}}, "/v1/completions"),
    "a role that the template refuses": (
        {**CHAT, "messages": [{"role": LONG, "content": "x"}]},
        "/v1/chat/completions",
    ),
    "a kind of part": ({**CHAT, "messages": [{"role": "user", "content": [{"type": LONG}]}]}, "/v1/chat/completions"),
    "a function": (
        {
            **CHAT,
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": LONG}},
        },
        "/v1/chat/completions",
    ),
    "a schema": (
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": LONG}}}},
        "/v1/chat/completions",
    ),
}


@pytest.mark.parametrize("name", ECHOING)
def test_nothing_long_of_a_request_comes_back(name: str, url: str) -> None:
    body, path = ECHOING[name]
    answer = post(url, body, path)
    assert answer.status_code in (400, 404)
    said = json.dumps(answer.json(), ensure_ascii=False)
    assert len(said) < 1000
    assert not any(LONG[i : i + MAX_SHOWN + 1] in said for i in range(len(LONG) - MAX_SHOWN))


def test_lines_of_log_are_short() -> None:
    stream = io.StringIO()
    log_json("info", stream)
    try:
        logging.getLogger("a").info("x" * 10**6, extra={"fields": {"path": "/" + '"' * 10**6, "keys": ["k"] * 10**6}})
        try:
            raise ValueError("y" * 10**6)
        except ValueError:
            logging.getLogger("b").exception("failed")
    finally:
        logging.getLogger().handlers.clear()
    lines = [line for line in stream.getvalue().splitlines() if json.loads(line)["logger"] in ("a", "b")]
    assert len(lines) == 2 and max(map(len, lines)) < 10_000
    assert len(json.loads(lines[0])["path"]) == MAX_SHOWN


def test_what_is_not_needed_is_forgotten() -> None:
    chat = CHAT | {"user": "x" * 1000, "tools": [{"type": "function", "function": {"name": "f"}}]}
    for request in (parse_completion(json.dumps({**COMPLETION, "user": "x"}).encode()),):
        assert request.user is None
    request = parse_chat(json.dumps(chat).encode())
    chosen, grammar = request.chosen_tools, request.grammar
    request.forget_text()
    assert (request.messages, request.tools, request.user) == ([], None, None)
    assert (request.chosen_tools, request.grammar) == (chosen, grammar) and grammar is not None


@pytest.mark.parametrize("field", ["chat_template_kwargs", "tools", "response_format", "tool_choice", "logit_bias"])
def test_a_field_of_any_form_is_not_decoded_if_it_is_long(field: str) -> None:
    """Of 15 MiB each took up to a second of the event loop."""
    body = json.dumps(CHAT).removesuffix("}") + f', "{field}": {{"a": "{"x" * MAX_FREE_BYTES}"}}}}'
    with pytest.raises(ApiError, match=f"{field}: .* at most") as refused:
        parse_chat(body.encode())
    assert refused.value.param == field


TEXT = f'"{"x" * 12_000_000}"'
STORED = {"an object": f'{{"a": [{"[]," * 1_200_000}[]], "b": {TEXT}}}', "a list": f"[{'{},' * 1_200_000}{TEXT}]"}


@pytest.mark.parametrize("form", STORED)
def test_a_stored_prompt_is_not_decoded_if_it_is_long(form: str) -> None:
    """It may have any form, and is refused: one of 15 MB once took 0.7 s of the event loop first."""
    body = f'{{"model": "fake", "input": "x", "prompt": {STORED[form]}}}'.encode()
    begin_s = time.process_time()
    with pytest.raises(ApiError, match=r"at most|more than") as refused:
        parse_responses(body)
    assert refused.value.status == 400 and time.process_time() - begin_s < 0.2


FORMS = [CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest, TokenizeRequest, DetokenizeRequest]


def test_every_field_of_any_form_has_a_limit() -> None:
    fields = {field.encode_name: str(field.type) for form in FORMS for field in msgspec.structs.fields(form)}
    assert {name for name, type_ in fields.items() if "Any" in type_} <= {*FREE_FIELDS, "prompt"}


@pytest.mark.parametrize("field", ["tools", "user", "prompt"])
def test_a_field_that_comes_twice_is_no_way_around(field: str) -> None:
    """The last one of a name counts, and all are decoded."""
    long = "[" + "[], " * 600_000 + "[]]"
    body = f'{{"{field}": {long}, "{field}": [], ' + json.dumps(COMPLETION).removeprefix("{")
    begin_s = time.process_time()
    with pytest.raises(ApiError) as refused:
        parse_completion(body.encode())
    assert refused.value.status == 413
    assert time.process_time() - begin_s < 0.1


def test_a_request_counts_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the budget was given back when a prompt was tokenised, so that thousands of long requests could wait."""
    monkeypatch.setattr(bodies, "FREE_BYTES", 0)
    executor = FakeExecutor(step_s=0.015)
    limits = Limits(all_requests_bytes=2 * 3 * 4_500)  # an account has half: three prompts of a hundred tokens
    with running(fake_app(fake_engine(executor, max_batch=1), limits=limits)) as url, ThreadPoolExecutor(8) as pool:
        body = {**COMPLETION, "prompt": [5] * 100, "max_tokens": 50}
        asked = [pool.submit(post, url, body) for _ in range(8)]
        answers = [one.result() for one in asked]
        codes = [answer.status_code for answer in answers]
        assert sorted(codes) == [200] * 3 + [503] * 5
        assert {a.json()["error"]["code"] for a in answers if a.status_code == 503} == {"too_many_bodies"}
        assert post(url, body).status_code == 200
        # One that is refused gives its memory back, too.
        for _ in range(8):
            assert post(url, {**body, "max_tokens": 10_000}).status_code == 400
        assert eventually(lambda: post(url, body).status_code == 200)


LISTS = "[" + "[]," * 80_000 + "[]]"
USER = '"model": "fake", "messages": [{"role": "user", "content": "x"}]'
SCHEMA = f'{{"type": "json_schema", "json_schema": {{"name": "a", "schema": {{"enum": {LISTS}}}}}}}'
TOOL = f'"function": {{"name": "f", "parameters": {{"enum": {LISTS}}}}}'


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (parse_chat, f'{{{USER}, "chat_template_kwargs": {{"a": {LISTS}}}}}'),
        (parse_chat, f'{{{USER}, "tools": [{{"type": "function", {TOOL}}}]}}'),
        (parse_chat, f'{{{USER}, "response_format": {SCHEMA}}}'),
        (parse_tokenize, f'{{{USER}, "chat_template_kwargs": {{"a": {LISTS}}}}}'),
        (parse_responses, f'{{"model": "fake", "input": "x", "chat_template_kwargs": {{"a": {LISTS}}}}}'),
    ],
)
def test_small_objects_count_with_their_memory(parse: Callable[[bytes], Any], body: str) -> None:
    """A body of 240 kB held 6 MB until its chat was rendered, and none of it was counted."""
    tracemalloc.start()
    request = parse(body.encode())
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken > 4_000_000 and 0.5 * taken < request.num_text_bytes < 2 * taken


def test_usual_functions_do_not_count() -> None:
    place = {"type": "string", "description": "The name of a town, and of its country if there are several."}
    functions = [
        {"name": f"f{i}", "parameters": {"type": "object", "properties": {"place": place, "day": place}}}
        for i in range(90)
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    assert parse_chat(json.dumps({**CHAT, "tools": tools}).encode()).num_text_bytes < bodies.FREE_BYTES


def test_an_echo_counts_as_part_of_the_answer(url: str) -> None:
    """128 choices of a prompt of 70 kB once made an answer of half a gigabyte."""
    text = "\u20ac" * 100
    answer = post(url, {**COMPLETION, "prompt": text, "n": 2, "echo": True})
    assert [one["text"].startswith(text) for one in answer.json()["choices"]] == [True, True]
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["y" * 300])
    with running(fake_app(fake_engine(FakeExecutor()), codec=TextCodec(tokenizer))) as url:
        answer = post(url, {**COMPLETION, "prompt": "y" * 75_000, "n": 128, "echo": True})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"
        assert post(url, {**COMPLETION, "prompt": "y" * 75_000, "n": 128}).status_code == 200


def test_long_lists_of_ids_become_text_beside_the_event_loop() -> None:
    """A context of a million tokens once held up all streams for as long as it took."""

    class Noted:
        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                threads.add(threading.current_thread().name.partition("_")[0])
                return getattr(tokenizer, name)(*arguments, **options)

            return call

    codec, threads = byte_codec(), set[str]()
    tokenizer, codec.tokenizer = codec.tokenizer, Noted()  # type: ignore[assignment]
    with running(fake_app(fake_engine(FakeExecutor()), codec=codec)) as url:
        assert post(url, {"tokens": [70, 71]}, "/detokenize").json()["prompt"]
        assert len(post(url, {"prompt": "ab", "return_token_strs": True}, "/tokenize").json()["token_strs"]) == 2
    assert threads == {"tokenising"}


@pytest.mark.parametrize("token", [1000, 2**31, 2**32, 2**63, -1])
def test_ids_out_of_range_are_refused_before_they_are_echoed(token: int, url: str) -> None:
    answer = post(url, {**COMPLETION, "prompt": [token], "echo": True})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt", answer.text


def test_without_a_key_nothing_of_a_body_in_chunks_is_kept() -> None:
    app = fake_app(fake_engine(FakeExecutor()), keys=ApiKeys.parse("alices-alices-alices"))
    with running(app) as url:
        parts = (b"x" * 1000 for _ in range(1000))
        answer = httpx.post(f"{url}/v1/completions", content=parts, trust_env=False, timeout=10)
    assert answer.status_code == 401 and answer.headers["connection"] == "close"


def test_long_bodies_go_on_one_in_each_turn_of_the_loop() -> None:
    went_on: list[tuple[int, int]] = []

    async def run() -> None:
        turns, turn = bodies.Turns(), 0

        async def read(number: int) -> None:
            for _ in range(3):
                await turns.next()
                went_on.append((turn, number))

        reading = [asyncio.create_task(read(number)) for number in (0, 1, 2, 3, 4, 9)]
        await asyncio.sleep(0)
        reading.pop().cancel()
        while not all(task.done() for task in reading):
            turn += 1
            await asyncio.sleep(0)

    asyncio.run(run())
    assert [number for _, number in went_on] == [0, 1, 2, 3, 4] * 3
    assert len({turn for turn, _ in went_on}) == 15


def test_a_stream_keeps_log_probabilities_as_text() -> None:
    """As objects, those of a long response took half a gigabyte until it had ended."""
    writer = ResponsesWriter(ResponsesRequest(model="fake", input="x", stream=True), [], CallItems([]))
    prompt = PromptTokens(1, 0)
    tracemalloc.start(50)
    try:
        for number in range(300):
            logprobs = writer.new_logprobs()
            logprobs.add(TokenReport("x", -1.0, number, [(f"token {i}", -2.0, b"token") for i in range(20)], b"x"))
            writer.chunk(Delta(0, "x", 5, None, logprobs), None, prompt, number)
        from_here = tracemalloc.Filter(True, __file__, all_frames=True)  # other threads allocate, too
        statistics = tracemalloc.take_snapshot().filter_traces([from_here]).statistics("filename")
        kept = sum(statistic.size for statistic in statistics)
    finally:
        tracemalloc.stop()
    assert kept > 0
    written = writer.end(prompt, 300).decode()
    last = json.loads(written.strip().rpartition("data: ")[2])["response"]["output"][0]["content"][0]
    assert last["text"] == "x" * 300 and [len(one["top_logprobs"]) for one in last["logprobs"]] == [20] * 300
    assert kept < len(written) / 3


def test_calls_in_a_long_input_are_read_in_a_time_that_grows_with_their_number() -> None:
    """Each once copied the list of those before it: 30,000 took a second of the event loop."""
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    body = json.dumps({"model": "fake", "input": [call] * 30_000}).encode()
    begin_s = time.process_time()
    (message,) = parse_responses(body).chat.messages
    assert time.process_time() - begin_s < 0.5
    assert message.tool_calls is not None and len(message.tool_calls) == 30_000


def test_choices_share_their_prompt_and_their_rules_in_the_engine() -> None:
    """Each of up to 1,024 once had a prompt, biases and a schema of its own there: a body of 15 kB took 130 MiB."""
    ours, theirs = pair()
    front, engine = FrontEnd(ours, decode_up), EngineEnd(theirs, DecodeDown())
    ruled = SamplingParams(1.0, logit_bias=tuple((token, 1.5) for token in range(1000)), grammar="start: /a+/")
    prompts = [tuple(range(begin, begin + 20_000)) for begin in (300, 400)]
    settings = [*of_choices(ruled, 7, 3), *of_choices(SamplingParams(1.0), 7, 2), *of_choices(ruled, 7, 1)]
    sent = [Generation(0, (5,), 3)]
    sent += [Generation(number, prompt, 3, sampling=s) for prompt in prompts for number, s in enumerate(settings)]
    prefixes = Prefixes()
    for generation in sent:
        front.send(Submit(generation))
    received = []
    for _ in sent:
        message = engine.receive(5)
        assert isinstance(message, Submit)
        received.append(message.generation)
    assert received == sent
    assert len({id(generation.prompt) for generation in received}) == 3
    assert len({id(generation.sampling.grammar) for generation in received if generation.sampling.grammar}) <= 4
    assert len({id(prefixes.of_prompt(generation, 16)) for generation in received}) == 3
    front.close()
    engine.close()


def test_a_token_of_many_outputs_costs_no_look_at_all_of_them(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each token of a stream all of its outputs were looked at: with a thousand, half of the time of a token."""
    looks: list[PromptTokens] = []

    def look(total: int, cached: int) -> PromptTokens:
        looks.append(PromptTokens(total, cached))
        return looks[-1]

    monkeypatch.setattr(outputs, "PromptTokens", look)
    body = {**COMPLETION, "prompt": [[5, 6]] * 100, "max_tokens": 8, "stream": True}
    assert post(url, body).text.count("data: {") >= 800
    assert 0 < len(looks) < 300
