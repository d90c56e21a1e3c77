"""The endpoint's description: /openapi.json, from the types that requests are parsed with."""

from __future__ import annotations

from typing import Any

import msgspec

from xgpt import __version__
from xrunner.server.api.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_JSON: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
_LIST: dict[str, Any] = {"application/json": {"schema": {"type": "array"}}}
_EVENTS: dict[str, Any] = {"text/event-stream": {"schema": {}}}
_REFUSALS = {
    "400": "A field is not accepted; the message says why.",
    "401": "No valid API key came with the request.",
    "403": "A page of another site asks, or a client's key asks for what is the operator's.",
    "404": "This model is not served here.",
    "408": "The body did not come in time.",
    "413": "The body is too long.",
    "429": "Too many requests wait, or the key has had its share of this minute; Retry-After says when to come again.",
    "500": "The engine has failed, or could not go on with this request.",
    "503": "The server is shutting down.",
    "504": "The answer was not complete at the request's deadline, or in the time that the server gives.",
}

_SAMPLING = (
    "temperature, top_p, top_k, min_p and repetition_penalty that are left out are those of the checkpoint's "
    "generation_config.json, or else OpenAI's defaults. "
)
_COMPLETION = "Without max_tokens an output has 16 tokens at most, or as many as --default-max-tokens says."
_CHAT = (
    "Without max_tokens an output may fill the context, or as much of it as --default-max-tokens says. K/V memory is "
    "promised for the plan's quantile of outputs (admission.promise_quantile): one that outgrows it waits where others "
    "need the memory, and then goes on. Where it cannot (static batches, models with an encoder) it ends there."
)


def describe(model_name: str) -> dict[str, Any]:
    """The OpenAPI document of a server of this model."""
    bodies, components = msgspec.json.schema_components(
        (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest), ref_template="#/components/schemas/{name}"
    )
    for request in (CompletionRequest, ChatRequest):
        components[request.__name__]["properties"]["model"] = {"type": "string", "const": model_name}
    text = {"text/plain": {"schema": {"type": "string"}}}
    failed = {"503": {"description": "The engine has failed.", "content": _JSON}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "xgpt", "version": __version__, "description": "A plan behind OpenAI's API."},
        "paths": {
            "/v1/completions": {"post": _generation("Continue prompts.", bodies[0])},
            "/v1/chat/completions": {"post": _generation("Answer a chat.", bodies[1], _CHAT)},
            "/tokenize": {"post": _reading("Token ids of a text, or of a chat.", _JSON, body=bodies[2])},
            "/detokenize": {"post": _reading("The text of token ids.", _JSON, body=bodies[3])},
            "/v1/models": {"get": _reading("The model that is served.", _JSON)},
            "/health": {"get": _reading("Whether the engine runs.", _JSON, failed)},
            "/ready": {"get": _reading("Whether new requests are taken in.", _JSON, failed)},
            "/metrics": {"get": _reading("Prometheus metrics.", text)},
            "/plan": {"get": _reading("The plan that is run, and the lengths that were observed.", _JSON)},
            "/plan/history": {"get": _reading("Every decision on another plan.", _LIST)},
            "/plan/decision": {"get": _reading("What re-planning would decide now; nothing is done.", _JSON, failed)},
            "/live": {"get": _reading("What the page at / shows.", _JSON)},
        },
        "components": {"schemas": components},
    }


def _generation(summary: str, body: dict[str, Any], description: str = _COMPLETION) -> dict[str, Any]:
    refusals = {status: {"description": reason, "content": _JSON} for status, reason in _REFUSALS.items()}
    return {
        "summary": summary,
        "description": _SAMPLING + description,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "The answer.", "content": _JSON | _EVENTS}} | refusals,
    }


def _reading(
    summary: str,
    content: dict[str, Any],
    others: dict[str, Any] | None = None,
    body: dict[str, Any] | None = None,
) -> dict[str, Any]:
    asked = {}
    if body is not None:
        asked = {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}
        others = {
            status: {"description": _REFUSALS[status], "content": _JSON} for status in ("400", "401", "408", "413")
        }
    return {
        "summary": summary,
        **asked,
        "responses": {"200": {"description": summary, "content": content}} | (others or {}),
    }
