"""The bodies of /v1/completions: what is accepted, what answers, what errors look like.

Beside OpenAI's fields a request may carry:
    ignore_eos: run on to max_tokens, whatever tokens come.
    output_length: for benchmarks, end after exactly this many tokens; the schedule knows max_tokens only.
and an answer carries:
    token_ids: of each choice, its tokens (in a stream: of each chunk).
    xgpt: {queued_s, ttft_s, total_s}, the server's own times from taking the request in to the start of its
        first step, its first token and its last; of several prompts, those of the slowest. A stream brings it
        with the last token.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

import msgspec

from xgpt.schema import ModelSpec

DEFAULT_MAX_TOKENS = 16

Prompt = str | list[int]


class ApiError(Exception):
    """An answer other than 200, in OpenAI's shape."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> bytes:
        type_ = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": type_, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None


class CompletionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/completions; a field may be null for its default."""

    model: str
    prompt: str | list[int | str | list[int]]
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    output_length: int | None = None
    user: str | None = None
    # Accepted only at the value that changes nothing: see _WITHOUT_EFFECT.
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    stop: str | list[str] | None = None
    suffix: str | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def output_limit(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


_WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "temperature": (0, "only greedy decoding is implemented; send 0 or leave it out"),
    "top_p": (1, "only greedy decoding is implemented; send 1 or leave it out"),
    "n": (1, "one choice a prompt is implemented; send 1 or leave it out"),
    "best_of": (1, "one choice a prompt is implemented; send 1 or leave it out"),
    "echo": (False, "echo is not implemented; leave it out"),
    "logprobs": (None, "log probabilities are not implemented; leave it out"),
    "stop": ([], "stop sequences are not implemented; leave it out"),
    "suffix": (None, "insertion is not implemented; leave it out"),
    "seed": (None, "greedy decoding draws no random number; leave it out"),
    "presence_penalty": (0, "penalties are not implemented; send 0 or leave it out"),
    "frequency_penalty": (0, "penalties are not implemented; send 0 or leave it out"),
    "logit_bias": ({}, "logit biases are not implemented; leave it out"),
}

_FIELD = re.compile(r"`\$\.(\w+)|field `(\w+)`")
"""The field in a message of msgspec: "... - at `$.n`", "... unknown field `foo`"."""

_decoder = msgspec.json.Decoder(CompletionRequest)


def refuse(param: str, message: str, code: str | None = None) -> NoReturn:
    raise ApiError(400, f"{param}: {message}", param=param, code=code)


def parse_request(body: bytes) -> CompletionRequest:
    """The request in a body, with all that can be checked without the model's tokenizer or the pool.

    Raises:
        ApiError: 400.
    """
    try:
        request = _decoder.decode(body)
    except msgspec.ValidationError as error:
        match = _FIELD.search(str(error))
        raise ApiError(400, str(error), param=match and (match[1] or match[2])) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    for field, (neutral, reason) in _WITHOUT_EFFECT.items():
        value = getattr(request, field)
        if value is not None and value != neutral:
            refuse(field, reason)
    if request.output_limit < 1:
        refuse("max_tokens", f"{request.output_limit} is not accepted; send 1 or more")
    if request.stream_options is not None and not request.stream:
        refuse("stream_options", "only a stream has stream options")
    if request.output_length is not None and not 1 <= request.output_length <= request.output_limit:
        refuse("output_length", f"{request.output_length} is not within 1 and {request.output_limit} (max_tokens)")
    return request


def prompts_of(request: CompletionRequest) -> list[Prompt]:
    """A request's prompts: a string, token ids, or a list of either.

    Raises:
        ApiError: 400, a prompt is empty, or token ids stand beside prompts.
    """
    given = request.prompt
    prompts: list[Prompt] = []
    if isinstance(given, str):
        prompts = [given]
    elif given and all(isinstance(item, int) for item in given):
        prompts = [[item for item in given if isinstance(item, int)]]
    else:
        for item in given:
            if isinstance(item, int):
                refuse("prompt", "token ids and prompts are mixed in one list")
            prompts.append(item)
    if not prompts or not all(prompts):
        refuse("prompt", "it is empty")
    return prompts


def check_tokens(prompt: list[int], request: CompletionRequest, spec: ModelSpec) -> None:
    """Raises ApiError (400) where the vocabulary lacks a token, or the context is too short."""
    if not 0 <= min(prompt) <= max(prompt) < spec.vocab_size:
        outside = next(token for token in prompt if not 0 <= token < spec.vocab_size)
        refuse("prompt", f"token id {outside} is outside the vocabulary of {spec.vocab_size}")
    if len(prompt) + request.output_limit > spec.max_context:
        refuse(
            "prompt" if len(prompt) >= spec.max_context else "max_tokens",
            f"{len(prompt)} prompt tokens and max_tokens {request.output_limit} are more than the model's "
            f"context of {spec.max_context}",
            "context_length_exceeded",
        )


class CompletionWriter:
    """Renders one answer: as a whole, or chunk by chunk, in which case most of a chunk is the same bytes."""

    def __init__(self, id_: str, created: int, request: CompletionRequest) -> None:
        self._envelope = {
            "id": id_,
            "object": "text_completion",
            "created": created,
            "model": request.model,
        }
        self._include_usage = request.include_usage
        head = msgspec.json.encode(self._envelope)[:-1].decode()
        self._head = f'data: {head},"choices":[{{"index":'
        self._tail = ',"usage":null' if request.include_usage else ""

    def chunk(self, index: int, text: str, token: int, finish: str | None, timings: dict[str, float] | None) -> bytes:
        """One token of one choice; `timings` with the last token of the answer."""
        quoted = msgspec.json.encode(text).decode() if text else '""'
        reason = f'"{finish}"' if finish else "null"
        extension = f',"xgpt":{msgspec.json.encode(timings).decode()}' if timings else ""
        return (
            f'{self._head}{index},"text":{quoted},"token_ids":[{token}],"logprobs":null,'
            f'"finish_reason":{reason}}}]{self._tail}{extension}}}\n\n'
        ).encode()

    def end(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """What follows the last chunk of a stream."""
        if not self._include_usage:
            return b"data: [DONE]\n\n"
        last = self._envelope | {"choices": [], "usage": _usage(prompt_tokens, completion_tokens)}
        return b"data: " + msgspec.json.encode(last) + b"\n\ndata: [DONE]\n\n"

    def whole(
        self,
        choices: list[tuple[str, list[int], str]],
        prompt_tokens: int,
        timings: dict[str, float],
    ) -> bytes:
        """The answer of a request that is no stream; `choices` are (text, token ids, finish reason)."""
        rendered = [
            {"index": index, "text": text, "token_ids": ids, "logprobs": None, "finish_reason": finish}
            for index, (text, ids, finish) in enumerate(choices)
        ]
        completion_tokens = sum(len(ids) for _, ids, _ in choices)
        return msgspec.json.encode(
            self._envelope | {"choices": rendered, "usage": _usage(prompt_tokens, completion_tokens), "xgpt": timings}
        )


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
