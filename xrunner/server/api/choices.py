"""Turn the tokens of one output into text, up to the output's end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from xrunner.generation import Logprobs, Token
from xrunner.server.api.calls import CallPiece
from xrunner.server.api.chat_request import ChatRequest
from xrunner.server.api.protocol import GenerationRequest
from xrunner.server.api.reader import Said
from xrunner.server.api.text import Detokenizer, StopStrings, TextCodec, token_bytes, token_text
from xrunner.server.api.tools import NamedTool, ToolCall


@dataclass(frozen=True, slots=True)
class TokenReport:
    """A token with its log probability, as text.

    Attributes:
        logprob: log probability, or None for the first token of a prompt.
        offset: length of the choice's text before the token.
        top: text, log probability and bytes of each of the most probable tokens.
        raw: the token's bytes, because a part of a character has no text."""

    text: str
    logprob: float | None
    offset: int
    top: list[tuple[str, float, bytes]]
    raw: bytes


@dataclass(slots=True)
class Delta:
    index: int
    text: str
    token: int | None
    """The token to report. None means that it is not shown."""
    finish: str | None
    logprobs: LogprobsJson | None = None
    is_first: bool = False
    calls: Sequence[CallPiece] = ()
    may_wait: bool = False
    """Whether the token may be sent with the next chunk if it adds no text to send."""
    reasoning: str = ""
    is_reasoning: bool = False
    stopped_at: str | None = None


class LogprobsJson:
    """The object `logprobs` of a choice, as JSON text. The text takes a tenth of the memory of the objects."""

    def __init__(self, write: Callable[[TokenReport], dict[str, Any]], rest: dict[str, Any]) -> None:
        self._write, self._rest = write, rest
        self._lists: dict[str, bytearray] = {}

    def add(self, report: TokenReport) -> None:
        for name, item in self._write(report).items():
            written = self._lists.setdefault(name, bytearray(b"["))
            if len(written) > 1:
                written += b","
            written += msgspec.json.encode(item)

    def items(self, name: str) -> bytes:
        return bytes(self._lists.get(name, b"[")[1:])

    def render(self) -> bytes:
        lists: dict[str, Any] = {name: msgspec.Raw(bytes(written) + b"]") for name, written in self._lists.items()}
        return msgspec.json.encode(lists | self._rest)


class Choice:
    """The state of one output of an answer.

    In a stream, nothing is kept. For a whole answer, text, tokens and log probabilities are kept in the form in which
    they will be written."""

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        codec: TextCodec | None,
        stop_token_ids: frozenset[int],
        new_logprobs: Callable[[], LogprobsJson],
        prefix: str = "",
        scored: Sequence[int] = (),
        context: Sequence[int] = (),
    ) -> None:
        """Begin an output of a prompt.

        Args:
            prefix: the prompt's text, if the answer begins with it.
            scored: the tokens of `prefix`, if they are also reported.
            context: the prompt's last tokens, if the output continues their text. The first output token may then begin
                with a space."""
        self.calls: list[ToolCall] = []
        self.num_reasoning = 0
        self.finish: str | None = None
        self.num_tokens = 0
        self.token_ids: list[int] = []
        self.logprobs: LogprobsJson | None = None
        self._index = index
        self._codec = codec
        self._stop_token_ids = stop_token_ids
        self._stops = StopStrings(request.stops, include=bool(request.include_stop_str_in_output))
        self.stopped_at: str | None = None
        self._reader = request.reader()
        self._is_named = isinstance(request, ChatRequest) and isinstance(request.chosen_tools, NamedTool)
        self._is_hidden = request.is_scored_only
        self._detokenizer = Detokenizer(codec, request.shown_tokens, context)
        self._prefix = prefix
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._num_chars = 0
        self._is_kept = not request.stream
        self._new_logprobs = new_logprobs
        if request.num_logprobs is not None:
            self.logprobs = new_logprobs()
        self._to_score = iter(scored)
        self._echoed = Detokenizer(codec)
        if scored:
            self._echo(None)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def echo(self, scores: Sequence[Logprobs]) -> None:
        for score in scores:
            self._echo(score)

    def _echo(self, score: Logprobs | None) -> None:
        assert self.logprobs is not None
        token = next(self._to_score)
        self.logprobs.add(self._report(token, score))
        self._num_chars += len(self._echoed.push(token))

    def push(self, token: Token) -> Delta:
        """Record a token, and return the text and calls that it adds. A stop token adds no text."""
        if self._is_hidden:
            self.finish = "length"
            self._texts.append(self._prefix)
            return Delta(self._index, self._prefix, None, self.finish, self.logprobs, is_first=True)
        self.num_tokens += 1
        is_first = self.num_tokens == 1
        if is_first:
            self._num_chars = len(self._prefix)
        logprobs = self.logprobs if token.logprobs is not None else None
        if logprobs is not None:
            logprobs.add(self._report(token.token, token.logprobs))
        delta = self._read(token)
        self._num_chars += len(delta.text)
        if is_first:
            delta.text = self._prefix + delta.text
        if self._is_kept:
            self.token_ids.append(token.token)
            self._texts.append(delta.text)
            self._reasoning.append(delta.reasoning)
        delta.is_first, delta.logprobs, delta.stopped_at = is_first, logprobs, self.stopped_at
        if logprobs is not None and not self._is_kept:
            self.logprobs = self._new_logprobs()
        return delta

    def _read(self, token: Token) -> Delta:
        piece = "" if token.token in self._stop_token_ids else self._detokenizer.push(token.token)
        if token.finish is not None:
            piece += self._detokenizer.flush()
        is_thinking = self._reader is not None and self._reader.is_thinking
        self.num_reasoning += is_thinking
        said = Said("", piece)
        if self._reader is not None:
            said = self._reader.push(piece, is_end=token.finish is not None)
        # Stop strings end the answer. They may occur in the reasoning.
        text, self.stopped_at = self._stops.push(said.text)
        self.finish = token.finish if self.stopped_at is None else "stop"
        if self.finish is not None and self.stopped_at is None:
            text += self._stops.flush()
        if self._reader is None:
            return Delta(self._index, text, token.token, self.finish)
        if self.finish is not None:
            self.calls = self._reader.found.calls()
        # If the client has named the function, the model did not choose it: the output ends with "stop", as at OpenAI.
        if self.calls and self.finish == "stop" and not self._is_named:
            self.finish = "tool_calls"
        pieces = self._reader.found.pieces()
        return Delta(
            self._index, text, token.token, self.finish, None, False, pieces, True, said.reasoning, is_thinking
        )

    def _report(self, token: int, score: Logprobs | None) -> TokenReport:
        codec = self._codec
        text, raw = token_text(codec, token), token_bytes(codec, token)
        if score is None:
            return TokenReport(text, None, self._num_chars, [], raw)
        top = [(token_text(codec, id_), value, token_bytes(codec, id_)) for id_, value in score.top]
        return TokenReport(text, score.chosen, self._num_chars, top, raw)
