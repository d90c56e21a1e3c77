"""Implement Anthropic's Messages API (POST /v1/messages and /v1/messages/count_tokens) by translation to chats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from xrunner.server.api.calls import is_object
from xrunner.server.api.chat_request import (
    ChatMessage,
    ChatRequest,
    JsonSchema,
    JsonSchemaFormat,
    Parts,
    reasoning_switch,
)
from xrunner.server.api.choices import Choice, Delta, LogprobsJson, TokenReport
from xrunner.server.api.errors import ApiError, anthropic_error, quoted, refuse
from xrunner.server.api.protocol import Count, Sampled, Stop
from xrunner.server.api.tools import (
    MAX_TOOLS,
    NAME,
    Function,
    FunctionCall,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
    ToolChoice,
)
from xrunner.server.api.translated import AnswerBlock, BlockWriter, Translated, named_event, new_id, parts_of
from xrunner.server.api.writers import PromptTokens

BILLING = "x-anthropic-billing-header:"
"""Beginning of the block that Claude Code puts before a system prompt, for Anthropic. The block differs in each
request, so that no K/V could be reused if the model saw it."""
NAMES = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "response_format": "output_config"}
OBJECT = {"anyOf": [{"type": "object"}, {"type": "null"}]}


class ContentBlock(msgspec.Struct):
    """A part of a message. Only the fields of its type are used. Other fields (`cache_control`, ...) are hints.

    The input of a call is not decoded here: a million small objects take most of a second."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str = ""
    name: str | None = None
    input: Annotated[msgspec.Raw, Meta(extra_json_schema=OBJECT)] = msgspec.field(default_factory=msgspec.Raw)
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None


class Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class ClientTool(msgspec.Struct):
    name: Annotated[str, Meta(pattern=NAME)]
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None


class Choosing(msgspec.Struct):
    """The field `tool_choice`: whether functions may or must be called. `name`: the function that must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Sampled, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/messages/count_tokens. Fields that concern only the answer have no effect."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[ContentBlock] | None = None
    tools: Annotated[list[ClientTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choosing | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    context_management: Any = None
    diagnostics: Any = None
    fallbacks: Any = None
    mcp_servers: list[Any] | None = None

    def check(self) -> None:
        if self.mcp_servers:
            refuse("mcp_servers", "this server runs no tools; leave it out, and send tools for the client to run")
        for tool in self.tools or ():
            if tool.type not in (None, "custom") or tool.input_schema is None:
                refuse(
                    "tools",
                    f"{tool.name} has no input_schema: send one, since this server does not run Anthropic's own tools",
                )

    def chat(self, **fields: Any) -> ChatRequest:
        system = self.system
        if isinstance(system, list):
            system = [block for block in system if not (block.text or "").startswith(BILLING)]
        messages = [] if not system else [ChatMessage("system", _texts(system, "system"))]
        for message in self.messages:
            messages += _messages(message)
        is_begun = messages[-1].role == "assistant" and not messages[-1].tool_calls
        chat = ChatRequest(
            messages=messages,
            continue_final_message=is_begun or None,
            tools=[Tool(Function(each.name, each.description, each.input_schema)) for each in self.tools or ()] or None,
            tool_choice=None if self.tool_choice is None else _choice(self.tool_choice),
            **self.common(Sampled),
            **fields,
        )
        if self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use:
            chat.parallel_tool_calls = False
        variables: dict[str, Any] = {}
        if self.thinking is not None:
            variables |= reasoning_switch(is_on=self.thinking.type != "disabled")
        config = self.output_config
        if config is not None and config.effort is not None:
            variables["reasoning_effort"] = config.effort
        if config is not None and config.format is not None:
            chat.response_format = JsonSchemaFormat(JsonSchema("answer", config.format.schema))
        chat.chat_template_kwargs = variables or None
        return chat

    def translated(self) -> Translated:
        return Translated(self.chat(), MessagesWriter(self.model, 0), NAMES)


class MessagesRequest(CountRequest, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: Count
    stop_sequences: Annotated[list[Stop], Meta(max_length=16)] | None = None
    speed: str | None = None
    inference_geo: str | None = None
    container: Any = None

    def check(self) -> None:
        super().check()
        if self.container is not None:
            refuse("container", "this server runs no code; leave it out")

    def chat(self, **fields: Any) -> ChatRequest:
        chat = super().chat(stop=self.stop_sequences or None, max_tokens=self.max_tokens, **fields)
        chat.may_fill_context = True
        return chat

    def translated(self) -> Translated:
        return Translated(self.chat(), MessagesWriter(self.model, self.max_tokens), NAMES)


def _texts(content: str | list[ContentBlock], field: str) -> str | Parts:
    if isinstance(content, str):
        return content
    return parts_of([_text(block, field) for block in content])


def _text(block: ContentBlock, field: str) -> str:
    if block.type != "text" or block.text is None:
        refuse(field, f"content blocks of type {quoted(block.type)} are not supported; send text")
    return block.text


def _messages(message: Message) -> list[ChatMessage]:
    """Return a message as chat messages: first each result of a call, as a separate message. Raises ApiError (400)."""
    if isinstance(message.content, str):
        return [ChatMessage(message.role, message.content)]
    results: list[ChatMessage] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in message.content:
        match block.type, message.role:
            case "tool_result", "user":
                content = "" if block.content is None else _texts(block.content, "messages")
                results.append(ChatMessage("tool", content or "", tool_call_id=block.tool_use_id))
            case "tool_use", "assistant" if block.name is not None:
                arguments = _arguments(block.input)
                calls.append(ToolCall(FunctionCall(block.name, arguments), block.id))
            case "thinking", "assistant":
                thoughts.append(block.thinking or "")
            case "redacted_thinking", "assistant":
                pass  # only the model's provider can read redacted thinking
            case _:
                texts.append(_text(block, "messages"))
    if results and not texts:
        return results
    said = ChatMessage(message.role, parts_of(texts) if texts else "")
    said.tool_calls, said.reasoning_content = calls or None, "\n".join(thoughts) or None
    return [*results, said]


def _arguments(given: msgspec.Raw) -> str:
    text = bytes(given).decode(errors="replace")
    if text in ("", "null"):
        return "{}"
    return text if text.startswith("{") else refuse("messages", "the input of a call must be an object")


def _choice(choice: Choosing) -> ToolChoice:
    if choice.type == "tool":
        return NamedTool(
            NamedFunction(choice.name or refuse("tool_choice", "the choice tool needs a name; send the tool's name"))
        )
    return "required" if choice.type == "any" else choice.type


class MessagesWriter(BlockWriter):
    """Writes a chat's answer in the format of Anthropic's messages. `max_tokens`: the request's limit. If an output was
    cut off with fewer tokens, the reason was a full context."""

    def __init__(self, model: str, max_tokens: int) -> None:
        super().__init__()
        self._max_tokens = max_tokens
        self._message = {"id": new_id("msg"), "type": "message", "role": "assistant", "model": model}

    def begin(self, prompt: PromptTokens) -> Iterator[bytes]:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(prompt, 0)}
        yield named_event("message_start", message=self._message | empty)

    def opened(self, block: AnswerBlock) -> Iterator[bytes]:
        yield named_event("content_block_start", index=self._num_blocks - 1, content_block=_content(block, ""))

    def added(self, block: AnswerBlock, text: str, logprobs: LogprobsJson | None) -> bytes:
        delta = {
            "reasoning": {"type": "thinking_delta", "thinking": text},
            "text": {"type": "text_delta", "text": text},
            "call": {"type": "input_json_delta", "partial_json": text},
        }[block.kind]
        return named_event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def closed(self, block: AnswerBlock, text: str) -> Iterator[bytes]:
        yield named_event("content_block_stop", index=self._num_blocks - 1)

    def ended(self, last: Delta, prompt: PromptTokens, num_tokens: int) -> Iterator[bytes]:
        delta = self._stopped(last.finish, last.stopped_at, num_tokens, has_calls=self._has_calls)
        yield named_event("message_delta", delta=delta, usage=_usage(prompt, num_tokens))
        yield named_event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return named_event("error", error=anthropic_error(error))

    def answer(self, blocks: Sequence[tuple[AnswerBlock, str]], choice: Choice, prompt: PromptTokens) -> dict[str, Any]:
        content = [_content(block, text) for block, text in blocks]
        stopped = self._stopped(choice.finish, choice.stopped_at, choice.num_tokens, has_calls=bool(choice.calls))
        return self._message | {"content": content, **stopped, "usage": _usage(prompt, choice.num_tokens)}

    def logprobs(self, report: TokenReport) -> dict[str, Any]:
        return {}  # messages have no such field

    def _stopped(
        self, finish: str | None, stopped_at: str | None, num_tokens: int, *, has_calls: bool
    ) -> dict[str, Any]:
        reason = "end_turn"
        if finish == "length":
            reason = "max_tokens" if num_tokens >= self._max_tokens else "model_context_window_exceeded"
        elif stopped_at is not None:
            reason = "stop_sequence"
        elif has_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": stopped_at}


def _content(block: AnswerBlock, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    if block.call is None:
        return {"type": "text", "text": text}
    arguments = msgspec.Raw(text.encode() if is_object(text) else b"{}")  # it may be cut off
    return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": arguments}


def _usage(prompt: PromptTokens, output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": prompt.total - prompt.cached,
        "cache_read_input_tokens": prompt.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": output_tokens,
    }
