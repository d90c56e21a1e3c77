"""One output of an answer: its tokens as text, up to where it ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from xrunner.generation import Logprobs, Token
from xrunner.server.api.call_reader import CallPiece, Calls
from xrunner.server.api.protocol import ChatRequest, GenerationRequest
from xrunner.server.api.text import Detokenizer, StopStrings, TextCodec, token_bytes, token_text
from xrunner.server.api.tools import NamedTool, ToolCall
from xrunner.server.api.writers import Delta, LogprobsJson, TokenReport, Writer


class Choice:
    """The state of one output of an answer.

    A stream keeps nothing; a whole answer keeps its text, tokens, and log probabilities as they will be written.
    """

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        codec: TextCodec | None,
        stop_token_ids: frozenset[int],
        writer: Writer,
        prefix: str = "",
        scored: Sequence[int] = (),
    ) -> None:
        """`prefix`: the text that the output's own follows; `scored`: its tokens, where they are reported, too."""
        self.calls: list[ToolCall] = []
        self.finish: str | None = None
        self.num_tokens = 0
        self.token_ids: list[int] = []
        self.logprobs: LogprobsJson | None = None
        self._index = index
        self._codec = codec
        self._stop_token_ids = stop_token_ids
        self._stops = StopStrings(request.stops, include=bool(request.include_stop_str_in_output))
        self._calls: Calls | None = None
        self._most_calls: int | None = None
        self._is_named = False
        shown: Collection[int] = ()
        if isinstance(request, ChatRequest) and request.chosen_tools != "none":
            most = 1 if request.parallel_tool_calls is False else None
            self._calls = Calls(request.chosen_tools, most, request.call_format)
            self._most_calls = most
            self._is_named = isinstance(request.chosen_tools, NamedTool)
            shown = frozenset(request.call_format.special.values())
        self._detokenizer = Detokenizer(codec, shown)
        self._prefix = prefix
        self._texts: list[str] = []
        self._num_chars = 0
        self._is_kept = not request.stream
        self._writer = writer
        if request.num_logprobs is not None:
            self.logprobs = LogprobsJson(writer)
        self._to_score = iter(scored)
        self._echoed = Detokenizer(codec)
        if scored:
            self._echo(None)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def echo(self, scores: Sequence[Logprobs]) -> None:
        """Report further tokens of the prompt, all but its first."""
        for score in scores:
            self._echo(score)

    def _echo(self, score: Logprobs | None) -> None:
        """Report the next token of the prompt; None: its first."""
        assert self.logprobs is not None
        token = next(self._to_score)
        self.logprobs.add(self._report(token, score))
        self._num_chars += len(self._echoed.push(token))

    def push(self, token: Token) -> Delta:
        """Account for a token. A stop token is counted, but has no text; a stop string ends the choice."""
        self.num_tokens += 1
        if self.num_tokens == 1:
            self._num_chars = len(self._prefix)
        told = self.logprobs if token.logprobs is not None else None
        if told is not None:
            told.add(self._report(token.token, token.logprobs))
        piece = "" if token.token in self._stop_token_ids else self._detokenizer.push(token.token)
        if token.finish is not None:
            piece += self._detokenizer.flush()
        text, is_stopped = self._stops.push(piece)
        self.finish = "stop" if is_stopped else token.finish
        if self.finish is not None and not is_stopped:
            text += self._stops.flush()
        pieces: list[CallPiece] = []
        if self._calls is not None:
            text = self._calls.push(text)
            if self.finish is not None:
                rest, calls = self._calls.end()
                text, self.calls = text + rest, calls[: self._most_calls]
            # A function that the client has named is no choice of the model's: it ends with "stop", as OpenAI's do.
            if self.calls and self.finish == "stop" and not self._is_named:
                self.finish = "tool_calls"
            pieces = self._calls.pieces()
        self._num_chars += len(text)
        if self.num_tokens == 1:
            text = self._prefix + text
        if self._is_kept:
            self.token_ids.append(token.token)
            self._texts.append(text)
        is_first = self.num_tokens == 1
        if told is not None and not self._is_kept:
            self.logprobs = LogprobsJson(self._writer)
        return Delta(self._index, text, token.token, self.finish, told, is_first, pieces, self._calls is not None)

    def _report(self, token: int, score: Logprobs | None) -> TokenReport:
        codec = self._codec
        text, raw = token_text(codec, token), token_bytes(codec, token)
        if score is None:
            return TokenReport(text, None, self._num_chars, [], raw)
        top = [(token_text(codec, id_), value, token_bytes(codec, id_)) for id_, value in score.top]
        return TokenReport(text, score.chosen, self._num_chars, top, raw)
