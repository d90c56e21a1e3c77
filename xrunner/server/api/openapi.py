"""Generate /openapi.json from the types with which requests are parsed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from xgpt.core.schema import ModelSpec
from xgpt.core.version import __version__
from xrunner.server.api.messages import CountRequest, MessagesRequest
from xrunner.server.api.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from xrunner.server.api.responses import ResponsesRequest

Json = dict[str, Any]

_REFUSALS = {
    "400": "A field is not accepted; the message says why.",
    "401": "The request has no valid API key.",
    "403": "The request comes from a page of another site, or the key lacks admin rights for this path.",
    "404": "This model is not served here.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "421": "The Host header names another server.",
    "429": "Too many requests are waiting, or the key has used up its minute; Retry-After says when to try again.",
    "500": "The engine has failed, or could not continue this request.",
    "503": "The server is shutting down, has no room for the body, or cannot do this now.",
    "504": "The answer was not complete by the request's deadline, or within the server's time limit.",
}
_READING = ("401", "403", "421")
_WITH_BODY = ("400", "408", "413", "429", "503")
_GENERATION = ("400", "401", "403", "404", "408", "413", "421", "429", "500", "503", "504")

_SAMPLING = (
    "temperature, top_p, top_k, min_p and repetition_penalty default to the checkpoint's "
    "generation_config.json, or else to OpenAI's defaults. "
)
_COMPLETION = "Without max_tokens an output has at most 16 tokens, or --default-max-tokens."
_CHAT = (
    "Without max_tokens an output may fill the context, or have --default-max-tokens. K/V memory is reserved for the "
    "plan's quantile of outputs (admission.promise_quantile). A longer output waits while other requests need the "
    "memory, and then continues; with static batches or an encoder it ends at that length."
)

_NOT_KEPT = " Answers are not stored: send earlier items in input."
_COUNTING = ("400", "401", "403", "404", "408", "413", "421", "429", "503")
_ANTHROPIC = "AnthropicError"

_COUNT: Json = {"type": "integer", "minimum": 0}
_TEXT: Json = {"type": "string"}
_TEXT_OR_NULL: Json = {"type": ["string", "null"]}
_OBJECT: Json = {"type": "object"}
_IDS: Json = {"type": "array", "items": _COUNT}


def _object(**properties: Json) -> Json:
    return {"type": "object", "required": list(properties), "properties": properties}


def _answer(kind: str, prefix: str, **said: Json) -> Json:
    choice = _object(
        index=_COUNT,
        **said,
        token_ids=_IDS,
        logprobs={"type": ["object", "null"]},
        finish_reason={"enum": ["stop", "length", "tool_calls"]},
    )
    return _object(
        id={"type": "string", "pattern": f"^{prefix}-"},
        object={"const": kind},
        created=_COUNT,
        model=_TEXT,
        choices={"type": "array", "items": choice, "minItems": 1},
        usage=_object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT),
        xgpt=_object(**{name: {"type": "number", "minimum": 0} for name in ("queued_s", "ttft_s", "total_s")}),
    )


_MESSAGE = _object(role={"const": "assistant"}, content=_TEXT_OR_NULL)
_MESSAGE["properties"]["tool_calls"] = {"type": "array", "items": {"$ref": "#/components/schemas/ToolCall"}}
_ANSWERS: dict[str, Json] = {
    "Completion": _answer("text_completion", "cmpl", text=_TEXT),
    "Chat": _answer("chat.completion", "chatcmpl", message=_MESSAGE),
    "Tokens": _object(count=_COUNT, max_model_len=_COUNT, tokens=_IDS),
    "Text": _object(prompt=_TEXT),
    "Models": _object(object={"const": "list"}, data={"type": "array", "items": _object(id=_TEXT)}),
    "Response": _object(
        id={"type": "string", "pattern": "^resp_"},
        object={"const": "response"},
        created_at=_COUNT,
        model=_TEXT,
        status={"enum": ["completed", "incomplete"]},
        output={"type": "array", "items": _object(type=_TEXT), "minItems": 1},
        usage=_object(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "MessageAnswer": _object(
        id={"type": "string", "pattern": "^msg_"},
        type={"const": "message"},
        role={"const": "assistant"},
        model=_TEXT,
        content={"type": "array", "items": _object(type=_TEXT), "minItems": 1},
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]},
        stop_sequence=_TEXT_OR_NULL,
        usage=_object(input_tokens=_COUNT, output_tokens=_COUNT),
    ),
    "Counted": _object(input_tokens=_COUNT),
    "AnthropicError": _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT)),
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)),
}


_POSTS: tuple[tuple[str, str, str, Sequence[str], str, str], ...] = (
    ("/v1/completions", "Continue prompts.", "Completion", _GENERATION, "Error", _SAMPLING + _COMPLETION),
    ("/v1/chat/completions", "Answer a chat.", "Chat", _GENERATION, "Error", _SAMPLING + _CHAT),
    ("/v1/responses", "Answer as OpenAI's Responses.", "Response", _GENERATION, "Error", _SAMPLING + _CHAT + _NOT_KEPT),
    ("/v1/messages", "Answer as Anthropic's Messages.", "MessageAnswer", _GENERATION, _ANTHROPIC, _SAMPLING),
    ("/v1/messages/count_tokens", "Tokens of the prompt of a message.", "Counted", _COUNTING, _ANTHROPIC, ""),
    ("/tokenize", "Token ids of a text, or of a chat.", "Tokens", _READING + _WITH_BODY, "Error", ""),
    ("/detokenize", "The text of token ids.", "Text", _READING + _WITH_BODY, "Error", ""),
)
"""For each path: its summary, the schema of its answer, the statuses of its errors, the schema of its errors, and
further members.
"""


def _json(schema: str | Json, *, stream: bool = False) -> Json:
    """`schema`: a schema or its name. `stream`: whether there are also server-sent events."""
    content = {"application/json": {"schema": _reference(schema) if isinstance(schema, str) else schema}}
    return content | ({"text/event-stream": {"schema": {}}} if stream else {})


def _reference(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


_GETS: tuple[tuple[str, str, Json, Sequence[str]], ...] = (
    ("/v1/models", "The model that is served.", _json("Models"), _READING),
    ("/health", "Whether the engine runs.", _json(_OBJECT), ("503",)),
    ("/ready", "Whether new requests are accepted.", _json(_OBJECT), ("503",)),
    ("/metrics", "Prometheus metrics.", {"text/plain": {"schema": _TEXT}}, _READING),
    ("/plan", "The running plan, and the observed lengths.", _json(_OBJECT), _READING),
    ("/plan/history", "All decisions on another plan.", _json({"type": "array", "items": _OBJECT}), _READING),
    (
        "/plan/decision",
        "What re-planning would decide now; nothing is changed. Null: too few requests were observed.",
        _json({"type": ["object", "null"]}),
        (*_READING, "503"),
    ),
    ("/live", "What the page at / shows.", _json(_OBJECT), _READING),
)


def describe(names: Sequence[str], spec: ModelSpec, *, has_keys: bool) -> Json:
    kinds = (
        CompletionRequest,
        ChatRequest,
        ResponsesRequest,
        MessagesRequest,
        CountRequest,
        TokenizeRequest,
        DetokenizeRequest,
    )
    bodies, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    _say_what_types_do_not(components, names, spec)
    paths: dict[str, Json] = {}
    for (path, summary, answer, refusals, error, more), body in zip(_POSTS, bodies, strict=True):
        content = _json(answer, stream=refusals is _GENERATION)
        operation = _operation(summary, content, refusals, body, error)
        paths[path] = {"post": operation | ({"description": more} if more else {})}
    for path, summary, content, refusals in _GETS:
        paths[path] = {"get": _operation(summary, content, refusals)}
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
        "components": {"schemas": components | _ANSWERS, **keyed},
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


def _operation(
    summary: str, content: Json, refusals: Sequence[str], body: Json | None = None, error: str = "Error"
) -> Json:
    asked: Json = {}
    if body is not None:
        asked = {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}
    refused = {status: {"description": _REFUSALS[status], "content": _json(error)} for status in refusals}
    return {
        "summary": summary,
        **asked,
        "responses": {"200": {"description": summary, "content": content}} | refused,
    }
