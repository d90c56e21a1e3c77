"""Public advisories on other servers, and ideas of our own, as requests to a running server.

Each is answered as stated, within seconds, and the server is as it was: the same tokens, no traceback.
"""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from tests.attack.client import ADMIN_KEY, connect, read_all, request
from tests.attack.target import FAKE_VLLM, OURS, PROBE, Target

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
Body = dict[str, Any]
SOON_S = 10.0
"""Seconds, on a machine with much else to do, for an answer to something that costs next to nothing."""


pytestmark = pytest.mark.parametrize("target", OURS, indirect=True, scope="module")


def chat(content: Any = "x", **fields: Any) -> Body:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}


def message(content: Any, **fields: Any) -> Body:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}


def tool(**parameters: Any) -> Body:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


def cyclic() -> Body:
    return {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}}


PROMPT: Body = {"prompt": [5, 6, 7], "max_tokens": 2}
IMAGE = "http://127.0.0.1:{port}/image.png"
BODIES: dict[str, tuple[str, Body, set[int]]] = {
    # vLLM
    "CVE-2024-8768 an empty prompt": (COMPLETIONS, {"prompt": "", "max_tokens": 2}, {200, 400}),
    "CVE-2024-8768 no tokens": (COMPLETIONS, {"prompt": [], "max_tokens": 2}, {400}),
    "CVE-2025-48942 a schema that is none": (CHAT, chat(guided_json={"properties": {"a": "string"}}), {400}),
    "CVE-2025-48942 a schema that leads to itself": (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": cyclic()}}),
        {200, 400},
    ),
    "CVE-2025-48943 an expression that is none": (COMPLETIONS, {**PROMPT, "guided_regex": "[a"}, {400}),
    "CVE-2025-48944 a pattern that is none": (
        CHAT,
        chat(tool_choice="required", **tool(type="object", properties={"a": {"type": "string", "pattern": "\\d{"}})),
        {200, 400},
    ),
    "CVE-2025-48944 a type that is none": (
        CHAT,
        chat(tool_choice="required", **tool(type="object", properties={"a": {"type": "something"}})),
        {200, 400},
    ),
    "CVE-2025-61620 a template of the client's": (
        CHAT,
        chat(chat_template="{% for i in range(10**9) %}{% endfor %}"),
        {400},
    ),
    "CVE-2025-61620 a template among its variables": (
        CHAT,
        chat(chat_template_kwargs={"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}),
        {200},
    ),
    "CVE-2025-62426 tokenised while rendered": (
        CHAT,
        chat("x" * 400, chat_template_kwargs={"tokenize": True, "return_dict": True, "padding": "max_length"}),
        {200, 400},
    ),
    "CVE-2025-62164 a tensor as a prompt": (COMPLETIONS, {**PROMPT, "prompt_embeds": "gAJ9cQAu"}, {400}),
    "CVE-2025-62372 tensors of another shape": (COMPLETIONS, {"prompt_embeds": ["AAAA"], "max_tokens": 2}, {400}),
    "CVE-2026-22773 an image of one pixel": (
        CHAT,
        chat([{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]),
        {400},
    ),
    "CVE-2026-34756 astronomically many choices": (COMPLETIONS, {**PROMPT, "n": 10**12}, {400}),
    "CVE-2026-34756 in a chat": (CHAT, chat(n=10**12), {400}),
    "CVE-2026-116173 scores of many tokens": (COMPLETIONS, {**PROMPT, "logprob_token_ids": [*range(500)]}, {400}),
    "CVE-2026-93989 words beyond the vocabulary": (COMPLETIONS, {**PROMPT, "bad_words": ["\uffff"]}, {400}),
    "CVE-2026-93840 tokens beyond the vocabulary": (COMPLETIONS, {**PROMPT, "allowed_token_ids": [2**31]}, {400}),
    "CVE-2026-93840 ends beyond the vocabulary": (COMPLETIONS, {**PROMPT, "stop_token_ids": [2**31 - 1]}, {400}),
    "GHSA-fpch-3xrf-7q96 a budget of thought": (CHAT, chat(thinking_token_budget=1), {400}),
    "CVE-2026-105756 a salt of control characters": (COMPLETIONS, {**PROMPT, "cache_salt": "\0/\x1b" * 400}, {400}),
    "CVE-2026-105757 an empty expression": (CHAT, chat(structured_outputs={"regex": ""}), {400}),
    "CVE-2026-105757 an empty schema": (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}),
        {200, 400},
    ),
    "CVE-2026-105757 no schema": (CHAT, chat(response_format={"type": "json_schema"}), {400}),
    "CVE-2026-105757 empty tags": (
        CHAT,
        chat(response_format={"type": "structural_tag", "structures": [], "triggers": []}),
        {200, 400},
    ),
    "PYSEC-2026-4349 a template among a response's variables": (
        RESPONSES,
        {
            "input": "x",
            "max_output_tokens": 2,
            "chat_template_kwargs": {"chat_template": "{% for i in range(10**9) %}"},
        },
        {200},
    ),
    "PYSEC-2026-4349 a template among variables to count": (
        "/tokenize",
        {
            "messages": [{"role": "user", "content": "x"}],
            "chat_template_kwargs": {"chat_template": "{{ 'x' * 10**9 }}"},
        },
        {200},
    ),
    "CVE-2026-71486 an answer to render": ("/v1/chat/completions/derender", {"choices": [{"token_ids": [3]}]}, {404}),
    # llama.cpp, SGLang, Triton, TGI, LiteLLM
    "CVE-2026-107183 a parser of its own": (COMPLETIONS, {**PROMPT, "chat_parser": '{"a": 1}'}, {400}),
    "CVE-2026-86793 weights of the client's": (
        "/update_weights_from_tensor",
        {"serialized_named_tensors": "gAN"},
        {404},
    ),
    "PYSEC-2026-4070 another server": (CHAT, chat(user_config={"api_base": "http://127.0.0.1:1"}), {400}),
    "CVE-2026-21869 a negative count to discard": (COMPLETIONS, {**PROMPT, "n_discard": -(2**31), "n_keep": -1}, {400}),
    "CVE-2026-7304 a processor of logits": (COMPLETIONS, {**PROMPT, "custom_logit_processor": "80049507"}, {400}),
    "CVE-2026-7302 a file name that climbs": (
        CHAT,
        chat([{"type": "file", "file": {"filename": "../../etc/x", "file_data": "AAAA"}}]),
        {400},
    ),
    "CVE-2026-24146 more outputs than fit": (
        COMPLETIONS,
        {"prompt": [[1]] * 4000, "n": 128, "max_tokens": 1},
        {400, 429},
    ),
    # Our own ideas.
    "a beam": (COMPLETIONS, {**PROMPT, "use_beam_search": True, "best_of": 10**9}, {400}),
    "a misspelt field of a megabyte": (COMPLETIONS, {**PROMPT, "m" * 10**6: 1}, {400}),
    "a type of a megabyte": (RESPONSES, {"input": [{"type": "t" * 10**6}]}, {400}),
    "a long name within a long name in a schema": (
        CHAT,
        chat(
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "name": "a",
                    "schema": {"properties": {"k" * 60_000: {"properties": {f"p{i}": {} for i in range(6000)}}}},
                },
            }
        ),
        {400},
    ),
    "a fraction before many lists": (CHAT, {"max_tokens": 1.5, "messages": [[]] * 200_000}, {400}),
    "one token in many spellings": (
        COMPLETIONS,
        {**PROMPT, "logit_bias": {"5": 1, "05": 2, "+5": 3, " 5": 4, "\uff15": 5, "5_": 6}},
        {400},
    ),
    "a bias for a token beyond all": (COMPLETIONS, {**PROMPT, "logit_bias": {"9" * 400: 1}}, {400}),
    "an empty stop string": (COMPLETIONS, {**PROMPT, "stop": ["a", ""]}, {400}),
    "a long stop string": (COMPLETIONS, {**PROMPT, "stop": "a" * 1_000_000}, {400}),
    "many stop strings": (COMPLETIONS, {**PROMPT, "stop": ["a"] * 100_000}, {400}),
    "a count that is text": (COMPLETIONS, {"prompt": [5], "max_tokens": "5"}, {400}),
    "a count that is true": (COMPLETIONS, {"prompt": [5], "max_tokens": True}, {400}),
    "a count with a fraction": (COMPLETIONS, {"prompt": [5], "max_tokens": 1.5}, {400}),
    "text among ids": (COMPLETIONS, {"prompt": [[1], ["a"]], "max_tokens": 1}, {400}),
    "ids that no text has": (COMPLETIONS, {"prompt": [2047, 2046, 2045], "max_tokens": 2, "echo": True}, {200}),
    "ids beyond the vocabulary, shown": (COMPLETIONS, {"prompt": [2048], "max_tokens": 2, "echo": True}, {400}),
    "echo many times": (COMPLETIONS, {"prompt": [[5] * 400] * 64, "n": 128, "echo": True, "logprobs": 20}, {400}),
    "nulls only": (COMPLETIONS, {"prompt": "\0" * 400, "max_tokens": 2}, {200}),
    "a lone mark for each byte": (COMPLETIONS, {"prompt": "\u0301" * 200, "max_tokens": 2}, {200}),
    "text that runs both ways": (COMPLETIONS, {"prompt": "\u202e\u2066" * 60, "max_tokens": 2}, {200}),
    "a field beside the known ones": (COMPLETIONS, {**PROMPT, "engine_id": "0", "data_parallel_rank": 7}, {400}),
    "memory of another request": (COMPLETIONS, {**PROMPT, "kv_transfer_params": {"remote_host": "evil"}}, {400}),
    "a salt of another key": (COMPLETIONS, {**PROMPT, "cache_salt": "admin"}, {200, 400}),
    "a priority of its own": (COMPLETIONS, {**PROMPT, "priority": -(10**9)}, {200, 400}),
    "a name for each message": (CHAT, {"messages": [{"role": "user", "content": "x", "name": "n" * 10**6}]}, {400}),
    "calls without functions": (CHAT, chat(tool_choice={"type": "function", "function": {"name": "g"}}), {400}),
    "a function of a long name": (CHAT, chat(tools=[{"type": "function", "function": {"name": "f" * 10**6}}]), {400}),
    "a function whose name ends a line": (CHAT, chat(tools=[{"type": "function", "function": {"name": "f\n"}}]), {400}),
    "an answer to no call": (
        CHAT,
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "y" * 10**6}]},
        {400},
    ),
    "calls in the history that are none": (
        CHAT,
        {
            "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{" * 10**5}}]}],
            "max_tokens": 2,
        },
        {200, 400},
    ),
    "a response to another's": (RESPONSES, {"input": "x", "previous_response_id": "resp_" + "1" * 10**6}, {400}),
    "a conversation of another's": (RESPONSES, {"input": "x", "conversation": "conv_1"}, {400}),
    "an item of another's": (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_1"}]}, {400}),
    "a program to run": (
        RESPONSES,
        {"input": "x", "tools": [{"type": "code_interpreter"}], "max_output_tokens": 2},
        {400},
    ),
    "a page to fetch": (
        RESPONSES,
        {"input": "x", "tools": [{"type": "mcp", "server_url": "http://127.0.0.1:1"}]},
        {400},
    ),
    "a file to open": (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "file:///etc/passwd"}]}]},
        {400},
    ),
    "an image to fetch": (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1:1"}]}]},
        {400},
    ),
    "a response in the background": (RESPONSES, {"input": "x", "background": True}, {400}),
    "a role that is a template": (RESPONSES, {"input": [{"role": "{{ 7 * 7 }}", "content": "x"}]}, {400}),
    "a message's image to fetch": (
        MESSAGES,
        message([{"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1"}}]),
        {400},
    ),
    "a document to open": (
        MESSAGES,
        message([{"type": "document", "source": {"type": "file", "file_id": "../../etc/passwd"}}]),
        {400},
    ),
    "a result of no call": (MESSAGES, message([{"type": "tool_result", "tool_use_id": "y" * 10**6}]), {400}),
    "thought without an end": (
        MESSAGES,
        message("x", thinking={"type": "enabled", "budget_tokens": 10**30}),
        {200, 400},
    ),
    "no limit": (MESSAGES, {"messages": [{"role": "user", "content": "x"}]}, {400}),
    "a system of a megabyte": (MESSAGES, message("x", system="s" * 10**6), {400}),
    "a message to count": (
        f"{MESSAGES}/count_tokens",
        {"messages": [{"role": "user", "content": "x" * 10**6}]},
        {200, 400},
    ),
    "text to count": ("/tokenize", {"prompt": "a\U0001f600" * 200_000}, {200, 400, 413}),
    "a chat to count": ("/tokenize", {"messages": [{"role": "user", "content": "{{ 7 * 7 }}"}] * 5}, {200, 400}),
    "ids to show": ("/detokenize", {"tokens": [3] * 400_000}, {200, 400, 413}),
    "ids to show that are none": ("/detokenize", {"tokens": [2**31, -1]}, {400}),
}


@pytest.mark.point(28)
@pytest.mark.parametrize("name", BODIES)
def test_a_body(name: str, target: Target) -> None:
    path, body, expected = BODIES[name]
    begin_s = time.monotonic()
    status, answer = target.ask("POST", path, {"model": target.model, **body})
    assert status in expected, answer[:300]
    assert time.monotonic() - begin_s < SOON_S
    assert len(answer) < 5000 or status == 200


DEADLINES = ["nan", "inf", "-inf", "-1", "0", "1e400", "1e-400", "0x1p3", "1_0", "\xb2", "1;2", "9" * 5000, "", " "]


@pytest.mark.point(28)
def test_deadlines_that_are_none(target: Target) -> None:
    for text in DEADLINES:
        status, answer = target.ask(
            "POST", COMPLETIONS, {"model": target.model, **PROMPT}, target.headers | {"X-Deadline-S": text}
        )
        assert status == 400, (text, answer)


@pytest.mark.point(28)
def test_requests_of_one_id_are_two_requests(target: Target) -> None:
    """PYSEC-2026-4198 (vLLM): one that bore another's X-Request-Id had that one's answer, or changed it."""
    prompts = [[100 + number, 50, 61] for number in range(12)]
    headers = target.headers | {"X-Request-Id": "victim"}

    def ask(prompt: list[int], headers: dict[str, str]) -> list[int]:
        body = {"model": target.model, "prompt": prompt, "max_tokens": 24, "ignore_eos": True, "temperature": 0}
        status, answer = target.ask("POST", COMPLETIONS, body, headers)
        assert status == 200, answer
        tokens: list[int] = json.loads(answer)["choices"][0]["token_ids"]
        return tokens

    alone = [ask(prompt, target.headers) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        with connect(target.address) as leaves:
            leaves.sendall(request({"prompt": [7] * 50, "max_tokens": 300}, extra="X-Request-Id: victim\r\n"))
            found = [threads.submit(ask, prompt, headers) for prompt in prompts]
        assert [one.result() for one in found] == alone


SETTINGS: list[Body] = [
    {"logit_bias": {str(token): -100 for token in range(1000)}},
    {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 10},
    {"temperature": 2, "top_k": 1, "logprobs": 20},
    {"logit_bias": {"9": 100}, "repetition_penalty": 0.1},
]
"""What narrows an output, each of another kind."""


@pytest.mark.point(28)
def test_what_narrows_an_output_does_not_reach_another(target: Target) -> None:
    """CVE-2026-114049, CVE-2026-93840, PYSEC-2026-145 (vLLM): a place in a batch kept what narrowed an earlier output,
    or a penalty of one output failed all.
    """
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array", "items": {"enum": [1]}}}}
    alone = target.probe()

    def narrow(number: int) -> int:
        length = 1 + 5 * (number % 4)  # places are taken over again and again
        if number % 5 == 4 and target.flavour != FAKE_VLLM:
            body = chat(response_format=schema, temperature=1) | {"max_tokens": length}
            return target.ask("POST", CHAT, {"model": target.model, **body})[0]
        status, _ = target.complete(prompt=[100 + number], max_tokens=length, ignore_eos=True, **SETTINGS[number % 4])
        return status

    with ThreadPoolExecutor(14) as threads:
        narrowed = [threads.submit(narrow, number) for number in range(60)]
        probes = [threads.submit(target.probe) for _ in range(20)]
        assert [probe.result() for probe in probes] == [alone] * 20
        assert {one.result() for one in narrowed} <= ({200} if target.flavour != FAKE_VLLM else {200, 400})


HEADS: dict[str, tuple[str, str, str, set[int]]] = {
    "CVE-2026-48746 a path in Host": ("GET", "/v1/models", "Host: 127.0.0.1/health?\r\n", {400, 401, 421}),
    "CVE-2026-48746 a fragment in Host": ("GET", "/plan", "Host: 127.0.0.1#/health\r\n", {400, 401, 421}),
    "CVE-2026-27482 another method": ("DELETE", "/v1/models", "Host: 127.0.0.1\r\n", {401, 405}),
    "CVE-2026-27482 from a page": ("DELETE", "/plan", "Host: 127.0.0.1\r\nOrigin: http://evil\r\n", {401, 403, 405}),
    "CVE-2025-48956 a long header": ("GET", "/v1/models", f"Host: 127.0.0.1\r\nX: {'a' * 10**6}\r\n", {400}),
    "CVE-2026-24208 a path that climbs": ("GET", "/v1/models/..%2f..%2fplan", "Host: 127.0.0.1\r\n", {401}),
    "a path of a proxy's": (
        "GET",
        "/plan",
        "Host: 127.0.0.1\r\nX-Original-URL: /health\r\nX-Rewrite-URL: /health\r\n",
        {401},
    ),
    "a method of a proxy's": ("POST", "/plan", "Host: 127.0.0.1\r\nX-HTTP-Method-Override: GET\r\n", {401}),
    "an address of a proxy's": ("GET", "/metrics", "Host: 127.0.0.1\r\nX-Forwarded-For: 127.0.0.1\r\n", {401}),
    "a host of a proxy's": ("GET", "/metrics", "Host: evil\r\nX-Forwarded-Host: 127.0.0.1\r\n", {421}),
    "a path with parameters": ("GET", "/health;/../plan", "Host: 127.0.0.1\r\n", {401, 404}),
    "a path that ends in one that is open": ("GET", "/plan/health", "Host: 127.0.0.1\r\n", {401, 404}),
    "an open path in capitals": ("GET", "/HEALTH", "Host: 127.0.0.1\r\n", {401, 404}),
    "a key in the query": ("GET", f"/plan?api_key={ADMIN_KEY}&access_token={ADMIN_KEY}", "Host: 127.0.0.1\r\n", {401}),
    "a key in a cookie": ("GET", "/plan", f"Host: 127.0.0.1\r\nCookie: Authorization=Bearer {ADMIN_KEY}\r\n", {401}),
    "a wrong key beside the right one": (
        "GET",
        "/plan",
        f"Host: 127.0.0.1\r\nAuthorization: Bearer x\r\nX-Api-Key: {ADMIN_KEY}\r\n",
        {400, 401},
    ),
    "two of Anthropic's keys": (
        "GET",
        "/plan",
        f"Host: 127.0.0.1\r\nX-Api-Key: x\r\nX-Api-Key: {ADMIN_KEY}\r\n",
        {400},
    ),
    "a key in another header": ("GET", "/plan", f"Host: 127.0.0.1\r\nX-Authorization: Bearer {ADMIN_KEY}\r\n", {401}),
    "a key that is cut short": (
        "GET",
        "/plan",
        f"Host: 127.0.0.1\r\nAuthorization: Bearer {ADMIN_KEY[:-1]}\r\n",
        {401},
    ),
    "a key and more": ("GET", "/plan", f"Host: 127.0.0.1\r\nAuthorization: Bearer {ADMIN_KEY}, x\r\n", {401}),
    "a key in wide letters": (
        "GET",
        "/plan",
        f"Host: 127.0.0.1\r\nAuthorization: Bearer \xc3{ADMIN_KEY[1:]}\r\n",
        {401},
    ),
    "a key of a pattern": ("GET", "/plan", "Host: 127.0.0.1\r\nAuthorization: Bearer *\r\n", {401}),
    "no key's name": ("GET", "/plan", "Host: 127.0.0.1\r\nAuthorization: Bearer\r\n", {401}),
    "a long key": ("GET", "/plan", f"Host: 127.0.0.1\r\nAuthorization: Bearer {'a' * 40_000}\r\n", {400, 401}),
    "a page without an origin": (
        "POST",
        COMPLETIONS,
        "Host: 127.0.0.1\r\nOrigin: null\r\nContent-Length: 0\r\n",
        {401, 403},
    ),
    "CVE-2026-35030 a key with the same beginning": (
        "GET",
        "/v1/models",
        f"Host: 127.0.0.1\r\nAuthorization: Bearer {ADMIN_KEY[:20]}{'0' * (len(ADMIN_KEY) - 20)}\r\n",
        {401},
    ),
    "a key that is no text": ("GET", "/v1/models", "Host: 127.0.0.1\r\nAuthorization: Basic \xff\xfe=\r\n", {401}),
    "many qualities": ("GET", "/metrics", f"Host: 127.0.0.1\r\nAccept: {'a;q=0.1,' * 5000}\r\n", {400, 401}),
    "a length for no body": ("GET", "/plan", "Host: 127.0.0.1\r\nContent-Length: 99999999\r\n", {401, 413}),
}
"""What is asked without a valid key."""


@pytest.mark.point(28)
@pytest.mark.parametrize("name", HEADS)
def test_a_head(name: str, target: Target) -> None:
    method, path, headers, expected = HEADS[name]
    with connect(target.address, SOON_S) as client:
        with suppress(OSError):  # it is answered before it has been read
            client.sendall(f"{method} {path} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n".encode("latin-1"))
        answer = read_all(client)
    status = int(answer.split()[1]) if answer else 0
    assert status in expected or (status == 0 and len(headers) > 50_000), answer[:300]
    assert ADMIN_KEY.encode() not in answer and len(answer) < 5000
    assert status in (0, 400) or b"x-frame-options: DENY" in answer


@pytest.mark.point(28)
def test_a_part_without_an_end(target: Target) -> None:
    """GHSA-fh2c-86xm-pm2x (LiteLLM): characters after a boundary were looked at one by one, with a line of log each."""
    head = "Content-Type: multipart/form-data; boundary=x\r\n"
    num_lines = len(target.served.lines)
    with connect(target.address, SOON_S) as client:
        client.sendall(request(b"--x\r\n" + b"\r" * 5_000_000, extra=head + "Connection: close\r\n"))
        answer = read_all(client)
    assert int(answer.split()[1]) in (400, 415)
    assert len(target.served.lines) <= num_lines + 2


@pytest.mark.point(28)
def test_nothing_is_fetched_for_a_client(target: Target) -> None:
    """CVE-2026-0599 (TGI) and CVE-2025-6242 (vLLM): images in messages, and in the text of a prompt."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = IMAGE.format(port=listener.getsockname()[1])
        target.ask(
            "POST", COMPLETIONS, {"model": target.model, "prompt": f"![]({url}) <img src='{url}'>", "max_tokens": 2}
        )
        for kind in ("image_url", "input_image", "audio_url", "video_url"):
            body = chat([{"type": kind, kind: {"url": url}}, {"type": "text", "text": f"![]({url})"}])
            assert target.ask("POST", CHAT, {"model": target.model, **body})[0] == 400
        listener.settimeout(0.5)
        with pytest.raises(TimeoutError):
            listener.accept()


@pytest.mark.point(28)
def test_a_key_is_asked_for_again_on_the_same_connection(target: Target) -> None:
    """And is not taken from what comes after a body."""
    get = "GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    key = f"Authorization: Bearer {ADMIN_KEY}\r\n"
    chunked = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\nTrailer: Authorization\r\n"
    )
    with connect(target.address, SOON_S) as client:
        client.sendall(f"{get}{key}\r\n{get}\r\n{chunked}\r\n2\r\n{{}}\r\n0\r\n{key}\r\n".encode())
        client.shutdown(socket.SHUT_WR)
        answer = read_all(client)
    assert [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]] == [200, 401, 401]


@pytest.mark.point(28)
def test_what_clients_name_makes_no_series_of_metrics(target: Target) -> None:
    """Nor memory: each name once kept is one that 16 million others may follow."""
    target.probe()
    before = len(target.ask("GET", "/metrics")[1].splitlines())
    for number in range(100):
        headers = {"Authorization": f"Bearer wrong-{number}", "X-Request-Id": str(number), "X-Class": f"class-{number}"}
        target.ask("GET", f"/path/{number}", headers=headers)
        target.ask("POST", COMPLETIONS, {"model": f"model-{number}", **PROBE, "user": f"user-{number}"})
    assert len(target.ask("GET", "/metrics")[1].splitlines()) <= before + 10


@pytest.mark.point(28)
def test_pages_load_nothing_of_others(target: Target) -> None:
    """A page with a script of another site gives that site the key that it is asked for."""
    status, page = target.ask("GET", "/")
    assert status == 200
    assert b'src="http' not in page and b"@import" not in page
    ranges = target.headers | {"Range": f"bytes={'0-,' * 5000}0-"}  # CVE-2025-62727 (Starlette): quadratic
    assert target.ask("GET", "/", headers=ranges) == (200, page)
    assert json.loads(target.ask("GET", "/openapi.json")[1])["openapi"]
