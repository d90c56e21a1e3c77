"""Define the functions that a chat may call, as requests declare them, and calls, as messages contain them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

NAME = r"^[A-Za-z0-9_.-]{1,128}$(?!\n)"
"""Names of functions: OpenAI's Responses and Anthropic's Messages accept up to 128 characters, chats at OpenAI 64. In
Python, `$` also matches before a final line feed."""
MAX_TOOLS = 128
MAX_NAME = 258
"""Number of characters in the longest name that a model sees, made of a namespace, two characters and a function's
name."""
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


class Function(msgspec.Struct, omit_defaults=True):
    """A function that the model may call.

    Attributes:
        parameters: a JSON schema of an object. None means that the function takes no arguments.
        strict: whether arguments always follow the schema. If a function must be called, they always do."""

    name: Annotated[str, Meta(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, tag_field="type", tag="function"):
    function: Function


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    function: NamedFunction


class Allowed(msgspec.Struct):
    tools: list[NamedTool]
    mode: Literal["auto", "required"] = "auto"


class AllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """`tool_choice`: only these functions may, or must, be called."""

    allowed_tools: Allowed


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class FunctionCall(msgspec.Struct):
    """A call. The arguments are a text of JSON."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, tag_field="type", tag="function", omit_defaults=True):
    """A call in an assistant's message."""

    function: FunctionCall
    id: str = ""
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """Arguments that are JSON become an object, and missing arguments become an empty object. Python's own JSON
        reader would accept half of a surrogate pair (\\ud800), which no tokenizer accepts."""
        try:
            arguments = msgspec.json.decode(self.function.arguments.strip() or "{}")
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        if arguments is None:
            arguments = {}
        function = {"name": self.function.name, "arguments": arguments}
        return {"type": "function", "id": self.id, "function": function}


def told(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    described: list[dict[str, Any]] = msgspec.to_builtins(tools)
    return described


def must_call(choice: ToolChoice) -> bool:
    return choice == "required" or isinstance(choice, NamedTool)
