"""Implement OpenAI's Responses API (POST /v1/responses) by translation to chats."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from xrunner.server.api.calls import is_object
from xrunner.server.api.chat_request import (
    ChatMessage,
    ChatRequest,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Parts,
    TextFormat,
)
from xrunner.server.api.choices import Choice, Delta, LogprobsJson, TokenReport
from xrunner.server.api.errors import ApiError, quoted, refuse
from xrunner.server.api.protocol import MAX_LOGPROBS, Count, OpenAiFields
from xrunner.server.api.response_tools import CallItems, Chosen, ResponseTool, Toolbox, arguments_of, flat_name
from xrunner.server.api.tools import MAX_TOOLS, FunctionCall, ToolCall
from xrunner.server.api.translated import AnswerBlock, BlockWriter, Kind, Translated, named_event, new_id, parts_of
from xrunner.server.api.writers import PromptTokens, scored_token

NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
}
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
"""Part types that are text."""
WITH_LOGPROBS = "message.output_text.logprobs"


class ContentPart(msgspec.Struct):
    """A part of an item's content. Other fields (`annotations`, ...) are ignored."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct):
    """An item of the input. Only the fields of its type are used."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    call_id: str = ""
    name: str | None = None
    namespace: str | None = None
    arguments: str = ""
    input: str = ""
    output: str | list[ContentPart] | None = None


class NamedSchema(JsonSchema, tag_field="type", tag="json_schema", forbid_unknown_fields=False):
    """A JSON schema. In chats, it is nested one level deeper."""


class TextConfig(msgspec.Struct):
    format: TextFormat | JsonObjectFormat | NamedSchema | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(OpenAiFields, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/responses."""

    WITHOUT_EFFECT: ClassVar[dict[str, str]] = {
        "previous_response_id": "answers are not stored; send earlier items in input",
        "conversation": "conversations are not stored; send their items in input",
        "background": "answers are not stored; leave it out",
        "prompt": "prompts are not stored; send instructions and input",
        "moderation": "this server does not moderate; leave it out",
    }

    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Chosen | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Count | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    context_management: Any = None
    access_programs: Any = None
    background_options: Any = None
    client_metadata: Any = None
    image: Any = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    moderation: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        for field, reason in self.WITHOUT_EFFECT.items():
            if getattr(self, field):
                refuse(field, reason)

    def translated(self) -> Translated:
        instructions = [ChatMessage("system", self.instructions)] if self.instructions else []
        toolbox = Toolbox(self.tools or (), self.tool_choice)
        is_scored = WITH_LOGPROBS in (self.include or ())
        chat = ChatRequest(
            messages=[*instructions, *_messages(self.input)] or refuse("input", "it is empty; send at least one item"),
            max_tokens=self.max_output_tokens,
            logprobs=is_scored or None,
            top_logprobs=self.top_logprobs if is_scored else None,
            tools=toolbox.functions or None,
            tool_choice=toolbox.choice,
            response_format=_format(self.text),
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            parallel_tool_calls=self.parallel_tool_calls,
            chat_template_kwargs=self.chat_template_kwargs,
            **self.common(OpenAiFields),
        )
        return Translated(chat, ResponsesWriter(self, toolbox.declared, toolbox.calls), NAMES)


def _messages(items: str | list[Item]) -> list[ChatMessage]:
    """Reasoning and calls become part of an assistant message."""
    if isinstance(items, str):
        return [ChatMessage("user", items)]
    messages: list[ChatMessage] = []
    thought = ""
    is_open = False
    """Whether further calls may be added to the last message."""
    for item in items:
        if item.type == "reasoning":
            thought += "\n".join(_texts(item.content or item.summary or []))
            is_open = False
            continue
        if item.type in ("function_call", "custom_tool_call") and item.name is not None:
            arguments = item.arguments if item.type == "function_call" else arguments_of(item.input)
            call = ToolCall(FunctionCall(flat_name(item.namespace, item.name), arguments), item.call_id)
            if is_open and not thought:
                if messages[-1].tool_calls is None:
                    messages[-1].tool_calls = []
                messages[-1].tool_calls.append(call)
                continue
            message = ChatMessage("assistant", tool_calls=[call])
        elif item.type in ("function_call_output", "custom_tool_call_output"):
            message = ChatMessage("tool", _content(item.output), tool_call_id=item.call_id)
        elif item.type == "message" and item.role is not None:
            message = ChatMessage(item.role, _content(item.content))
        else:
            says = f"items of type {quoted(item.type)} are not supported; send messages, calls and their outputs"
            refuse("input", says)
        is_open = message.role == "assistant"
        if thought and is_open:
            message.reasoning_content, thought = thought, ""
        messages.append(message)
    if thought:
        messages.append(ChatMessage("assistant", reasoning_content=thought))
    return messages


def _content(content: str | list[ContentPart] | None) -> str | Parts:
    if isinstance(content, str):
        return content
    return parts_of(_texts(content)) if content else ""


def _texts(parts: str | list[ContentPart]) -> list[str]:
    if isinstance(parts, str):
        return [parts]
    for part in parts:
        if part.type not in TEXTS:
            refuse("input", f"parts of type {quoted(part.type)} are not supported; send text")
    return [part.text or part.refusal or "" for part in parts]


def _format(text: TextConfig | None) -> TextFormat | JsonObjectFormat | JsonSchemaFormat | None:
    found = None if text is None else text.format
    if isinstance(found, NamedSchema):
        return JsonSchemaFormat(found)
    return found


class ResponsesWriter(BlockWriter):
    times_scored = 5
    """At the end of a stream, a text and its log probabilities are sent four times more: alone, in a part, in an item
    and in the answer."""

    def __init__(self, request: ResponsesRequest, tools: list[ResponseTool], calls: CallItems) -> None:
        super().__init__()
        self._calls = calls
        said = {
            "object": "response",
            "created_at": int(time.time()),
            "model": request.model,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
            "store": False,
            "temperature": request.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": tools,
            "top_p": request.top_p,
            "truncation": "disabled",
        }
        self._id = new_id("resp")
        # These fields are encoded now, so that the request need not be kept.
        self._said = msgspec.json.encode(said)
        self.num_kept_bytes = len(self._said)
        self._items: list[dict[str, Any]] = []
        self._logprobs = bytearray()
        """Log probabilities of the open block, as items of a JSON list: objects would take ten times the memory."""
        self._num_events = 0

    def begin(self, prompt: PromptTokens) -> Iterator[bytes]:
        for event in ("response.created", "response.in_progress"):
            yield self._event(event, response=self._response("in_progress", [], None))

    def opened(self, block: AnswerBlock) -> Iterator[bytes]:
        index = len(self._items)
        item = self._item(block, None, "in_progress")
        yield self._event("response.output_item.added", output_index=index, item=item)
        if block.kind != "call":
            part = _part(block, "")
            yield self._event("response.content_part.added", **self._place(block), content_index=0, part=part)

    def added(self, block: AnswerBlock, text: str, logprobs: LogprobsJson | None) -> bytes:
        members = self._place(block) | {"delta": text}
        if block.kind == "call":
            # The input of a custom tool is a string within the arguments, which is sent once it is complete.
            is_custom = self._is_custom(block)
            return b"" if is_custom else self._event("response.function_call_arguments.delta", **members)
        if block.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **members, content_index=0)
        scored = b"" if logprobs is None else logprobs.items("content")
        self._logprobs += b"," + scored if scored and self._logprobs else scored
        return self._event("response.output_text.delta", **members, content_index=0, logprobs=_listed(scored))

    def closed(self, block: AnswerBlock, text: str) -> Iterator[bytes]:
        place, logprobs = self._place(block), _listed(self._logprobs)
        self._logprobs = bytearray()
        item = self._item(block, text, _ended(block.kind, text, is_cut=self._is_cut), logprobs)
        if block.kind == "call" and self._is_custom(block):
            yield self._event("response.custom_tool_call_input.delta", **place, delta=item["input"])
            yield self._event("response.custom_tool_call_input.done", **place, input=item["input"])
        elif block.kind == "call":
            done = place | {"name": item["name"], "arguments": text}
            yield self._event("response.function_call_arguments.done", **done)
        else:
            done = place | {"content_index": 0, "text": text}
            if block.kind == "text":
                yield self._event("response.output_text.done", **done, logprobs=logprobs)
            else:
                yield self._event("response.reasoning_text.done", **done)
            part = _part(block, text, logprobs)
            yield self._event("response.content_part.done", **place, content_index=0, part=part)
        self._items.append(item)
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def ended(self, last: Delta, prompt: PromptTokens, num_tokens: int) -> Iterator[bytes]:
        status = _status(last.finish)
        response = self._response(status, self._items, self._usage(prompt, num_tokens))
        yield self._event(f"response.{status}", response=response)

    def failure(self, error: ApiError) -> bytes:
        code = error.code or ("server_error" if error.status >= 500 else "invalid_prompt")
        said = self._event("error", code=code, message=str(error), param=error.param)
        failed = self._response("failed", self._items, None) | {"error": {"code": code, "message": str(error)}}
        return said + self._event("response.failed", response=failed)

    def answer(self, blocks: Sequence[tuple[AnswerBlock, str]], choice: Choice, prompt: PromptTokens) -> dict[str, Any]:
        logprobs = _listed(b"" if choice.logprobs is None else choice.logprobs.items("content"))
        items = [self._item(block, text, "completed", logprobs) for block, text in blocks]
        items[-1]["status"] = _ended(blocks[-1][0].kind, blocks[-1][1], is_cut=choice.finish == "length")
        return self._response(_status(choice.finish), items, self._usage(prompt, choice.num_tokens))

    def logprobs(self, report: TokenReport) -> dict[str, Any]:
        return {"content": scored_token(report)}

    def _is_custom(self, block: AnswerBlock) -> bool:
        return block.call is not None and self._calls.is_custom(block.call.name or "")

    def _item(
        self, block: AnswerBlock, text: str | None, status: str, logprobs: msgspec.Raw | None = None
    ) -> dict[str, Any]:
        if block.kind == "call":
            assert block.call is not None
            return self._calls.item(block.id, block.call.id or "", block.call.name or "", text or "", status)
        content = [] if text is None else [_part(block, text, logprobs)]
        item: dict[str, Any] = {"id": block.id, "status": status, "content": content}
        if block.kind == "reasoning":
            return item | {"type": "reasoning", "summary": []}
        return item | {"type": "message", "role": "assistant"}

    def _event(self, kind: str, **members: Any) -> bytes:
        self._num_events += 1
        return named_event(kind, sequence_number=self._num_events - 1, **members)

    def _place(self, block: AnswerBlock) -> dict[str, Any]:
        return {"item_id": block.id, "output_index": len(self._items)}

    def _response(self, status: str, items: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        is_cut = status == "incomplete"
        changing = {
            "id": self._id,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": items,
            "usage": usage,
        }
        said: dict[str, Any] = msgspec.json.decode(self._said)
        return changing | said

    def _usage(self, prompt: PromptTokens, num_tokens: int) -> dict[str, Any]:
        return {
            "input_tokens": prompt.total,
            "input_tokens_details": {"cached_tokens": prompt.cached, "cache_write_tokens": 0},
            "output_tokens": num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": prompt.total + num_tokens,
        }


def _status(finish: str | None) -> str:
    return "incomplete" if finish == "length" else "completed"


def _ended(kind: Kind, text: str, *, is_cut: bool) -> str:
    """Agents run calls that are completed, so a call that was cut off is not."""
    return "incomplete" if is_cut and not (kind == "call" and is_object(text)) else "completed"


def _listed(items: bytes | bytearray) -> msgspec.Raw:
    return msgspec.Raw(b"[" + items + b"]")


def _part(block: AnswerBlock, text: str, logprobs: msgspec.Raw | None = None) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}
