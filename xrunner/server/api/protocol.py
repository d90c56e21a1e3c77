"""The bodies of /v1/completions and /v1/chat/completions: what is accepted, what errors look like.

A chat without max_tokens may run on to the end of the context, or to --default-max-tokens. K/V memory is promised for
the plan's quantile of outputs; where an output outgrows that and others need the memory, it waits, and then goes on.

In addition to OpenAI's fields a request may carry:
    top_k, min_p: further cuts of the distribution.
    repetition_penalty: a factor on the logits of tokens that prompt or output hold, as vLLM has it.
    ignore_eos: run on to max_tokens, whatever tokens come.
    stop_token_ids: tokens that end an output.
    include_stop_str_in_output: leave the stop string in the text.
    output_length: for benchmarks, end after exactly this many tokens; the schedule knows max_tokens only.
    deadline_s: seconds after which the answer is of no use any more (or in the header X-Deadline-S; the shorter
        counts): what is not complete then ends with 504, deadline_exceeded.
    add_generation_prompt, chat_template_kwargs (chat): what the template is told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, NoReturn, cast

import msgspec
from msgspec import Meta

from xgpt.numbers import decimal
from xgpt.schema import ModelSpec
from xrunner.generation import SamplingParams
from xrunner.server.api.errors import ApiError

MAX_LOGPROBS = 20
MAX_DEADLINE_S = 86400
MAX_ITEMS = 1 << 18
"""Items of all lists in a body, about: prompt tokens mostly. Half a million would hold the event loop for 25 ms."""

Prompt = str | list[int]
Stop = Annotated[str, Meta(min_length=1, max_length=1000)]
MAX_INT = 2**31 - 1
"""No count and no token id of a request is larger: control messages and tensors hold 64 bits, arrays of indices 32."""
Count = Annotated[int, Meta(ge=1, le=MAX_INT)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class OutputRule(NamedTuple):
    """How long an output may be.

    Attributes:
        default: where its request names no maximum; None: a completion's is OpenAI's, a chat's fills the context.
        most: what a request may name; None: as much as the model's context holds.
        promised: tokens that K/V memory is set aside for where a request names no maximum; None: for all that may come.
        may_outgrow: whether an output may run on beyond that.
    """

    default: int | None = None
    most: int | None = None
    promised: int | None = None
    may_outgrow: bool = True


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`continuous_usage_stats`: usage so far with every chunk, as load generators ask for; vLLM's addition."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of request have in common; a field may be null for its default."""

    PROMPT_FIELD: ClassVar[str]
    DEFAULT_OUTPUT: ClassVar[int | None] = None
    """Output tokens where no maximum is named; None: all that fit."""
    WITHOUT_EFFECT: ClassVar[dict[str, tuple[Any, str]]]
    """Fields accepted only at the value that changes nothing, and why."""

    model: str
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    output_length: Count | None = None
    deadline_s: Annotated[float, Meta(gt=0, le=MAX_DEADLINE_S)] | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

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
    def num_logprobs(self) -> int | None:
        """Most probable tokens to report in addition to each chosen one; None: nothing."""
        raise NotImplementedError

    @property
    def named_output(self) -> int | None:
        """Output tokens at most, where the request names a maximum."""
        return self.max_tokens

    def sampling(self, seed: int) -> SamplingParams:
        """How tokens are chosen; of the seed, 64 bits count."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(0, self.top_k or 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            seed=seed % 2**64,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logprobs=self.num_logprobs,
        )

    def fill(self, defaults: Mapping[str, float]) -> None:
        """Give fields that are left out, or null, the checkpoint's defaults."""
        for field, value in defaults.items():
            if getattr(self, field) is None:
                setattr(self, field, value)

    def check(self) -> None:
        """What fields say together. Raises ApiError (400)."""
        for field, (neutral, reason) in self.WITHOUT_EFFECT.items():
            value = getattr(self, field)
            if value is not None and value != neutral:
                refuse(field, reason)
        if self.stream_options is not None and not self.stream:
            refuse("stream_options", "only a stream has stream options")
        if self.output_length is not None and (self.stops or self.stop_token_ids):
            refuse("output_length", "an output of fixed length cannot stop earlier; leave stop and stop_token_ids out")


class CompletionRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/completions."""

    PROMPT_FIELD = "prompt"
    DEFAULT_OUTPUT = 16
    """As OpenAI has it."""
    WITHOUT_EFFECT: ClassVar[dict[str, tuple[Any, str]]] = {
        "best_of": (1, "it is not implemented; leave it out, or send n for several choices"),
        "echo": (False, "it is not implemented; leave it out"),
        "suffix": (None, "insertion is not implemented; leave it out"),
        "logit_bias": ({}, "logit biases are not implemented; leave it out"),
    }

    prompt: str | list[int | str | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Count | None = None
    echo: bool | None = None
    suffix: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self, longest: int) -> list[Prompt]:
        """A string, token ids, or a list of either.

        Args:
            longest: items of a list, of whichever kind, at most: millions are not worth a look at each.

        Raises:
            ApiError: 400, a prompt is empty or far too long, or both token ids and prompts are given.
        """
        given = self.prompt
        if len(given) > longest and not isinstance(given, str):
            refuse("prompt", f"{len(given)} token ids or prompts in one list; at most {longest} are accepted")
        kinds = set() if isinstance(given, str) else set(map(type, given))
        if int in kinds and len(kinds) > 1:
            refuse("prompt", "token ids and prompts are mixed in one list")
        is_one = isinstance(given, str) or int in kinds
        prompts = cast(list[Prompt], [given] if is_one else given)
        if not prompts or not all(prompts):
            refuse("prompt", "it is empty")
        return prompts


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A piece of a message's content."""

    text: str


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Annotated[str, Meta(min_length=1)]
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message = {"role": self.role, "content": content}
        return message if self.name is None else message | {"name": self.name}


class ChatRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    PROMPT_FIELD = "messages"
    WITHOUT_EFFECT: ClassVar[dict[str, tuple[Any, str]]] = {
        "tools": ([], "tools are not implemented; leave it out"),
        "tool_choice": ("none", "tools are not implemented; leave it out"),
        "response_format": ({"type": "text"}, "only plain text is implemented; leave it out"),
        "logit_bias": ({}, "logit biases are not implemented; leave it out"),
    }

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def named_output(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", "send logprobs: true with it")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            refuse("max_tokens", f"max_completion_tokens {self.max_completion_tokens} says otherwise; send one of them")


_FIELDS = re.compile(r"`\$\.(\w+)"), re.compile(r"field `(\w+)`")
"""The field in a message of msgspec: "... - at `$.n`", else "... unknown field `foo`"."""

_decode_completion = msgspec.json.Decoder(CompletionRequest).decode
_decode_chat = msgspec.json.Decoder(ChatRequest).decode


def refuse(param: str, message: str, code: str | None = None) -> NoReturn:
    raise ApiError(400, f"{param}: {message}", param=param, code=code)


def parse_completion(body: bytes | bytearray) -> CompletionRequest:
    """The request in a body, with all that can be checked without the model. Raises ApiError (400)."""
    return _parse(body, _decode_completion)


def parse_chat(body: bytes | bytearray) -> ChatRequest:
    """The request in a body, with all that can be checked without the model. Raises ApiError (400)."""
    return _parse(body, _decode_chat)


def parse_deadline(header: str | None, field_s: float | None) -> float | None:
    """Seconds that an answer may take, from the header X-Deadline-S and the field. Raises ApiError (400)."""
    if header is None:
        return field_s
    try:
        header_s = decimal(header)
    except ValueError:
        header_s = -1.0
    if not 0 < header_s <= MAX_DEADLINE_S:
        refuse("X-Deadline-S", f"the header must be seconds, above 0 and at most {MAX_DEADLINE_S}")
    return header_s if field_s is None else min(header_s, field_s)


def _parse(body: bytes | bytearray, decode: Any) -> Any:
    # Counting commas takes a hundredth of the time of decoding; text has some, too, but hardly one in 16 characters.
    if body.count(b",") > MAX_ITEMS + len(body) // 16:
        raise ApiError(413, f"the body holds more than {MAX_ITEMS} items; send fewer prompts at once")
    try:
        request = decode(body)
    except msgspec.ValidationError as error:
        found = (pattern.search(str(error)) for pattern in _FIELDS)
        raise ApiError(400, str(error), param=next((match[1] for match in found if match), None)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    request.check()
    return request


class Allowance(NamedTuple):
    """Output tokens of a prompt: at most, and those that K/V memory is set aside for; None: for all."""

    max_output: int
    promised_output: int | None = None


def check_tokens(
    prompt: list[int], request: GenerationRequest, spec: ModelSpec, capacity: int, rule: OutputRule
) -> Allowance:
    """How many tokens the output of a prompt may have.

    Args:
        capacity: tokens that the K/V memory holds.

    Raises:
        ApiError: 400, the vocabulary lacks a token, or the context or the memory is too small.
    """
    field = request.PROMPT_FIELD
    room = spec.max_context - len(prompt)
    allowance = _allowance(request, rule, max(1, min(room, capacity - len(prompt))))
    limit = allowance.max_output
    if limit > room:
        refuse(
            field if room < 1 else "max_tokens",
            f"{len(prompt)} prompt tokens and max_tokens {limit} are more than the model's context of "
            f"{spec.max_context}",
            "context_length_exceeded",
        )
    if len(prompt) + limit > capacity:
        refuse(
            "max_tokens",
            f"{len(prompt)} prompt tokens and max_tokens {limit} are more than this server's K/V memory holds",
        )
    for name, tokens in ((field, prompt), ("stop_token_ids", request.stop_token_ids or [0])):
        if not 0 <= min(tokens) <= max(tokens) < spec.vocab_size:
            outside = next(token for token in tokens if not 0 <= token < spec.vocab_size)
            refuse(name, f"token id {outside} is outside the vocabulary of {spec.vocab_size}")
    if request.output_length is not None and request.output_length > limit:
        refuse("output_length", f"{request.output_length} is more than max_tokens {limit}")
    return allowance


def _allowance(request: GenerationRequest, rule: OutputRule, room: int) -> Allowance:
    """`room`: output tokens that would fit."""
    if (named := request.named_output) is not None:
        if rule.most is not None and named > rule.most:
            refuse("max_tokens", f"{named} is more than the {rule.most} that this server gives; ask for fewer")
        return Allowance(named)
    if rule.default is None and request.DEFAULT_OUTPUT is not None:
        return Allowance(min(request.DEFAULT_OUTPUT, rule.most or room))
    limit = min(rule.default or room, rule.most or room, room)
    if rule.promised is None or rule.promised >= limit:
        return Allowance(limit)
    return Allowance(limit, rule.promised) if rule.may_outgrow else Allowance(rule.promised)
