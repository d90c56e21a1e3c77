"""Functions that a chat may call: how they are told to a model, and how its calls are read.

A model that is free to choose writes a call between <tool_call> and </tool_call>, as the templates of Hermes and Qwen
teach it; its arguments keep to the function's schema. One that must call writes nothing but the call.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from xrunner.grammar import any_of_grammar, tagged_grammar

OPENING, CLOSING = "<tool_call>", "</tool_call>"
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
        """As templates take it: with the arguments as an object, where they are one."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"type": "function", "id": self.id, "function": function}


def told(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Functions as a template takes them."""
    described: list[dict[str, Any]] = msgspec.to_builtins(tools)
    return described


def must_call(choice: ToolChoice) -> bool:
    """Whether the output is a call and nothing else."""
    return choice == "required" or isinstance(choice, NamedTool)


def grammar_of(tools: Sequence[Tool], choice: ToolChoice) -> str | None:
    """What the output keeps to; None: anything."""
    if choice == "none":
        return None
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    schemas = {tool.function.name: tool.function.parameters or NO_ARGUMENTS for tool in tools}
    opened = {f'{{"name": {json.dumps(name)}, "arguments": ': schema for name, schema in schemas.items()}
    if must_call(choice):
        return any_of_grammar(opened, "}")
    tagged = {f"{OPENING}\n{opening}": schema for opening, schema in opened.items()}
    return tagged_grammar(OPENING, tagged, f"}}\n{CLOSING}")


class Calls:
    """Takes the calls out of an output's text, piece by piece. What may be the beginning of one is held back.

    Args:
        most: calls of an output; further ones are left out. None: all.
    """

    def __init__(self, choice: ToolChoice, most: int | None = None) -> None:
        self._must_call = must_call(choice)
        self._most = most
        self._held = ""

    def push(self, piece: str) -> str:
        """The text that may go out."""
        self._held += piece
        if self._must_call:
            return ""
        found = self._held.find(OPENING)
        if found < 0:
            found = len(self._held) - _overlap(self._held, OPENING)
        text, self._held = self._held[:found], self._held[found:]
        return text

    def end(self) -> tuple[str, list[ToolCall]]:
        """What is still held of the text, and the calls; one that was cut off is text."""
        held, self._held = self._held, ""
        if self._must_call:
            call = _call(held)
            return (held, []) if call is None else ("", [call])
        rest, calls = [], []
        head, *pieces = held.split(OPENING)
        rest.append(head)
        for piece in pieces:
            written, closing, behind = piece.partition(CLOSING)
            call = _call(written) if closing else None
            if call is None:
                rest.append(OPENING + piece)
            else:
                calls.append(call)
                rest.append(behind)
        text = "".join(rest)
        return text if text.strip() else "", calls[: self._most]


def _overlap(text: str, opening: str) -> int:
    """Characters at the end of a text that may be the beginning of an opening."""
    return next((n for n in range(min(len(text), len(opening) - 1), 0, -1) if text.endswith(opening[:n])), 0)


def _call(written: str) -> ToolCall | None:
    try:
        call = json.loads(written)
        return ToolCall(FunctionCall(call["name"], json.dumps(call["arguments"])), f"call_{uuid.uuid4().hex[:24]}")
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
