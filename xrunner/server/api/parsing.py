"""From the bytes of a body to a checked request, or an error that names the field."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from xgpt.core.numbers import decimal
from xrunner.server.api.errors import ApiError, refuse
from xrunner.server.api.protocol import (
    MAX_DEADLINE_S,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

MAX_ITEMS = 1 << 18
"""Largest number of items of all lists in a body, about: mostly prompt tokens. Half a million block the event loop for
25 ms."""

_FIELDS = re.compile(r"`\$\.(\w+)"), re.compile(r"field `(\w+)`")
"""The field in a message of msgspec: "... - at `$.n`", else "... unknown field `foo`"."""

_decode_completion = msgspec.json.Decoder(CompletionRequest).decode
_decode_chat = msgspec.json.Decoder(ChatRequest).decode
_decode_tokenize = msgspec.json.Decoder(TokenizeRequest).decode
_decode_detokenize = msgspec.json.Decoder(DetokenizeRequest).decode


def parse_completion(body: bytes | bytearray) -> CompletionRequest:
    """Return the request in a body, with all that can be checked without the model. Raises ApiError (400)."""
    return _parse(body, _decode_completion)


def parse_chat(body: bytes | bytearray) -> ChatRequest:
    """Return the request in a body, with all that can be checked without the model. Raises ApiError (400)."""
    return _parse(body, _decode_chat)


def parse_tokenize(body: bytes | bytearray) -> TokenizeRequest:
    """Return the request in a body. Raises ApiError (400)."""
    return _parse(body, _decode_tokenize)


def parse_detokenize(body: bytes | bytearray) -> DetokenizeRequest:
    """Return the request in a body. Raises ApiError (400)."""
    return _parse(body, _decode_detokenize)


def parse_deadline(header: str | None, field_s: float | None) -> float | None:
    """Seconds that an answer may take, from the header X-Deadline-S and the field. Raises ApiError (400)."""
    if header is None:
        return field_s
    try:
        header_s = decimal(header)
    except ValueError:
        header_s = -1.0
    if not 0 < header_s <= MAX_DEADLINE_S:
        refuse("X-Deadline-S", f"the header must be seconds, above 0 and at most {MAX_DEADLINE_S}")
    return header_s if field_s is None else min(header_s, field_s)


def _parse(body: bytes | bytearray, decode: Any) -> Any:
    # Counting commas takes a hundredth of the time of decoding; text has some, too, but hardly one in 16 characters.
    if body.count(b",") > MAX_ITEMS + len(body) // 16:
        raise ApiError(413, f"the body holds more than {MAX_ITEMS} items; send fewer prompts at once")
    try:
        request = decode(body)
    except msgspec.ValidationError as error:
        found = (pattern.search(str(error)) for pattern in _FIELDS)
        raise ApiError(400, str(error), param=next((match[1] for match in found if match), None)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    request.check()
    return request
