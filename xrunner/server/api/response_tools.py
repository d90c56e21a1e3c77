"""Translate tools of OpenAI's Responses into functions of a chat.

Agents send tools that OpenAI would run (`HOSTED`) with every request. If the request also has functions and the model
may choose, these tools are left out, also from the answer's `tools`. A request that has only such tools, or that
requires one, is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from xrunner.server.api.errors import quoted, refuse
from xrunner.server.api.tools import (
    MAX_TOOLS,
    NAME,
    Allowed,
    AllowedTools,
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
)

HOSTED = frozenset(
    (
        *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
        *("file_search", "code_interpreter", "image_generation", "mcp", "computer", "computer_use_preview"),
        *("local_shell", "shell", "apply_patch", "tool_search", "programmatic_tool_calling"),
    )
)
"""Types of tools that OpenAI runs, or whose calls have different forms."""
TEXT_ARGUMENT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters of the function into which a custom tool is translated."""


class CustomFormat(msgspec.Struct, omit_defaults=True):
    """The format of a custom tool's input. The model reads about it in the tool's description."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class ResponseTool(msgspec.Struct, omit_defaults=True):
    """A function, a custom tool, a namespace with tools, or a tool of another type."""

    type: str
    name: Annotated[str, Meta(pattern=NAME)] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    tools: list[ResponseTool] | None = None


class Chosen(msgspec.Struct, omit_defaults=True):
    """The tools that may be called: one, by name, or several."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[Chosen] = []


class Declared(NamedTuple):
    namespace: str | None
    tool: ResponseTool

    @property
    def function(self) -> str:
        return flat_name(self.namespace, self.tool.name or "")


def flat_name(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def arguments_of(text: str) -> str:
    return json.dumps({"input": text}, ensure_ascii=False)


class Toolbox:
    """The tools of a request.

    Attributes:
        declared: the tools that are used, as the request declares them.

    Raises:
        ApiError: 400, a tool is not supported."""

    def __init__(self, tools: Sequence[ResponseTool], choice: str | Chosen | None) -> None:
        self.declared = [tool for tool in tools if tool.type not in HOSTED]
        if tools and not self.declared:
            says = f"tools of type {quoted(tools[0].type)} are not supported: this server runs no tools; send functions"
            refuse("tools", says)
        used = list(_all_of(self.declared))
        if len(used) > MAX_TOOLS:
            refuse("tools", f"{len(used)} functions are too many; at most {MAX_TOOLS} are accepted")
        self.functions = [_function(each) for each in used]
        self.choice = _choice(choice)
        self.calls = CallItems(used)


class CallItems:
    """Writes function calls as items of an output. A call has the form of the tool that the request declared."""

    def __init__(self, tools: Sequence[Declared]) -> None:
        self._custom = {each.function for each in tools if each.tool.type == "custom"}
        self._inside = {each.function: (each.namespace, each.tool.name) for each in tools if each.namespace}

    def is_custom(self, function: str) -> bool:
        return function in self._custom

    def item(self, id_: str, call_id: str, function: str, arguments: str, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": id_, "call_id": call_id, "name": function, "status": status}
        if function in self._inside:
            item["namespace"], item["name"] = self._inside[function]
        if function in self._custom:
            return item | {"type": "custom_tool_call", "input": _text_of(arguments)}
        return item | {"type": "function_call", "arguments": arguments}


def _all_of(tools: Sequence[ResponseTool]) -> Iterator[Declared]:
    names: set[str] = set()
    for tool in tools:
        if tool.type not in ("function", "custom", "namespace") or tool.name is None:
            says = f"tools of type {quoted(tool.type)} are not supported; send functions with names"
            refuse("tools", says)
        inner = [Declared(None, tool)]
        if tool.type == "namespace":
            inner = [Declared(tool.name, each) for each in tool.tools or ()]
        for each in inner:
            if each.tool.type not in ("function", "custom") or each.tool.name is None:
                says = f"namespace {quoted(tool.name)}: a tool has no name or the type {quoted(each.tool.type)}"
                refuse("tools", f"{says}; send functions and custom tools with names")
            if each.function in names:
                refuse("tools", f"two functions have the name {quoted(each.function)}")
            names.add(each.function)
            yield each


def _function(declared: Declared) -> Tool:
    name, tool = declared.function, declared.tool
    if tool.type == "function":
        return Tool(Function(name, tool.description, tool.parameters, tool.strict))
    says = [tool.description] if tool.description else []
    if tool.format is not None and tool.format.definition:
        says.append(f"The input follows this grammar ({tool.format.syntax}):\n{tool.format.definition}")
    return Tool(Function(name, "\n\n".join(says) or None, TEXT_ARGUMENT))


def _choice(choice: str | Chosen | None) -> ToolChoice | None:
    if not isinstance(choice, Chosen):
        found: ToolChoice | None = msgspec.convert(choice, ToolChoice | None)
        return found
    if choice.type in ("function", "custom") and choice.name is not None:
        return _named(choice)
    if choice.type == "allowed_tools" and all(tool.name is not None for tool in choice.tools):
        return AllowedTools(Allowed([_named(tool) for tool in choice.tools], choice.mode))
    refuse("tool_choice", f"{quoted(choice.type)} is not supported; name a function, or send none, auto or required")


def _named(choice: Chosen) -> NamedTool:
    return NamedTool(NamedFunction(flat_name(choice.namespace, choice.name or "")))


def _text_of(arguments: str) -> str:
    """Return the text in the arguments of a custom tool's function, or the arguments themselves if they are
    incomplete."""
    try:
        found = msgspec.json.decode(arguments)["input"]  # Python's own reader accepts half a surrogate
    except (ValueError, RecursionError, TypeError, KeyError):
        return arguments
    return found if isinstance(found, str) else arguments
