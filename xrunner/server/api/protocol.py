"""Define the bodies of /v1/completions and /v1/chat/completions: which fields are accepted, and how they may be
combined.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from sys import getsizeof
from typing import Annotated, Any, ClassVar, cast

import msgspec
from msgspec import Meta

from xrunner.generation import SamplingParams
from xrunner.grammar import ANY_OBJECT, choice_rule, json_rule, regex_rule
from xrunner.server.api.calls import Types, short_id, types_of
from xrunner.server.api.errors import quoted, refuse
from xrunner.server.api.form import OutputForm
from xrunner.server.api.reader import OutputReader
from xrunner.server.api.tools import MAX_TOOLS, AllowedTools, NamedTool, Tool, ToolCall, ToolChoice, must_call

MAX_LOGPROBS = 20
MAX_DEADLINE_S = 86400

Prompt = str | list[int]
Stop = Annotated[str, Meta(min_length=1, max_length=1000)]
MAX_INT = 2**31 - 1
"""Largest count or token id in a request: control messages and tensors hold 64 bits, and arrays of indices hold 32."""
MAX_DIGITS = len(str(MAX_INT))
Count = Annotated[int, Meta(ge=1, le=MAX_INT)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
MAX_BIASES = 1024
LEAST_TOP_P = 1e-9
"""The value used for a top_p of 0, with which only the most probable token remains."""
MAX_PARTS = 1 << 16
"""Largest number of messages, parts of their content, and calls in them, together."""
MAX_ARGUMENTS = 1 << 20
"""Largest number of characters of the JSON arguments of all calls in messages."""
TOKEN_BYTES, BIAS_BYTES = 40, 200
"""Bytes of memory of a token id in a list or tuple, and of an entry of `logit_bias`."""
BRACE_BYTES, BRACKET_BYTES, STRING_BYTES, ITEM_BYTES = 200, 64, 50, 16
"""Bytes of memory of an object, a list, a text and an item, in addition to their characters."""
FREE_OBJECT_BYTES = 192 << 10
"""Bytes of a request's objects that are not counted. They suffice for 20 to 30 kB of declared functions."""
Penalty = Annotated[float, Meta(ge=-2, le=2)]


def memory_of(*values: Any) -> int:
    """Return approximately how many bytes of memory decoded JSON takes, less `FREE_OBJECT_BYTES`."""
    num_bytes = -FREE_OBJECT_BYTES
    for written in (msgspec.json.encode(value) for value in values if value is not None):
        num_bytes += len(written) + BRACE_BYTES * written.count(b"{") + BRACKET_BYTES * written.count(b"[")
        num_bytes += STRING_BYTES * written.count(b'"') // 2 + ITEM_BYTES * written.count(b",")
    return max(0, num_bytes)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`continuous_usage_stats`: send the usage so far with every chunk, as vLLM does for load generators.

    `include_obfuscation`: ignored, since chunks are not padded as at OpenAI.
    """

    include_obfuscation: bool | None = None
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


HINTS = (
    *("user", "safety_identifier", "metadata", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    "prediction",
)
"""Fields that cannot change an answer. They are dropped immediately."""
COMMON_WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "skip_special_tokens": (True, "special tokens are never shown; leave it out")
}


class Sampled(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that requests in the format of every API have. Null means a field's default."""

    model: str
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    deadline_s: Annotated[float, Meta(gt=0, le=MAX_DEADLINE_S)] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    def common(self, form: type[Sampled]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in form.__struct_fields__}


class OpenAiFields(Sampled, forbid_unknown_fields=True, kw_only=True):
    """The fields that requests in each of OpenAI's formats have."""

    stream_options: StreamOptions | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None


class Abstract(msgspec.StructMeta, ABCMeta):
    """Lets a struct have abstract members."""


class GenerationRequest(OpenAiFields, forbid_unknown_fields=True, kw_only=True, metaclass=Abstract):
    """The fields of completions and chats."""

    PROMPT_FIELD: ClassVar[str]
    DEFAULT_OUTPUT: ClassVar[int | None] = None
    """Largest number of output tokens if the request names none. None means all that fit."""
    WITHOUT_EFFECT: ClassVar[dict[str, tuple[Any, str]]] = {}
    """Fields that are accepted only with a value that has no effect: for each, this value and the reason."""

    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    output_length: Count | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def goes_on(self) -> bool:
        return True

    @property
    def is_scored_only(self) -> bool:
        """Return whether the answer is only the prompt. The output's only token is then not shown."""
        return False

    @property
    def is_held(self) -> bool:
        """Return whether the output may have to follow a grammar."""
        return self.grammar is not None

    @property
    def may_fill_context(self) -> bool:
        """Return whether `max_tokens` may exceed the context, so that the output ends when the context is full."""
        return False

    @property
    def shown_tokens(self) -> frozenset[int]:
        return frozenset()

    def reader(self) -> OutputReader | None:
        return None

    def kept_of(self, tokens: list[int], max_context: int) -> list[int]:
        """Return the part of a prompt that `truncate_prompt_tokens` keeps."""
        most = self.truncate_prompt_tokens
        if most is None:
            return tokens
        if most == 0:
            refuse("truncate_prompt_tokens", "a prompt needs tokens; send -1 or a positive number")
        return tokens[-(max_context - 1 if most < 0 else most) :]

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def include_continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Number of most probable tokens to report with each output token."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        return None

    @property
    def named_output(self) -> int | None:
        return self.max_tokens

    def sampling(self, seed: int) -> SamplingParams:
        """Return the sampling parameters, with 64 bits of the seed."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(0, self.top_k or 0),
            top_p=1.0 if self.top_p is None else self.top_p or LEAST_TOP_P,
            min_p=self.min_p or 0.0,
            seed=seed % 2**64,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            logit_bias=self.biases,
            grammar=self.grammar,
        )

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """Return (token, number added to its logit) pairs. Raises ApiError: 400, a token is not a number."""
        given = self.logit_bias or {}
        for token in given:
            if not (token.isascii() and token.isdecimal() and len(token) <= MAX_DIGITS and int(token) <= MAX_INT):
                refuse("logit_bias", f"{quoted(token)} is not a token id")
        return tuple((int(token), bias) for token, bias in given.items())

    @property
    def grammar(self) -> str | None:
        return None

    @property
    @abstractmethod
    def num_text_bytes(self) -> int:
        """Return approximately the memory of the texts that `forget_text` forgets."""

    @property
    def num_kept_bytes(self) -> int:
        """Return approximately the bytes that remain in use after `forget_text`."""
        biases = BIAS_BYTES * len(self.logit_bias or ())
        return biases + sum(map(getsizeof, self.stops)) + getsizeof(self.grammar or "")

    @abstractmethod
    def forget_text(self) -> None:
        """Forget the texts from which prompts are made. This is called once prompts are token ids."""

    def fill(self, defaults: Mapping[str, float]) -> None:
        for field, value in defaults.items():
            if getattr(self, field) is None:
                setattr(self, field, value)

    def check(self) -> None:
        for field, (neutral, reason) in (COMMON_WITHOUT_EFFECT | self.WITHOUT_EFFECT).items():
            value = getattr(self, field)
            if value is not None and value != neutral:
                refuse(field, reason)
        for field in HINTS:
            if hasattr(self, field):
                setattr(self, field, None)
        if (self.min_tokens or 0) > 1 and not (self.ignore_eos and not self.stops and not self.stop_token_ids):
            if self.min_tokens != self.named_output:
                refuse("min_tokens", "it is supported only if it equals max_tokens, or with ignore_eos; leave it out")
            self.ignore_eos, self.stop, self.stop_token_ids = True, None, None
        if self.stream_options is not None and not self.stream:
            refuse("stream_options", "it applies only with stream: true; leave it out")
        if self.output_length is not None and (self.stops or self.stop_token_ids):
            refuse("output_length", "an output of fixed length cannot stop earlier; leave stop and stop_token_ids out")
        if self.is_held and (self.ignore_eos or self.output_length):
            refuse(
                "ignore_eos",
                "an output that follows a grammar ends where the grammar ends; leave ignore_eos and output_length out",
            )


class CompletionRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/completions."""

    PROMPT_FIELD = "prompt"
    DEFAULT_OUTPUT = 16
    """OpenAI's default."""
    WITHOUT_EFFECT: ClassVar[dict[str, tuple[Any, str]]] = {
        "best_of": (1, "it is not implemented; leave it out, or send n for several choices"),
        "suffix": (None, "this server does not insert text before a suffix; leave it out"),
    }

    prompt: str | list[int | str | list[int]]
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    """With 0 and `echo`, the answer is only the prompt, with log probabilities if `logprobs` is given."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Count | None = None
    echo: bool | None = None
    suffix: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def is_scored_only(self) -> bool:
        return self.max_tokens == 0

    @property
    def named_output(self) -> int | None:
        return None if self.max_tokens is None else max(1, self.max_tokens)

    def check(self) -> None:
        super().check()
        if self.is_scored_only and not self.echo:
            refuse("max_tokens", "0 is accepted only with echo: true; otherwise the answer would be empty")

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    @property
    def num_text_bytes(self) -> int:
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if prompts and isinstance(prompts[0], int):
            return TOKEN_BYTES * len(prompts)
        return sum(TOKEN_BYTES * len(p) if isinstance(p, list) else getsizeof(p) for p in prompts)

    def forget_text(self) -> None:
        self.prompt = ""

    def prompts(self, longest: int) -> list[Prompt]:
        """Return the prompts: strings or lists of token ids.

        Args:
            longest: largest number of items of a list. Longer lists are refused without examining their items.

        Raises:
            ApiError: 400, a prompt is empty or far too long, or both token ids and prompts are given.
        """
        given = self.prompt
        if len(given) > longest and not isinstance(given, str):
            refuse("prompt", f"the list has {len(given)} token ids or prompts; at most {longest} are accepted")
        kinds = set() if isinstance(given, str) else set(map(type, given))
        if int in kinds and len(kinds) > 1:
            refuse("prompt", "the list mixes token ids and texts; send one kind")
        is_one = isinstance(given, str) or int in kinds
        prompts = cast(list[Prompt], [given] if is_one else given)
        if not prompts or not all(prompts):
            refuse("prompt", "it is empty; send at least one character or token")
        return prompts


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

    Fields of earlier answers that models do not use (`annotations`, `audio`, `id`) are dropped.
    """

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
        shown = ("name", "tool_call_id")
        message |= {name: value for name in shown if (value := getattr(self, name)) is not None}
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
        refuse(
            "messages",
            f"{num_parts} messages, parts of content and calls are too many; at most {MAX_PARTS} are accepted",
        )
    arguments = sum(len(call.function.arguments) for one in messages for call in one.tool_calls or ())
    if arguments > MAX_ARGUMENTS:
        refuse(
            "messages",
            f"{arguments} characters of arguments in tool_calls are too many; at most {MAX_ARGUMENTS} are accepted",
        )


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
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            refuse(
                "max_tokens",
                f"max_completion_tokens is {self.max_completion_tokens}, which differs; send only one of the two",
            )

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


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /detokenize. It asks for the text of token ids."""

    model: str | None = None
    tokens: list[TokenId]

    @property
    def num_text_bytes(self) -> int:
        return TOKEN_BYTES * len(self.tokens)

    def check(self) -> None:
        """Do nothing, since there are no other fields to check."""
