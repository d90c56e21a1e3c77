"""Hostile schemas and functions: each is refused or followed, and other clients notice nothing."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from tests.attack.client import connect, elsewhere, request, statuses
from tests.attack.target import FAKE_VLLM, FLAVOURS, Target, Unharmed
from tests.fakes import eventually

PATH = "/v1/chat/completions"
pytestmark = [
    pytest.mark.long,
    pytest.mark.point(13),
    pytest.mark.parametrize("target", FLAVOURS, indirect=True, scope="module"),
]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def text(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


def costly(number: int = 0) -> dict[str, Any]:
    """As dear as a schema of 64 KiB can be: 0.2 s and 11 MiB."""
    return {"type": "object", "required": [f"{number}r{i}" for i in range(5000)]}


SCHEMAS: dict[str, Any] = {
    **{f"{depth} levels": nested(depth) for depth in (60, 130, 200, 240, 246, 260, 330)},
    "an enum of thousands": {"enum": [f"value number {i}" for i in range(2500)]},
    "an enum of prefixes": {"enum": ["a" * i for i in range(300)]},
    "properties by the thousand": {"type": "object", "properties": {f"p{i}": {"enum": [i]} for i in range(1500)}},
    "nested repetition": text("^(a+)+$"),
    "counted repetition": text("^((a{0,100}){0,100}){0,100}$"),
    "an automaton of 2^200 states": text("^(.)*a.{200}$"),
    "many such": {"anyOf": [text(f"^(.)*{i}.{{30}}$") for i in range(60)]},
    "all of such": {"allOf": [text(f"^(.)*{chr(97 + i)}.{{20}}$") for i in range(20)]},
    "a lookahead": text("^(?=a)b$"),
    "a backreference": text(r"^(a)\1$"),
    "itself": {"$ref": "#"},
    "a loop": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "a file": {"$ref": "file:///etc/passwd"},
    "another server's": {"$ref": "http://127.0.0.1:9/schema.json"},
    "a product of choices": {"allOf": [{"anyOf": [text(f"{i}.{j}") for j in range(6)]} for i in range(12)]},
    "a billion items": {"type": "array", "minItems": 10**9, "items": {"type": "null"}},
    "a billion characters": {"type": "string", "minLength": 10**9},
    "a tiny multiple": {"type": "number", "multipleOf": 1e-300},
    "a large prime": {"type": "integer", "multipleOf": 999999937},
    "nothing": {"enum": []},
    "what contradicts itself": {"type": "array", "minItems": 3, "maxItems": 2},
    "patterns of names": {"type": "object", "patternProperties": {f"^(.)*{i}.{{9}}$": {} for i in range(30)}},
    "no grammar": {"x-guidance": {"item_separator": '"', "key_separator": "(a|b)*a(a|b){30}"}},
    "keys of control": {
        "type": "object",
        "properties": {"\0\x1b\u2028": {}, "__proto__": {}},
        "required": ["__proto__"],
    },
    "no schema": {"type": "no-such", "properties": 3},
    "required by the thousand": costly(),
}


def formatted(schema: Any, **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 8,
        "response_format": {"type": "json_schema", "json_schema": {"name": "given", "schema": schema}},
        **fields,
    }


def called(schema: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "given", "parameters": schema}}
    body = formatted(schema, tools=[tool], tool_choice="required")
    return {name: value for name, value in body.items() if name != "response_format"}


def test_hostile_schemas(target: Target, unharmed: Unharmed) -> None:
    with unharmed(200):
        for name, schema in SCHEMAS.items():
            for body in (formatted(schema), called(schema)):
                begin_s = time.monotonic()
                status, answer = target.ask("POST", PATH, {"model": target.model, **body})
                assert status in (200, 400) or "no longer follow the schema" in answer.decode(), (name, answer[:300])
                assert time.monotonic() - begin_s < 10, name


@pytest.mark.long
def test_a_dear_schema_is_compiled_once_for_all_choices(target: Target, unharmed: Unharmed) -> None:
    """Of 64 choices each once took 0.2 s of the engine and 11 MiB."""
    with unharmed(150):
        begin_s = time.monotonic()
        status, answer = target.ask("POST", PATH, {"model": target.model, **formatted(costly(1), n=64)})
        took_s = time.monotonic() - begin_s
    assert status == 200, answer
    assert took_s < 10


@pytest.mark.long
def test_a_long_text_without_a_choice_in_many_outputs(target: Target, unharmed: Unharmed) -> None:
    """At each token of each output the rest of the text was once followed: half a second of every step for 64."""
    with unharmed(150):
        body = formatted({"const": "a" * 60_000}, n=64, max_tokens=40)
        status, answer = target.ask("POST", PATH, {"model": target.model, **body})
    assert status == 200, answer


def test_dear_schemas_at_once(target: Target, unharmed: Unharmed) -> None:
    """Each another one, so that nothing that was kept helps. Once an engine compiled each as it began, and the other
    stream waited 0.2 s of processor time for each."""
    count = 20 if target.flavour == "one" else 8
    bodies = [{"model": target.model, **formatted(costly(2 + i))} for i in range(count)]
    requests = [request(body, path=PATH) for body in bodies]
    with unharmed(400):
        assert set(elsewhere(statuses, target.address, requests)) == {200}


@pytest.mark.long
def test_clients_that_go_while_their_schema_is_compiled(target: Target, unharmed: Unharmed) -> None:
    with unharmed(300), ThreadPoolExecutor(8) as threads:

        def go(number: int) -> None:
            with connect(target.address) as client, suppress(OSError):
                client.sendall(request({"model": target.model, **formatted(costly(100 + number))}, path=PATH))
                time.sleep(0.03 * (number % 8))

        list(threads.map(go, range(24)))
    assert eventually(target.is_idle, 30)


NAMES = ["a" * 128, "a.b", "-", "get-weather", "a" * 129, "", "a b", "</tool_call>", "\u0661", 'x","arguments":{}}']


def test_names_of_functions(target: Target) -> None:
    for name in NAMES:
        for choice in ("auto", "required", {"type": "function", "function": {"name": name}}):
            tools = [{"type": "function", "function": {"name": name, "description": "</tool_call>" * 100}}]
            body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "tools": tools}
            status, answer = target.ask("POST", PATH, {"model": target.model, **body, "tool_choice": choice})
            assert status == (200 if name in NAMES[:4] else 400), (name, answer)


def test_biases_and_tokens_beyond_all_bounds(target: Target) -> None:
    """`logit_bias`, `/tokenize`, `/detokenize`, and `echo` with log probabilities."""
    for bias in ({"5": 1e400}, {"-1": 1}, {"1e3": 1}, {"\u0661": 1}, {"2048": 1}, {"9" * 5000: 1}, {"5": 101}, {"": 0}):
        body = json.dumps({"model": target.model, "prompt": [3], "logit_bias": bias}).replace("Infinity", "1e400")
        assert target.ask("POST", "/v1/completions", body.encode())[0] == 400, bias
    all_off = {str(token): -100 for token in range(1000)}
    assert target.complete(prompt=[3], max_tokens=2, logit_bias=all_off)[0] == 200
    assert target.complete(prompt=[3], max_tokens=2, logit_bias={str(token): 0 for token in range(1025)})[0] == 400
    scored = {"prompt": [[3] * 500] * 8, "echo": True, "logprobs": 20, "max_tokens": 2}
    assert target.complete(**scored)[0] == (400 if target.flavour == FAKE_VLLM else 200)
    for path, body in {
        "/tokenize": [{"prompt": "x" * 15_000_000}, {"prompt": ""}, {"prompt": "\0\x1b\U0010ffff"}, {}, {"prompt": 3}],
        "/detokenize": [{"tokens": [1] * 200_000}, {"tokens": [2**31]}, {"tokens": [-1]}, {"tokens": [1e400]}, {}],
    }.items():
        found = [target.ask("POST", path, one)[0] for one in body]
        assert set(found) <= {200, 400}, (path, found)
