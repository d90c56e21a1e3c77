"""Generate /openapi.json from the types with which requests are parsed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from xgpt.core.documents import read_yaml
from xgpt.core.schema import ModelSpec
from xgpt.core.version import __version__
from xrunner.server.api.chat_request import ChatRequest, TokenizeRequest
from xrunner.server.api.messages import CountRequest, MessagesRequest
from xrunner.server.api.protocol import CompletionRequest, DetokenizeRequest
from xrunner.server.api.responses import ResponsesRequest

Json = dict[str, Any]

REQUESTS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def describe(names: Sequence[str], spec: ModelSpec, *, has_keys: bool) -> Json:
    (table,) = read_yaml((Path(__file__).parent / "openapi.yaml").read_text(encoding="utf-8"))
    told = _whole(table)
    bodies, components = msgspec.json.schema_components(REQUESTS.values(), ref_template="#/components/schemas/{name}")
    _say_what_types_do_not(components, names, spec)
    paths: dict[str, Json] = {}
    for (path, row), body in zip(told["posts"].items(), bodies, strict=True):
        paths[path] = {"post": _operation(told, row, body)}
    for path, row in told["gets"].items():
        paths[path] = {"get": _operation(told, row)}
    keyed: Json = {}
    if has_keys:
        keyed["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for operation in (operation for operations in paths.values() for operation in operations.values()):
            if "401" in operation["responses"]:
                operation["security"] = [{"key": []}]
    return {
        "openapi": "3.1.0",
        "info": {"title": "xgpt", "version": __version__, "description": "A plan behind OpenAI's API."},
        "paths": paths,
        "components": {"schemas": components | told["answers"], **keyed},
    }


def _say_what_types_do_not(components: Json, names: Sequence[str], spec: ModelSpec) -> None:
    token: Json = {"type": "integer", "minimum": 0, "maximum": spec.vocab_size - 1}
    tokens: Json = {"type": "array", "items": token, "minItems": 1, "maxItems": spec.max_context}
    text: Json = {"type": "string", "minLength": 1}
    prompts = [{"type": "array", "items": one, "minItems": 1} for one in (text, tokens)]
    components["CompletionRequest"]["properties"]["prompt"] = {"anyOf": [text, tokens, *prompts]}
    components["DetokenizeRequest"]["properties"]["tokens"] = tokens | {"minItems": 0}
    for request in (CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest, CountRequest):
        components[request.__name__]["properties"]["model"] = {"type": "string", "enum": list(names)}
    for request in (CompletionRequest, ChatRequest):
        properties = components[request.__name__]["properties"]
        properties["logit_bias"] |= {"propertyNames": {"pattern": "^[0-9]{1,10}$"}}
        for name, (neutral, reason) in request.WITHOUT_EFFECT.items():
            accepted = [None] if neutral is None else [None, neutral]
            properties[name] = {"enum": accepted, "default": None, "description": reason}
    # A type outside of any union needs no tag.
    told_apart = set(_mapped(components))
    for name, schema in components.items():
        if name not in told_apart and "enum" in schema.get("properties", {}).get("type", {}):
            schema["required"] = [field for field in schema["required"] if field != "type"]


def _mapped(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for reference in schema.get("discriminator", {}).get("mapping", {}).values():
            yield reference.rpartition("/")[2]
        schema = list(schema.values())
    if isinstance(schema, list):
        for inner in schema:
            yield from _mapped(inner)


def _operation(told: Json, row: Json, body: Json | None = None) -> Json:
    content = row.get("content") or _json(row["answer"])
    content |= {"text/event-stream": {"schema": {}}} if row.get("streams") else {}
    asked: Json = {}
    if body is not None:
        asked = {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}
    error = _json(row.get("error", "Error"))
    refused = {status: {"description": told["refusals"][status], "content": error} for status in row["errors"]}
    more = {"description": " ".join(row["more"])} if "more" in row else {}
    success = {"200": {"description": row["summary"], "content": content}}
    return {"summary": row["summary"], **asked, "responses": success | refused, **more}


def _json(schema: str | Json) -> Json:
    named = {"$ref": f"#/components/schemas/{schema}"} if isinstance(schema, str) else schema
    return {"application/json": {"schema": named}}


def _whole(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_whole(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {name: _whole(each) for name, each in schema.items()}
    if "properties" in schema and "required" not in schema:
        return {"type": "object", "required": list(schema["properties"]), **schema}
    return schema
