"""Define the fields that requests have in common, and the bodies of /v1/completions and /detokenize."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Mapping
from sys import getsizeof
from typing import Annotated, Any, ClassVar, cast

import msgspec
from msgspec import Meta

from xrunner.generation import SamplingParams
from xrunner.server.api.errors import quoted, refuse
from xrunner.server.api.reader import OutputReader

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

    `include_obfuscation`: ignored, since chunks are not padded as at OpenAI."""

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
            ApiError: 400, a prompt is empty or far too long, or both token ids and prompts are given."""
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


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /detokenize. It asks for the text of token ids."""

    model: str | None = None
    tokens: list[TokenId]

    @property
    def num_text_bytes(self) -> int:
        return TOKEN_BYTES * len(self.tokens)

    def check(self) -> None:
        """Do nothing, since there are no other fields to check."""
