"""Define the bodies of /v1/chat/completions and /tokenize."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from sys import getsizeof
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from xrunner.grammar import ANY_OBJECT, choice_rule, json_rule, regex_rule
from xrunner.server.api.calls import Types, short_id, types_of
from xrunner.server.api.errors import quoted, refuse
from xrunner.server.api.form import OutputForm
from xrunner.server.api.protocol import MAX_LOGPROBS, Count, GenerationRequest, memory_of
from xrunner.server.api.reader import OutputReader
from xrunner.server.api.tools import MAX_TOOLS, AllowedTools, NamedTool, Tool, ToolCall, ToolChoice, must_call

MAX_ARGUMENTS = 1 << 20
"""Largest number of characters of the JSON arguments of all calls in messages."""
MAX_PARTS = 1 << 16
"""Largest number of messages, parts of their content, and calls in them, together."""


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A piece of a message's content. Other fields (`cache_control`, ...) are hints that have no effect."""

    text: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal"):
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Parts = list[TextPart | RefusalPart]


class ChatMessage(msgspec.Struct):
    """A message. An assistant's message may have no content. A message with a function's result names the call.

    Fields of earlier answers that models do not use (`annotations`, `audio`, `id`) are dropped."""

    role: Annotated[str, Meta(min_length=1)]
    content: str | Parts | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def texts(self) -> Iterator[str]:
        yield self.role
        if self.content is not None:
            yield from [self.content] if isinstance(self.content, str) else (part.text for part in self.content)
        others = (self.name, self.tool_call_id, self.refusal, self.reasoning_content, self.reasoning)
        yield from (text for text in others if text is not None)
        for call in self.tool_calls or ():
            yield from (call.id, call.function.name, call.function.arguments)

    def for_template(self, *, short_ids: bool = False) -> dict[str, Any]:
        """Return the message in the form that templates expect. In this form, the arguments of calls are objects.
        `short_ids`: whether ids of calls must have nine letters or digits. Those of other servers are replaced."""
        parts = self.content or self.refusal or ""
        content = parts if isinstance(parts, str) else [{"type": "text", "text": part.text} for part in parts]
        message: dict[str, Any] = {"role": self.role, "content": content}
        message |= {name: value for name in ("name", "tool_call_id") if (value := getattr(self, name)) is not None}
        if reasoning := self.reasoning_content or self.reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if short_ids:
            for shown, name in ((message, "tool_call_id"), *((call, "id") for call in message.get("tool_calls", ()))):
                if name in shown:
                    shown[name] = short_id(shown[name])
        return message


def _check_parts(messages: Sequence[ChatMessage]) -> None:
    num_parts = len(messages)
    if num_parts <= MAX_PARTS:
        num_parts += sum(len(one.tool_calls or ()) for one in messages)
        num_parts += sum(len(one.content) for one in messages if isinstance(one.content, list))
    if num_parts > MAX_PARTS:
        counted = f"{num_parts} messages, parts of content and calls"
        refuse("messages", f"{counted} are too many; at most {MAX_PARTS} are accepted")
    arguments = sum(len(call.function.arguments) for one in messages for call in one.tool_calls or ())
    if arguments > MAX_ARGUMENTS:
        counted = f"{arguments} characters of arguments in tool_calls"
        refuse("messages", f"{counted} are too many; at most {MAX_ARGUMENTS} are accepted")


def check_continued(request: ChatRequest | TokenizeRequest) -> None:
    """Refuse to continue a message that is not the assistant's. Raises ApiError (400)."""
    is_last = request.messages is not None and request.messages[-1].role == "assistant"
    if request.continue_final_message and (request.add_generation_prompt or not is_last):
        reason = "it needs add_generation_prompt false and a last message of the assistant"
        refuse("continue_final_message", reason)


def reasoning_switch(*, is_on: bool) -> dict[str, bool]:
    """Return the variables by which templates switch reasoning on or off: Qwen's first, DeepSeek's second."""
    return {"enable_thinking": is_on, "thinking": is_on}


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON schema of an output. `strict` has no effect, since outputs always follow the schema."""

    name: str
    schema: dict[str, Any] = {}
    description: str | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Free text."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """A value of a JSON schema."""

    json_schema: JsonSchema


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's restrictions of an output: texts, a regular expression, or a JSON schema. One of them must be given."""

    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    regex: str | None = None
    json: dict[str, Any] | None = None
    json_object: bool | None = None

    @property
    def rule(self) -> str:
        given = [name for name in self.__struct_fields__ if getattr(self, name)]
        if len(given) != 1:
            refuse("structured_outputs", "send one of choice, regex, json and json_object")
        if self.choice is not None:
            return choice_rule(self.choice)
        return json_rule(self.json or ANY_OBJECT) if self.regex is None else regex_rule(self.regex)


class ChatRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True, dict=True):
    """The body of POST /v1/chat/completions."""

    PROMPT_FIELD = "messages"
    WITHOUT_EFFECT: ClassVar[dict[str, tuple[Any, str]]] = {
        "modalities": (["text"], "answers are text only; leave it out"),
        "audio": (None, "answers are text only; leave it out"),
        "web_search_options": (None, "this server does not search; leave it out"),
        "moderation": (None, "this server does not moderate; leave it out"),
        "functions": (None, "send tools in its place"),
        "function_call": (None, "send tool_choice in its place"),
    }

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    modalities: list[str] | None = None
    prediction: Any = None
    audio: Any = None
    web_search_options: Any = None
    moderation: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def named_output(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def schemas(self, field: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the JSON schemas in a field that the output must follow, each with its path."""
        if field == "tools":
            choice = self.chosen_tools
            functions = [tool.function for tool in (self.tools or ()) if choice != "none"]
            tools = [(i, each) for i, each in enumerate(functions) if each.strict or must_call(choice)]
            return [(f"[{i}].function.parameters", function.parameters or {}) for i, function in tools]
        if self.structured_outputs is not None:
            return [("json", self.structured_outputs.json or {})]
        if isinstance(self.response_format, JsonSchemaFormat):
            return [("json_schema.schema", self.response_format.json_schema.schema)]
        return []

    def check(self) -> None:
        self._allow_tools()
        super().check()
        _check_parts(self.messages)
        for number, message in enumerate(self.messages):
            if message.content is None and message.role != "assistant":
                refuse("messages", f"messages[{number}] has no content; only messages of the assistant may have none")
        self._check_tools()
        if self.structured_outputs is not None and not isinstance(self.response_format, TextFormat | None):
            refuse("structured_outputs", "response_format also restricts the output; send one of the two")
        check_continued(self)
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", "it needs logprobs: true; send that as well")
        other = self.max_completion_tokens
        if None not in (self.max_tokens, other) and self.max_tokens != other:
            refuse("max_tokens", f"max_completion_tokens is {other}, which differs; send only one of the two")

    @property
    def template_variables(self) -> dict[str, Any]:
        variables: dict[str, Any] = {}
        if (effort := self.reasoning_effort) is not None:
            variables = {"reasoning_effort": effort} | reasoning_switch(is_on=effort != "none")
        return variables | (self.chat_template_kwargs or {})

    @property
    def num_text_bytes(self) -> int:
        texts = sum(getsizeof(text) for message in self.messages for text in message.texts)
        return texts + memory_of(self.tools, self.chat_template_kwargs, self.response_format, self.structured_outputs)

    def forget_text(self) -> None:
        _ = self.grammar, self.chosen_tools, self.types  # these stay known
        self.messages, self.tools, self.chat_template_kwargs = [], None, None
        self.response_format = self.structured_outputs = None

    @property
    def goes_on(self) -> bool:
        return bool(self.continue_final_message)

    @cached_property
    def chosen_tools(self) -> ToolChoice:
        """Return which functions may or must be called. If none are declared, none may be called."""
        if not self.tools:
            return "none"
        return "auto" if self.tool_choice is None else self.tool_choice

    @cached_property
    def grammar(self) -> str | None:
        return self.form.grammar(self.tools or (), self.chosen_tools, self.answer_rule)

    @cached_property
    def types(self) -> dict[str, Types]:
        return types_of(self.tools or ())

    @property
    def answer_rule(self) -> str | None:
        if self.structured_outputs is not None:
            return self.structured_outputs.rule
        match self.response_format:
            case JsonObjectFormat():
                return json_rule(ANY_OBJECT)
            case JsonSchemaFormat(json_schema):
                return json_rule(json_schema.schema)
        return None

    @property
    def format_field(self) -> str | None:
        if self.structured_outputs is not None:
            return "structured_outputs"
        return None if isinstance(self.response_format, TextFormat | None) else "response_format"

    @property
    def is_held(self) -> bool:
        return bool(self.format_field) or self.chosen_tools != "none"

    @cached_property
    def may_fill_context(self) -> bool:
        return False

    @cached_property
    def form(self) -> OutputForm:
        """It is set once the prompt is known."""
        return OutputForm()

    @property
    def shown_tokens(self) -> frozenset[int]:
        return self.form.shown(self.chosen_tools)

    def reader(self) -> OutputReader | None:
        return self.form.reader(self.chosen_tools, 1 if self.parallel_tool_calls is False else None, self.types)

    def _allow_tools(self) -> None:
        choice = self.tool_choice
        if not isinstance(choice, AllowedTools):
            return
        allowed = {tool.function.name for tool in choice.allowed_tools.tools}
        if missing := allowed - {tool.function.name for tool in self.tools or ()}:
            refuse("tool_choice", f"there is no function {quoted(min(missing))} among tools; send its tool")
        self.tools = [tool for tool in self.tools or () if tool.function.name in allowed]
        self.tool_choice = choice.allowed_tools.mode

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            refuse("tools", "two functions have the same name; rename one")
        choice = self.tool_choice
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            refuse("tool_choice", f"there is no function {quoted(choice.function.name)} among tools; send its tool")
        if choice == "required" and not names:
            refuse("tool_choice", "required needs tools to call; send tools")


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /tokenize, in vLLM's format. It asks for the token ids of a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    return_token_strs: bool = False

    @property
    def num_text_bytes(self) -> int:
        texts = [self.prompt or "", *(text for message in self.messages or () for text in message.texts)]
        return sum(map(getsizeof, texts)) + memory_of(self.tools, self.chat_template_kwargs)

    def check(self) -> None:
        if self.messages is not None:
            _check_parts(self.messages)
            check_continued(self)
        if (self.prompt is None) == (self.messages is None):
            refuse("prompt", "send either prompt or messages, not both or neither")
