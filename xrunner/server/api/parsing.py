"""Turn the bytes of a body into a checked request, or an error that names the field."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import msgspec

from xgpt.core.errors import nearest
from xgpt.core.numbers import decimal
from xrunner.server.api.chat_request import ChatRequest, TokenizeRequest
from xrunner.server.api.errors import ApiError, refuse
from xrunner.server.api.messages import CountRequest, MessagesRequest
from xrunner.server.api.protocol import MAX_DEADLINE_S, CompletionRequest, DetokenizeRequest, GenerationRequest
from xrunner.server.api.responses import ResponsesRequest
from xrunner.server.api.translated import Translated

MAX_ITEMS = 1 << 18
"""Approximate largest number of items of all lists in a body. Half a million of them block the event loop for 25 ms."""

MAX_FREE_BYTES = 256 << 10
"""Largest size, in bytes with white space, of a field in which clients may put anything."""
MAX_PROMPTS = 4096
"""Largest number of lists of token ids in a long body."""
LONG_FIELDS = ("prompt", "messages", "tokens", "input", "instructions", "system")
"""Fields that may be as long as the whole body."""
MAX_BESIDE_BYTES = 2 << 20
"""Largest size of all other fields in a body."""
LOOK_BYTES = 64 << 10
"""Size in bytes from which a body's fields are checked for their sizes before they are decoded."""
FREE_FIELDS = (
    *("chat_template_kwargs", "tools", "tool_choice", "response_format", "logit_bias", "stop", "model", "user"),
    *("metadata", "prediction", "audio", "web_search_options", "functions", "function_call", "text", "output_config"),
    *("context_management", "diagnostics", "fallbacks", "moderation", "prompt_cache_options", "access_programs"),
    *("background_options", "image", "client_metadata", "conversation", "cache_control", "mcp_servers", "container"),
    "structured_outputs",
)
"""Fields in which clients may put anything, or whose text the server does not read."""
_Looked = msgspec.defstruct("_Looked", [(name, msgspec.Raw, msgspec.Raw()) for name in (*FREE_FIELDS, *LONG_FIELDS)])
_look = msgspec.json.Decoder(_Looked).decode
"""Decodes a body only far enough to find the sizes of its fields."""

_FIELDS = re.compile(r"`\$\.(\w+)"), re.compile(r"field `(\w+)`")
"""Patterns for the field in a message of msgspec: "... - at `$.n`", or "... unknown field `foo`"."""

Body = bytes | bytearray
P = TypeVar("P", bound=GenerationRequest | ResponsesRequest | CountRequest | TokenizeRequest | DetokenizeRequest)


def _parser(kind: type[P]) -> Callable[[Body], P]:
    return partial(_parse, msgspec.json.Decoder(kind))


def _parse(decoder: msgspec.json.Decoder[P], body: Body) -> P:
    # Counting commas takes a hundredth of the time of decoding. Texts contain commas too, but rarely more than one in
    # 16 characters.
    if body.count(b",") > MAX_ITEMS + len(body) // 16 or _has_many_strings(body):
        raise ApiError(413, f"the body holds more than {MAX_ITEMS} items; send fewer prompts at once")
    try:
        if len(body) > LOOK_BYTES:
            _check_sizes(_look(body), len(body))
        try:
            request = decoder.decode(body)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
            request = decoder.decode(_with_whole_numbers(body))
    except msgspec.ValidationError as error:
        found = (pattern.search(str(error)) for pattern in _FIELDS)
        param = next((match[1] for match in found if match), None)
        raise ApiError(400, _explained(str(error), decoder.type), param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {_in_text(body) or error}") from None
    request.check()
    return request


def _in_text(body: Body) -> str | None:
    """Return a message that states which byte of a body is not UTF-8, or None if all are. (msgspec's error counts from
    the start of a string.)"""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} ({body[error.start]:#04x}) is not UTF-8"
    return None


_type_info = cache(msgspec.inspect.type_info)
VLLM_FIELDS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Fields with which vLLM, in its present or an earlier version, restricts an output."""


def _accepted(kind: Any, path: str) -> str:
    """Return the words that a field accepts, as the end of an error message, or "" if it accepts other values. `path`:
    the field's path in messages of msgspec, for example $.tools[0].type."""
    types = [_type_info(kind)]
    names = re.findall(r"\w+|\[", path)
    for depth, name in enumerate(names, 1):
        structs = [each for each in types if isinstance(each, msgspec.inspect.StructType)]
        if depth == len(names) and (tags := [str(each.tag) for each in structs if each.tag_field == name]):
            return f"; accepted are {', '.join(tags)}"
        if name == "[":
            found = [each.item_type for each in types if isinstance(each, msgspec.inspect.ListType)]
        elif name.isdigit():
            continue
        else:
            found = [field.type for each in structs for field in each.fields if field.encode_name == name]
        types = [alternative for each in found for alternative in _alternatives(each)]
    words = [str(word) for each in types if isinstance(each, msgspec.inspect.LiteralType) for word in each.values]
    return f"; accepted are {', '.join(words)}" if words else ""


def _alternatives(kind: Any) -> Sequence[Any]:
    if isinstance(kind, msgspec.inspect.Metadata):
        return _alternatives(kind.type)
    return kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)


def _explained(says: str, kind: Any) -> str:
    if match := re.fullmatch(r"Object contains unknown field `(\w+)`", says):
        if match[1] in VLLM_FIELDS:
            return f"{match[1]}: send a chat with structured_outputs, or with a JSON schema in response_format"
        return says + nearest(match[1], [field.encode_name for field in msgspec.structs.fields(kind)])
    if match := re.fullmatch(r"Expected `array` of length >= 1 - at `\$\.(\w+)`", says):
        return f"{match[1]}: send at least one"
    if match := re.fullmatch(r"Expected `str` matching regex '.*' - at `\$\.(.+)`", says):
        return f"{match[1]}: a function's name has 1 to 128 letters, digits, _, . and -"
    if match := re.fullmatch(r"Invalid value '(\w+)' - at `\$\.(\w+)\[.*content\[.*\.type`", says):
        return f"{match[2]}: this server accepts only text, not {match[1]!r}; send text"
    if match := re.fullmatch(r"Invalid (?:enum )?value '.*' - at `\$(\..+)`", says, re.DOTALL):
        return says + _accepted(kind, match[1])
    if match := re.fullmatch(r"(Expected .*) - at `\$\.(.+)`", says):
        return f"{match[2]}: {match[1]}"
    return says


def _translator(kind: type[ResponsesRequest | CountRequest]) -> Callable[[Body], Translated]:
    """Return a function that parses a body and translates it into a checked chat. It raises ApiError (400, 413)."""
    parse = _parser(kind)

    def translate(body: Body) -> Translated:
        translated = parse(body).translated()
        try:
            translated.chat.check()
        except ApiError as error:
            translated.refuse_as_named(error)
        return translated

    return translate


parse_completion, parse_chat = _parser(CompletionRequest), _parser(ChatRequest)
parse_tokenize, parse_detokenize = _parser(TokenizeRequest), _parser(DetokenizeRequest)
parse_responses, parse_messages = _translator(ResponsesRequest), _translator(MessagesRequest)
parse_count = _translator(CountRequest)


def parse_deadline(header: str | None, field_s: float | None) -> float | None:
    """Return the shorter of the deadlines in the header X-Deadline-S and in the field, in seconds. Raises ApiError
    (400)."""
    if header is None:
        return field_s
    try:
        header_s = decimal(header)
    except ValueError:
        header_s = -1.0
    if not 0 < header_s <= MAX_DEADLINE_S:
        refuse("X-Deadline-S", f"the header must be seconds, above 0 and at most {MAX_DEADLINE_S}")
    return header_s if field_s is None else min(header_s, field_s)


def _has_many_strings(body: Body) -> bool:
    num_quotes = body.count(b'"')
    # Quotes within a string are escaped. Counting escaped quotes takes three times as long, and is rarely necessary.
    return num_quotes > 2 * MAX_ITEMS and num_quotes - body.count(b'\\"') > 2 * MAX_ITEMS


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_NUMBER = re.compile(rb"-?\d{1,20}(\.\d{1,20})?([eE][+-]?\d{1,3})?")
MAX_NUMBER = 64
"""Characters of the longest number that is read as an integer."""


def _with_whole_numbers(body: Body) -> bytes:
    """Write integers in a body's fields without a decimal point, since some clients send 4.0."""
    fields = _fields(body)
    for name, written in fields.items():
        if len(written) <= MAX_NUMBER and _NUMBER.fullmatch(text := bytes(written)) and float(text).is_integer():
            fields[name] = msgspec.Raw(str(int(float(text))).encode())
    return msgspec.json.encode(fields)


def _check_sizes(looked: Any, size: int) -> None:
    """Before decoding, refuse long fields that may contain any JSON, since millions of small objects take seconds and
    much memory.

    If a field occurs several times, only the last occurrence is checked here, but all occurrences are decoded later. So
    earlier occurrences, and all white space, count towards `MAX_BESIDE_BYTES`."""
    beside = size - sum(len(getattr(looked, name)) for name in LONG_FIELDS)
    if beside > MAX_BESIDE_BYTES:
        outside = f"the body has {beside} bytes outside the fields {', '.join(LONG_FIELDS)}"
        raise ApiError(413, f"{outside}; at most {MAX_BESIDE_BYTES} are accepted")
    for name in FREE_FIELDS:
        if (size := len(getattr(looked, name))) > MAX_FREE_BYTES:
            refuse(name, f"it has {size} bytes; at most {MAX_FREE_BYTES} are accepted")
    prompt = bytes(looked.prompt)
    if prompt.startswith(b"["):
        # In a list of texts, brackets may belong to the texts.
        most = MAX_ITEMS if b'"' in prompt else MAX_PROMPTS
        if max(prompt.count(b"["), prompt.count(b"{")) > most:
            refuse("prompt", f"it has more than {most} lists; send fewer prompts at once")
    elif not prompt.startswith(b'"') and len(prompt) > MAX_FREE_BYTES:
        refuse("prompt", f"it has {len(prompt)} bytes; at most {MAX_FREE_BYTES} are accepted")
