"""Define what adapters for other APIs have in common."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn

import msgspec

from xrunner.server.api.calls import CallPiece
from xrunner.server.api.chat_request import ChatRequest, Parts, TextPart
from xrunner.server.api.choices import Choice, Delta, LogprobsJson
from xrunner.server.api.errors import ApiError
from xrunner.server.api.writers import AnswerWriter, PromptTokens, event_line

Kind = Literal["reasoning", "text", "call"]


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class Translated:
    """A request of another API.

    Attributes:
        names: the API's names for the chat's fields, for error messages."""

    chat: ChatRequest
    writer: BlockWriter
    names: Mapping[str, str]

    @property
    def num_text_bytes(self) -> int:
        return self.chat.num_text_bytes + self.writer.num_kept_bytes

    def refuse_as_named(self, error: ApiError) -> NoReturn:
        """Raise an error about a field of the chat as an error about the request's own field."""
        name = self.names.get(error.param or "", error.param)
        message = str(error)
        if error.param and message.startswith(f"{error.param}:"):
            message = f"{name}{message[len(error.param) :]}"
        renamed = ApiError(error.status, message, param=name, code=error.code, headers=error.headers)
        raise renamed from None


def parts_of(texts: Sequence[str]) -> str | Parts:
    """Return a message's content: a string for one text, parts for several."""
    return texts[0] if len(texts) == 1 else [TextPart(text) for text in texts]


class AnswerBlock(NamedTuple):
    """A part of an answer: reasoning, text, or a call with its name and id."""

    kind: Kind
    number: int
    id: str
    call: CallPiece | None = None


class BlockWriter(AnswerWriter):
    """Writes an answer with one choice as a sequence of blocks. Each block is opened, filled and closed."""

    def __init__(self) -> None:
        self._num_reasoning = 0
        self._num_blocks = 0
        self._block: AnswerBlock | None = None
        self._written: list[str] = []
        self._has_calls = False
        self._last: Delta | None = None
        self._has_begun = False
        self._is_cut = False
        """Whether the limit on tokens has ended the open block."""

    @abstractmethod
    def begin(self, prompt: PromptTokens) -> Iterator[bytes]:
        """Yield the events before the first block."""

    @abstractmethod
    def opened(self, block: AnswerBlock) -> Iterator[bytes]:
        """Yield the events that open a block."""

    @abstractmethod
    def added(self, block: AnswerBlock, text: str, logprobs: LogprobsJson | None) -> bytes:
        """Return the event of text that is added to a block."""

    @abstractmethod
    def closed(self, block: AnswerBlock, text: str) -> Iterator[bytes]:
        """Yield the events that close a block with this text."""

    @abstractmethod
    def ended(self, last: Delta, prompt: PromptTokens, num_tokens: int) -> Iterator[bytes]:
        """Yield the events after the last block."""

    @abstractmethod
    def answer(self, blocks: Sequence[tuple[AnswerBlock, str]], choice: Choice, prompt: PromptTokens) -> dict[str, Any]:
        """Return the answer to a request that does not stream. `blocks`: its blocks with their texts."""

    def chunk(self, delta: Delta, timings: dict[str, float] | None, prompt: PromptTokens, num_tokens: int) -> bytes:
        self._num_reasoning += delta.is_reasoning
        self._last = delta
        out: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            out += self.begin(prompt)
        for kind, number, text, call in _pieces(delta):
            block = self._block
            if block is None or (block.kind, block.number) != (kind, number):
                out += self._close()
                block = self._open(kind, number, call)
                out += self.opened(block)
            if text:
                self._written.append(text)
                out.append(self.added(block, text, delta.logprobs if kind == "text" else None))
        return b"".join(out)

    def end(self, prompt: PromptTokens, completion_tokens: int) -> bytes:
        assert self._last is not None
        out: list[bytes] = []
        if not self._num_blocks:
            out += self.opened(self._open("text", 0, None))
        self._is_cut = self._last.finish == "length"
        out += self._close()
        out += self.ended(self._last, prompt, completion_tokens)
        return b"".join(out)

    def whole(self, choices: Sequence[Choice], prompt: PromptTokens, timings: dict[str, float]) -> Iterator[bytes]:
        (choice,) = choices
        self._num_reasoning = choice.num_reasoning
        blocks = [(self._open("reasoning", 0, None), choice.reasoning)] if choice.reasoning else []
        if choice.text or not (blocks or choice.calls):
            blocks.append((self._open("text", 0, None), choice.text))
        for number, call in enumerate(choice.calls):
            piece = CallPiece(number, call.id, call.function.name, "")
            blocks.append((self._open("call", number, piece), call.function.arguments))
        yield msgspec.json.encode(self.answer(blocks, choice, prompt))

    def _open(self, kind: Kind, number: int, call: CallPiece | None) -> AnswerBlock:
        prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[kind]
        self._block = AnswerBlock(kind, number, new_id(prefix), call)
        self._written.clear()
        self._has_calls = self._has_calls or kind == "call"
        self._num_blocks += 1
        return self._block

    def _close(self) -> Iterator[bytes]:
        if self._block is not None:
            block, self._block = self._block, None
            yield from self.closed(block, "".join(self._written))


def _pieces(delta: Delta) -> Iterator[tuple[Kind, int, str, CallPiece | None]]:
    """Yield what a token adds to each block: the block's kind and number, the text and, for a call, its piece."""
    if delta.reasoning:
        yield "reasoning", 0, delta.reasoning, None
    if delta.text:
        yield "text", 0, delta.text, None
    for call in delta.calls:
        yield "call", call.number, call.arguments, call


def named_event(kind: str, **members: Any) -> bytes:
    return f"event: {kind}\n".encode() + event_line(msgspec.json.encode({"type": kind, **members}).decode())
