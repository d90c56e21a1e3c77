"""Functions that a chat may call: tell a model of them, and read its calls.

A model that is free to choose writes a call as its template teaches it (`call_formats`); its arguments keep to the
function's schema. One that must call writes nothing but the call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from xrunner.grammar import any_of_grammar
from xrunner.server.api.call_formats import HERMES, Call, CallFormat

NAME = r"^[A-Za-z0-9_.-]{1,64}$"
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What a model may call.

    Attributes:
        parameters: a JSON schema of an object; None: it takes no arguments.
        strict: taken and of no effect: arguments always keep to the schema.
    """

    name: Annotated[str, Meta(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    function: Function


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """`tool_choice`: this function must be called."""

    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call; its arguments are JSON as text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True, omit_defaults=True):
    """A call in a message of the assistant's."""

    function: FunctionCall
    id: str = ""
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the call as templates take it: its arguments as an object, if they are JSON; none are an empty one."""
        try:
            arguments = json.loads(self.function.arguments.strip() or "{}")
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        if arguments is None:
            arguments = {}
        function = {"name": self.function.name, "arguments": arguments}
        return {"type": "function", "id": self.id, "function": function}


def told(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Functions as a template takes them."""
    described: list[dict[str, Any]] = msgspec.to_builtins(tools)
    return described


def must_call(choice: ToolChoice) -> bool:
    """Whether the output is a call and nothing else."""
    return choice == "required" or isinstance(choice, NamedTool)


def grammar_of(tools: Sequence[Tool], choice: ToolChoice, format_: CallFormat = HERMES) -> str | None:
    """Return what the output keeps to; None: anything."""
    if choice == "none":
        return None
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    schemas = {tool.function.name: tool.function.parameters or NO_ARGUMENTS for tool in tools}
    if must_call(choice):
        return any_of_grammar({format_.begin(name): schema for name, schema in schemas.items()}, "}")
    return format_.grammar(schemas)


class Calls:
    """Takes the calls out of an output's text, piece by piece. What may be the beginning of one is held back.

    Args:
        most: calls of an output; further ones are left out. None: all.
    """

    def __init__(self, choice: ToolChoice, most: int | None = None, format_: CallFormat = HERMES) -> None:
        self._must_call = must_call(choice)
        self._most = most
        self._format = format_
        self._held = ""

    def push(self, piece: str) -> str:
        """Return the text that may go out."""
        self._held += piece
        if self._must_call:
            return ""
        found = self._held.find(self._format.trigger)
        if found < 0:
            found = len(self._held) - _overlap(self._held, self._format.trigger)
        text, self._held = self._held[:found], self._held[found:]
        return text

    def end(self) -> tuple[str, list[ToolCall]]:
        """Return what is still held of the text, and the calls; one that was cut off is text."""
        held, self._held = self._held, ""
        if self._must_call:
            call = self._format.call_in(held)
            return (held, []) if call is None else ("", [_told(call)])
        trigger = self._format.trigger
        rest: list[str] = []
        calls: list[ToolCall] = []
        while (found := held.find(trigger)) >= 0:
            rest.append(held[:found])
            held = held[found:]
            read = self._format.read(held)
            if read is None:
                rest.append(trigger)
                held = held[len(trigger) :]
            else:
                calls += map(_told, read[0])
                held = held[read[1] :]
        text = "".join([*rest, held])
        return text if text.strip() else "", calls[: self._most]


def _overlap(text: str, opening: str) -> int:
    """Characters at the end of a text that may be the beginning of an opening."""
    return next((n for n in range(min(len(text), len(opening) - 1), 0, -1) if text.endswith(opening[:n])), 0)


def _told(call: Call) -> ToolCall:
    return ToolCall(FunctionCall(call.name, call.arguments), call.id)
