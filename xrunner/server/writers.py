"""What answers look like: OpenAI's objects, whole or chunk by chunk.

Beside OpenAI's fields an answer carries:
    token_ids: of each choice, its tokens (in a stream: of each chunk).
    xgpt: {queued_s, ttft_s, total_s}, the server's own times from taking the request in to the start of its
        first step, its first token and its last; of several choices, those of the slowest. A stream brings it
        with the last token.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from xrunner.server.text import REPLACEMENT


@dataclass(frozen=True, slots=True)
class TokenReport:
    """A token with its log probability, as text.

    Attributes:
        offset: where the choice's text stood when it came.
        top: the most probable tokens.
    """

    text: str
    logprob: float
    offset: int
    top: list[tuple[str, float]]


@dataclass(slots=True)
class Delta:
    """What a token adds to a choice."""

    index: int
    text: str
    token: int
    finish: str | None
    report: TokenReport | None
    is_first: bool


@dataclass(slots=True)
class ChoiceResult:
    """A choice that has ended."""

    text: str
    token_ids: list[int]
    finish: str
    reports: list[TokenReport]


class Writer(ABC):
    """Renders one answer; most of a stream's chunk is the same bytes each time.

    Args:
        include_usage: a stream ends with its usage.
        continuous: each of its chunks brings what it is so far.
    """

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: str, created: int, *, include_usage: bool, continuous: bool = False) -> None:
        self._envelope = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "object": "", "created": created, "model": model}
        self._include_usage = include_usage
        self._continuous = continuous
        head = msgspec.json.encode(self._envelope | {"object": self.chunk_object})[:-1].decode()
        self._head = f'data: {head},"choices":[{{"index":'
        self._tail = ',"usage":null' if include_usage else ""

    @abstractmethod
    def piece(self, quoted: str, is_first: bool) -> str:
        """The member of a chunk's choice that holds its text; `quoted`: the text as JSON."""

    @abstractmethod
    def text(self, text: str) -> dict[str, Any]:
        """The member of a whole choice that holds its text."""

    @abstractmethod
    def logprobs(self, reports: list[TokenReport]) -> dict[str, Any]:
        """The member `logprobs` of a choice."""

    def chunk(self, delta: Delta, timings: dict[str, float] | None, prompt_tokens: int, num_tokens: int) -> bytes:
        """One token of one choice; `timings` with the last token of the answer, which has `num_tokens` so far."""
        quoted = msgspec.json.encode(delta.text).decode() if delta.text else '""'
        logprobs = "null" if delta.report is None else msgspec.json.encode(self.logprobs([delta.report])).decode()
        reason = f'"{delta.finish}"' if delta.finish else "null"
        tail = self._tail
        if self._continuous:
            tail = f',"usage":{msgspec.json.encode(_usage(prompt_tokens, num_tokens)).decode()}'
        extension = f',"xgpt":{msgspec.json.encode(timings).decode()}' if timings else ""
        return _event(
            f'{self._head}{delta.index},{self.piece(quoted, delta.is_first)},"token_ids":[{delta.token}],'
            f'"logprobs":{logprobs},"finish_reason":{reason}}}]{tail}{extension}}}\n\n'
        )

    def end(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """What follows the last chunk of a stream."""
        if not self._include_usage:
            return b"data: [DONE]\n\n"
        last = {"object": self.chunk_object, "choices": [], "usage": _usage(prompt_tokens, completion_tokens)}
        return b"data: " + msgspec.json.encode(self._envelope | last) + b"\n\ndata: [DONE]\n\n"

    def whole(self, choices: list[ChoiceResult], prompt_tokens: int, timings: dict[str, float]) -> bytes:
        """The answer of a request that is no stream."""
        rendered = [
            {
                "index": index,
                **self.text(choice.text),
                "token_ids": choice.token_ids,
                "logprobs": self.logprobs(choice.reports) if choice.reports else None,
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(choices)
        ]
        usage = _usage(prompt_tokens, sum(len(choice.token_ids) for choice in choices))
        body = {"object": self.whole_object, "choices": rendered, "usage": usage, "xgpt": timings}
        return msgspec.json.encode(self._envelope | body)


class CompletionWriter(Writer):
    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def piece(self, quoted: str, is_first: bool) -> str:
        return f'"text":{quoted}'

    def text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def logprobs(self, reports: list[TokenReport]) -> dict[str, Any]:
        return {
            "tokens": [report.text for report in reports],
            "token_logprobs": [report.logprob for report in reports],
            # Tokens that read the same (pieces of characters) share an entry: the most probable one's.
            "top_logprobs": [dict(reversed(report.top)) if report.top else None for report in reports],
            "text_offset": [report.offset for report in reports],
        }


class ChatWriter(Writer):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def piece(self, quoted: str, is_first: bool) -> str:
        role = '"role":"assistant",' if is_first else ""
        return f'"delta":{{{role}"content":{quoted}}}'

    def text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, reports: list[TokenReport]) -> dict[str, Any]:
        content = [
            _entry(report.text, report.logprob) | {"top_logprobs": [_entry(*pair) for pair in report.top]}
            for report in reports
        ]
        return {"content": content, "refusal": None}


_LINE_ENDS = str.maketrans({character: f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"})


def _event(event: str) -> bytes:
    """What is sent of an event of JSON: one line for whoever takes all that Unicode knows for ends of lines, too.

    httpx's `aiter_lines` does, and clients that read streams with it; JSON itself escapes the others.
    """
    return (event if event.isascii() else event.translate(_LINE_ENDS)).encode()


def _entry(text: str, logprob: float) -> dict[str, Any]:
    """A piece of a character has no text of its own, and what bytes it stands for is not told."""
    return {"token": text, "logprob": logprob, "bytes": None if REPLACEMENT in text else list(text.encode())}


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
