"""Write answers as OpenAI's objects: as a whole, or chunk by chunk."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import msgspec

from xrunner.server.api.calls import CallPiece
from xrunner.server.api.choices import Choice, Delta, LogprobsJson, TokenReport
from xrunner.server.api.errors import ApiError
from xrunner.server.api.protocol import GenerationRequest

COMMENT = b": waiting\n\n"


class PromptTokens(NamedTuple):
    """Number of tokens in a request's prompts, and how many of them had cached K/V from an earlier request."""

    total: int
    cached: int


class AnswerWriter(ABC):
    """Writes one answer in an API's format: as a whole, or as the events of a stream."""

    logprobs_rest: ClassVar[dict[str, Any]] = {}
    num_kept_bytes: int = 0
    """Memory of the parts of the request that the writer keeps."""
    times_scored: ClassVar[int] = 1
    """How many times an answer contains each log probability."""

    def new_logprobs(self) -> LogprobsJson:
        return LogprobsJson(self.logprobs, self.logprobs_rest)

    @abstractmethod
    def chunk(self, delta: Delta, timings: dict[str, float] | None, prompt: PromptTokens, num_tokens: int) -> bytes:
        """Return the bytes that report one token of one choice. `timings` are given with the answer's last token.
        `num_tokens` is the answer's number of tokens so far."""

    @abstractmethod
    def end(self, prompt: PromptTokens, completion_tokens: int) -> bytes:
        """Return the bytes that follow the last chunk of a stream."""

    @abstractmethod
    def whole(self, choices: Sequence[Choice], prompt: PromptTokens, timings: dict[str, float]) -> Iterator[bytes]:
        """Yield the answer to a request that does not stream, piece by piece."""

    @abstractmethod
    def logprobs(self, report: TokenReport) -> dict[str, Any]:
        """Return the item that a token adds to each list in a choice's member `logprobs`, by the list's name."""

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"


class Writer(AnswerWriter):
    """Writes completions and chats in OpenAI's format. Most bytes of a stream's chunks are the same in every chunk."""

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: str, created: int, *, include_usage: bool, continuous: bool = False) -> None:
        self._envelope = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "object": "", "created": created, "model": model}
        self._include_usage = include_usage
        self._continuous = continuous
        self._num_reasoning = 0
        self._silent: dict[int, list[int]] = {}
        """By choice: tokens that had no text to show. They are sent with the choice's next chunk."""
        head = msgspec.json.encode(self._envelope | {"object": self.chunk_object})[:-1].decode()
        self._head = f'{head},"choices":[{{"index":'
        self._tail = ',"usage":null' if include_usage else ""

    @classmethod
    def of(cls, request: GenerationRequest) -> Self:
        usage, continuous = request.include_usage, request.include_continuous_usage
        return cls(request.model, int(time.time()), include_usage=usage, continuous=continuous)

    @abstractmethod
    def piece(self, quoted: str, delta: Delta) -> str:
        """Return the member of a chunk's choice that contains the text. `quoted` is the text as JSON."""

    @abstractmethod
    def text(self, choice: Choice) -> dict[str, Any]:
        """Return the member of a whole choice with the choice's text and function calls."""

    def chunk(self, delta: Delta, timings: dict[str, float] | None, prompt: PromptTokens, num_tokens: int) -> bytes:
        self._num_reasoning += delta.is_reasoning
        shows = delta.text or delta.reasoning or delta.calls or delta.finish or delta.logprobs or delta.is_first
        if delta.may_wait and not shows:
            self._silent.setdefault(delta.index, []).extend(_tokens(delta))
            return b""
        if delta.calls and delta.finish:
            # Clients treat a call as complete when the finish reason comes, and do not read the other fields of that
            # chunk.
            last = replace(delta, text="", reasoning="", calls=(), logprobs=None, is_first=False)
            before = self._chunk(replace(delta, finish=None), None, prompt, num_tokens)
            return before + self._chunk(last, timings, prompt, num_tokens, tokens=())
        return self._chunk(delta, timings, prompt, num_tokens)

    def _chunk(
        self,
        delta: Delta,
        timings: dict[str, float] | None,
        prompt: PromptTokens,
        num_tokens: int,
        tokens: Sequence[int] | None = None,
    ) -> bytes:
        """Its tokens are `tokens` or, if that is None, the token of this delta and the tokens of earlier deltas that
        had no text to show."""
        if tokens is None:
            tokens = [*self._silent.pop(delta.index, ()), *_tokens(delta)]
        quoted = msgspec.json.encode(delta.text).decode() if delta.text else '""'
        logprobs = "null" if delta.logprobs is None else delta.logprobs.render().decode()
        reason = f'"{delta.finish}"' if delta.finish else "null"
        tail = self._tail
        if self._continuous:
            tail = f',"usage":{msgspec.json.encode(_usage(prompt, num_tokens, self._num_reasoning)).decode()}'
        extension = f',"xgpt":{msgspec.json.encode(timings).decode()}' if timings else ""
        return event_line(
            f'{self._head}{delta.index},{self.piece(quoted, delta)},"token_ids":[{",".join(map(str, tokens))}],'
            f'"logprobs":{logprobs},"finish_reason":{reason}}}]{tail}{extension}}}'
        )

    def end(self, prompt: PromptTokens, completion_tokens: int) -> bytes:
        if not self._include_usage:
            return b"data: [DONE]\n\n"
        usage = _usage(prompt, completion_tokens, self._num_reasoning)
        last = {"object": self.chunk_object, "choices": [], "usage": usage}
        return b"data: " + msgspec.json.encode(self._envelope | last) + b"\n\ndata: [DONE]\n\n"

    def whole(self, choices: Sequence[Choice], prompt: PromptTokens, timings: dict[str, float]) -> Iterator[bytes]:
        yield msgspec.json.encode(self._envelope | {"object": self.whole_object})[:-1] + b',"choices":['
        num_tokens = 0
        for index, choice in enumerate(choices):
            num_tokens += choice.num_tokens
            rendered = {
                "index": index,
                **self.text(choice),
                "token_ids": choice.token_ids,
                "logprobs": choice.logprobs and msgspec.Raw(choice.logprobs.render()),
                "finish_reason": choice.finish,
            }
            yield (b"," if index else b"") + msgspec.json.encode(rendered)
        usage = msgspec.json.encode(_usage(prompt, num_tokens, sum(choice.num_reasoning for choice in choices)))
        yield b'],"usage":' + usage + b',"xgpt":' + msgspec.json.encode(timings) + b"}"


class CompletionWriter(Writer):
    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def piece(self, quoted: str, delta: Delta) -> str:
        return f'"text":{quoted}'

    def text(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.text}

    def logprobs(self, report: TokenReport) -> dict[str, Any]:
        # Tokens with the same text (parts of characters) have one entry, with the highest log probability.
        top = {text: logprob for text, logprob, _ in reversed(report.top)}
        whole = None if report.logprob is None else top | {report.text: top.get(report.text, report.logprob)}
        item = {"tokens": report.text, "token_logprobs": report.logprob, "top_logprobs": whole}
        return item | {"text_offset": report.offset}


class ChatWriter(Writer):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    logprobs_rest: ClassVar[dict[str, Any]] = {"refusal": None}

    def piece(self, quoted: str, delta: Delta) -> str:
        members = ['"role":"assistant"'] if delta.is_first else []
        if delta.text or not (delta.calls or delta.may_wait) or (delta.is_first and not delta.calls):
            members.append(f'"content":{quoted}')
        if delta.reasoning:
            members.append(f'"reasoning_content":{msgspec.json.encode(delta.reasoning).decode()}')
        if delta.calls:
            members.append(f'"tool_calls":{msgspec.json.encode([*map(_call, delta.calls)]).decode()}')
        return f'"delta":{{{",".join(members)}}}'

    def text(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message |= {"content": choice.text or None, "tool_calls": choice.calls}
        return {"message": message}

    def logprobs(self, report: TokenReport) -> dict[str, Any]:
        return {"content": scored_token(report)}


def scored_token(report: TokenReport) -> dict[str, Any]:
    top = [_entry(*pair) for pair in report.top]
    assert report.logprob is not None, "of a chat's prompt nothing is reported"
    return _entry(report.text, report.logprob, report.raw) | {"top_logprobs": top}


def _call(piece: CallPiece) -> dict[str, Any]:
    function = {"arguments": piece.arguments}
    if piece.name is None:
        return {"index": piece.number, "function": function}
    return {"index": piece.number, "id": piece.id, "type": "function", "function": {"name": piece.name} | function}


_LINE_ENDS = str.maketrans({character: f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"})


def event_line(event: str) -> bytes:
    """Return an event with this JSON on one line, even for clients that end lines at Unicode's line separators."""
    return f"data: {event if event.isascii() else event.translate(_LINE_ENDS)}\n\n".encode()


def _entry(text: str, logprob: float, raw: bytes) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(raw)}


def _tokens(delta: Delta) -> Sequence[int]:
    return () if delta.token is None else (delta.token,)


def _usage(prompt: PromptTokens, completion_tokens: int, reasoning_tokens: int) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "prompt_tokens": prompt.total,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt.total + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": prompt.cached},
    }
    if reasoning_tokens:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return usage
