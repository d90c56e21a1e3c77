"""What a client reads when it is refused, and what the operator reads of it in log and metrics."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import FakeExecutor, byte_codec, byte_tokenizer, fake_app, fake_engine, running
from tests.rings import few
from xrunner.grammar import MAX_BYTES, Grammars
from xrunner.server.http.service import _first_line, _parts


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(fake_app(fake_engine(FakeExecutor()), codec=byte_codec())) as url:
        yield url


USER = {"role": "user", "content": "x"}
CHATS = "/v1/chat/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/completions", {"prompt": [1], "max_token": 3}, 400, ": did you mean max_tokens?"),
        (CHATS, {"messages": []}, 400, "messages: send at least one"),
        (
            CHATS,
            {"messages": [USER | {"content": [IMAGE]}]},
            400,
            "messages: this server accepts only text, not 'image_url'",
        ),
        (CHATS, {"messages": [USER | {"role": "usr"}]}, 400, "did you mean user?"),
        ("/completions", {"prompt": [1]}, 404, "there is no POST /completions: did you mean /v1/completions?"),
        ("/v1/completion", {"prompt": [1]}, 404, ": did you mean /v1/completions?"),
        ("/v1/completions", None, 405, "there is no GET /v1/completions: use POST"),
        ("/v1/embeddings", {"input": "x"}, 404, "no POST /v1/embeddings: this server only generates text"),
        ("/ping", None, 404, "there is no GET /ping: use /health, or /ready"),
        ("/detokenize", {"tokens": [1, 99999]}, 400, "tokens: token 99999 is outside the vocabulary"),
        *(
            (CHATS, {"messages": [USER], **field}, 400, says)
            for field, says in (
                ({"guided_json": {}}, "a chat with structured_outputs, or with a JSON schema in response_format"),
                (
                    {"response_format": {"type": "json"}},
                    "response_format.type`; accepted are text, json_object, json_schema",
                ),
                ({"tools": [{"type": "web_search"}]}, "`$.tools[0].type`; accepted are function"),
                ({"tool_choice": "always"}, "`$.tool_choice`; accepted are auto, none, required"),
            )
        ),
    ],
)
def test_a_refusal_names_the_way_out_and_is_logged_and_counted(
    url: str, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any] | None, status: int, says: str
) -> None:
    caplog.set_level(logging.INFO)

    def counted() -> float:
        name = f'xgpt_http_answers_total{{status="{status}"}} '
        lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    before = counted()
    if body is None:
        answer = httpx.get(url + path, trust_env=False)
    else:
        answer = httpx.post(url + path, json={"model": "fake"} | body, trust_env=False)
    message = answer.json()["error"]["message"]
    assert answer.status_code == status and says in message
    assert counted() == before + 1
    (line,) = (record for record in caplog.records if getattr(record, "fields", {}).get("path") == path)
    assert line.fields["error"] == message[:200]  # type: ignore[attr-defined]


def test_a_body_that_is_not_utf_8_is_refused_with_the_place_in_the_body(url: str) -> None:
    body = '{"model": "fake", "prompt": "é"}'.encode("latin-1")
    answer = httpx.post(f"{url}/v1/completions", content=body, trust_env=False)
    assert answer.json()["error"]["message"] == f"the body is not JSON: byte {body.index(0xE9)} (0xe9) is not UTF-8"


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


MESSAGE = '{"model": "fake", "max_tokens": 2, "messages": '
DEEP: dict[str, tuple[str, Callable[[int], str]]] = {
    "metadata": (
        "/v1/responses",
        lambda depth: f'{{"model": "fake", "input": "x", "max_output_tokens": 2, "metadata": {nested(depth)}}}',
    ),
    "variables": (
        "/v1/chat/completions",
        lambda depth: f'{MESSAGE}[{{"role": "user", "content": "x"}}], "chat_template_kwargs": {nested(depth)}}}',
    ),
    "a call's input": (
        "/v1/messages",
        lambda depth: (
            f'{MESSAGE}[{{"role": "assistant", "content": '
            f'[{{"type": "tool_use", "id": "a", "name": "f", "input": {nested(depth)}}}]}}]}}'
        ),
    ),
    "a call's arguments": (
        "/v1/chat/completions",
        lambda depth: (
            f'{MESSAGE}[{{"role": "assistant", "tool_calls": [{{"type": "function", "function": '
            f'{{"name": "f", "arguments": {json.dumps(nested(depth))}}}}}]}}, {{"role": "user", "content": "x"}}]}}'
        ),
    ),
}


@pytest.mark.parametrize("name", few(DEEP))
def test_what_nests_too_deeply_is_refused_at_every_depth(name: str, url: str) -> None:
    """What can just be decoded once was too deep to be encoded again, some calls further down: a 500, and a process
    that renders templates was lost."""
    path, body = DEEP[name]
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        found = [client.post(path, content=body(depth)).status_code for depth in (10, *range(880, 1010))]
    assert found[0] == 200 and set(found) <= {200, 400}


def test_a_refused_schema_shows_no_grammar() -> None:
    reason = "at 2(9): failed to compile JSON schema: Invalid type: objekt\n   1 | start: answer\n   2 | answer: %json"
    assert _first_line(reason) == "failed to compile JSON schema: Invalid type: objekt"
    reason = "failed: regex parse error:\n    ^(?=a)b\n     ^^^\nerror: look-around is not supported"
    assert _first_line(reason) == "failed: regex parse error: ^(?=a)b: look-around is not supported"
    schema = {"type": "object", "properties": {"a": {"anyOf": [{"type": "objekt"}]}}, "items": {}}
    parts = dict(_parts("schema", schema))
    assert list(parts) == ["schema.properties.a", "schema.items"]
    assert dict(_parts("schema.properties.a", parts["schema.properties.a"])) == {
        "schema.properties.a.anyOf[0]": {"type": "objekt"}
    }


def test_a_refused_schema_is_named_by_its_path(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    grammars = Grammars(tmp_path / "tokenizer.json", 1000, {2})
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"items": {"type": "objekt"}}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with running(fake_app(fake_engine(FakeExecutor()), codec=byte_codec(), grammars=grammars)) as url:
        body = {"model": "fake", "messages": [USER], "response_format": form}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False)
        schema["properties"] = {"a": {"type": "string", "pattern": "^(?=a)b"}}
        in_pattern = httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False)
    assert in_pattern.json()["error"]["message"] == (
        "response_format: json_schema.schema.properties.a is not accepted: failed to compile JSON schema: regex parse "
        "error: ^(?=a)b: look-around, including look-ahead and look-behind, is not supported"
    )
    assert answer.status_code == 400
    where, _, why = answer.json()["error"]["message"].partition(" is not accepted: ")
    assert where == "response_format: json_schema.schema.properties.b.items"
    assert "objekt" in why and "%json" not in why and "\n" not in why


def test_the_search_for_the_wrong_part_of_a_schema_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 64 parts, one within the other, once was compiled, of up to 64 KiB each."""
    tried: list[int] = []

    def why_not(grammar: str) -> str:
        tried.append(len(grammar))
        return "it is wrong"

    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    grammars = Grammars(tmp_path / "tokenizer.json", 1000, {2})
    monkeypatch.setattr(grammars, "why_not", why_not)
    schema: dict[str, Any] = {"type": "objekt", "description": "x" * 5000}
    for _ in range(50):
        schema = {"properties": {"k" * 300: schema}}
    with running(fake_app(fake_engine(FakeExecutor()), codec=byte_codec(), grammars=grammars)) as url:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"model": "fake", "messages": [USER], "response_format": form}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False)
    where = "response_format: json_schema.schema.properties." + "k" * 57
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(where)
    assert len(tried) > 1 and sum(tried) <= tried[0] + MAX_BYTES
