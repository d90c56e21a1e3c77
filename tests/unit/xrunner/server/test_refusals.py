"""What a client reads when it is refused, and what the operator reads of it in log and metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import FakeExecutor, byte_codec, byte_tokenizer, fake_app, fake_engine, running
from xrunner.grammar import Grammars
from xrunner.server.http.service import _first_line, _parts


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(fake_app(fake_engine(FakeExecutor()), codec=byte_codec())) as url:
        yield url


USER = {"role": "user", "content": "x"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/completions", {"prompt": [1], "max_token": 3}, 400, ": did you mean max_tokens?"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages: at least one is needed"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            400,
            "messages: this server takes text only, not 'image_url'",
        ),
        ("/v1/chat/completions", {"messages": [USER | {"role": "usr"}]}, 400, "did you mean user?"),
        ("/completions", {"prompt": [1]}, 404, "there is no POST /completions: did you mean /v1/completions?"),
        ("/v1/completion", {"prompt": [1]}, 404, ": did you mean /v1/completions?"),
        ("/v1/completions", None, 405, "there is no GET /v1/completions: use POST"),
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


def test_a_refused_schema_shows_no_grammar() -> None:
    reason = "at 2(9): failed to compile JSON schema: Invalid type: objekt\n   1 | start: answer\n   2 | answer: %json"
    assert _first_line(reason) == "failed to compile JSON schema: Invalid type: objekt"
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
    assert answer.status_code == 400
    where, _, why = answer.json()["error"]["message"].partition(" is not accepted: ")
    assert where == "response_format: json_schema.schema.properties.b.items"
    assert "objekt" in why and "%json" not in why and "\n" not in why
