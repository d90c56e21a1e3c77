"""Collect an output's calls, and convert arguments of other notations into JSON."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import secrets
import string
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from xrunner.server.api.tools import FunctionCall, Tool, ToolCall

TEXT = "string"
Types = Mapping[str, frozenset[str]]
"""The JSON types that a function's parameters may have, by name. An empty set means any type."""


class CallPiece(NamedTuple):
    """What a piece of text adds to a call. The first piece has the name and the id, later ones only arguments."""

    number: int
    id: str | None
    name: str | None
    arguments: str


class CallList:
    """The function calls of an output. They can be read as a whole, or in pieces for a stream. `most`: largest number
    of calls. Further calls are left out. None means no limit."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._calls: list[ToolCall] = []
        self._written: list[list[str]] = []
        """Arguments of each call in pieces, since appending to a string copies the string."""
        self._pieces: list[CallPiece] = []

    def __len__(self) -> int:
        return len(self._calls)

    def begin(self, name: str, id_: str) -> None:
        self._calls.append(ToolCall(FunctionCall(name, ""), id_))
        self._written.append([])
        self._add(CallPiece(len(self._calls) - 1, id_, name, ""))

    def append(self, arguments: str) -> None:
        if arguments:
            self._written[-1].append(arguments)
            self._add(CallPiece(len(self._calls) - 1, None, None, arguments))

    def _add(self, piece: CallPiece) -> None:
        if self._most is None or len(self._calls) <= self._most:
            self._pieces.append(piece)

    def calls(self) -> list[ToolCall]:
        for call, written in zip(self._calls, self._written, strict=True):
            call.function.arguments = "".join(written)
        return self._calls[: self._most]

    def pieces(self) -> list[CallPiece]:
        """Return the additions to function calls since the last call of this method."""
        found: list[CallPiece] = []
        for piece in self._pieces:
            if found and found[-1].number == piece.number:
                found[-1] = found[-1]._replace(arguments=found[-1].arguments + piece.arguments)
            else:
                found.append(piece)
        self._pieces.clear()
        return found


def short_id(id_: str) -> str:
    """Return the id of nine letters and digits that stands for an id: the same one each time."""
    return id_ if re.fullmatch("[A-Za-z0-9]{9}", id_) else hashlib.sha256(id_.encode()).hexdigest()[:9]


def new_id(*, short: bool) -> str:
    if short:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{uuid.uuid4().hex[:24]}"


class Extent:
    """Finds where a bracketed text ends, piece by piece.

    Args:
        quotes: texts around strings, within which brackets do not count.
        depth: number of open brackets at the beginning."""

    def __init__(self, quotes: tuple[str, ...] = ('"',), at: int = 0, depth: int = 0) -> None:
        self.at = at
        self._depth = depth
        self._quotes = quotes
        self._quote = ""

    def feed(self, text: str) -> int | None:
        """Return the length of `text` up to the end of the brackets, or None if they are still open. `text` begins with
        what was given before."""
        end = len(text) - max(overlap(text, mark) for mark in self._quotes)  # a longer quote may have begun there
        while (found := _marks(self._quotes, self._quote).search(text, self.at, end)) is not None:
            self.at, mark = found.end(), found[0]
            if mark == self._quote:
                self._quote = ""
            elif self._quote:
                continue  # an escaped character
            elif mark in self._quotes:
                self._quote = mark
            else:
                self._depth += 1 if mark in "{[(" else -1
                if self._depth <= 0:
                    return self.at
        if self._quote and text.endswith("\\"):
            end = len(text) - 1
        self.at = max(self.at, end)
        return None


def _marks(quotes: tuple[str, ...], quote: str) -> re.Pattern[str]:
    if quote:
        return re.compile(rf"{re.escape(quote)}|\\." if len(quote) == 1 else re.escape(quote), re.DOTALL)
    return re.compile("|".join([*map(re.escape, quotes), r"[{}\[\]()]"]))


def overlap(text: str, opening: str) -> int:
    """Return the length of the longest end of `text` that is a proper prefix of `opening`."""
    return next((n for n in range(min(len(text), len(opening) - 1), 0, -1) if text.endswith(opening[:n])), 0)


def is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)  # Python's own reader accepts NaN, which is not JSON
    except (ValueError, RecursionError):
        return False


def is_unicode(text: str) -> bool:
    """Return whether a text contains no half of a surrogate pair, which JSON can write as \\ud800."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def written(value: Any) -> str:
    """Return a value as JSON, in which halves of surrogate pairs stay escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text if is_unicode(text) else json.dumps(value)


class Call(NamedTuple):
    """A function call that was read as a whole. `arguments` is JSON."""

    name: str
    arguments: str
    id: str | None = None


def call_in(text: str) -> Call | None:
    """Return the call in a text of JSON, or None if it is not a call. Some models write the arguments as a string."""
    if text.startswith("{{") and text.endswith("}}"):  # as in the examples of some chat templates
        text = text[1:-1]
    try:
        match json.loads(text):
            case {"name": str(name), **rest} | {"function": str(name), **rest} | {"tool_name": str(name), **rest}:
                given = rest["arguments"] if "arguments" in rest else rest["parameters"]
                given = json.loads(given) if isinstance(given, str) and given else given or {}
                if isinstance(given, dict) and is_unicode(name):
                    id_ = rest.get("id")
                    return Call(name, written(given), id_ if isinstance(id_, str) and is_unicode(id_) else None)
    except (ValueError, KeyError, RecursionError):
        pass
    return None


WORDS = {"True": "true", "False": "false", "None": "null", "(": "[", ")": "]"}


def _escaped(found: re.Match[str]) -> str:
    """Return a line break within a text as Python writes it. A backslash before it belongs to the text."""
    return found[1] * 2 + repr(found[2])[1:-1] if found[2] else found[0]


def json_of_literals(text: str, quotes: tuple[str, ...]) -> str | None:
    """Return keys and values (`a=1, b=['x']`, or `a:1`) as a JSON object, or None if they have no JSON form."""

    def converted(found: re.Match[str]) -> str:
        part = found[0]
        if quote := next((quote for quote in quotes if part.startswith(quote)), ""):
            if len(quote) > 1:
                return written(part[len(quote) : -len(quote)])
            return written(ast.literal_eval(re.sub(r"\\[^\r\n]|(\\?)([\r\n])", _escaped, part)))
        return f"{json.dumps(found['key'])}:" if found["key"] else WORDS.get(part, part)

    strings = (
        rf"{quote}(?:[^{quote}\\]|\\.)*{quote}" if len(quote) == 1 else f"{re.escape(quote)}.*?{re.escape(quote)}"
        for quote in quotes
    )
    try:
        found = re.sub(rf"{'|'.join(strings)}|(?P<key>[A-Za-z_]\w*)\s*[:=]|\w+|[()]", converted, text, flags=re.DOTALL)
        return written(json.loads(f"{{{found}}}"))
    except (ValueError, SyntaxError, RecursionError):
        return None


def types_of(tools: Sequence[Tool]) -> dict[str, Types]:
    properties = ((tool.function.name, (tool.function.parameters or {}).get("properties")) for tool in tools)
    return {
        name: {key: frozenset(_types(schema)) for key, schema in found.items()} if isinstance(found, dict) else {}
        for name, found in properties
    }


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    types = {each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str)}
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    types |= {TEXT if isinstance(value, str) else "null" if value is None else "other" for value in values}
    for part in ("anyOf", "oneOf"):
        types.update(*map(_types, schema.get(part) or ()))
    return types


def parameter(text: str, types: frozenset[str]) -> str:
    """Return a parameter's value, which a model wrote between tags, as JSON."""
    if TEXT not in types or (text == "null" and "null" in types):
        value = WORDS.get(text.strip(), text)
        try:
            msgspec.json.decode(value)  # Python's own reader accepts NaN, which is not JSON
            return value.strip()
        except (ValueError, RecursionError):
            pass
    return written(text)
