"""Answer one request: take tokens from the engine, decode them, and send text to the client."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from http import HTTPStatus

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from xrunner.generation import Logprobs, Token
from xrunner.server.api.choices import Choice
from xrunner.server.api.errors import ApiError, ErrorResponse
from xrunner.server.api.protocol import GenerationRequest
from xrunner.server.api.text import CONTEXT, ServedModel
from xrunner.server.api.writers import COMMENT, AnswerWriter, Delta, PromptTokens
from xrunner.server.engine_client import EngineClient, TokenStream
from xrunner.server.http.bodies import RequestMemory
from xrunner.server.observe.metrics import Metrics
from xrunner.server.request_info import ABORT, RequestInfo
from xrunner.server.submission import CheckedPrompt, EngineOutputs, Limits, Submitted

TOKENS_AT_ONCE = 64
"""Number of tokens to decode into text before other requests may continue."""


class Outputs(EngineOutputs):
    """A request's outputs. Their tokens are decoded into text for the client."""

    def __init__(
        self,
        engine: EngineClient,
        model: ServedModel,
        limits: Limits,
        request: GenerationRequest,
        prompts: list[CheckedPrompt],
        writer: AnswerWriter,
        info: RequestInfo,
    ) -> None:
        super().__init__(engine, model, limits, request, prompts, info)
        self._writer = writer
        self._codec = model.codec
        self._choices: dict[int, Choice] = {}
        self._unwritten: dict[int, TokenStream] = {}
        """Streams with tokens that were taken from the inbox but not written yet."""
        self._prompt_tokens: PromptTokens | None = None
        """The prompt tokens that have been counted. None means that they are not counted yet, or that a choice has
        begun since."""
        self.num_running = 0

    @property
    def choices(self) -> list[Choice]:
        return list(self._choices.values())

    def submit(self) -> list[Submitted]:
        submitted = super().submit()
        for prompt, sampling, stream in submitted:
            self._choices[stream.id] = Choice(
                len(self._choices),
                self._request,
                self._codec,
                self.stop_token_ids,
                self._writer,
                prompt.echo,
                prompt.tokens if sampling.prompt_logprobs is not None else (),
                prompt.tokens[-CONTEXT:] if self._request.goes_on else (),
            )
        self.num_running = len(self._choices)
        return submitted

    async def next(self) -> list[Delta]:
        """Wait for tokens, and return what they add to a choice, or [] if the choice has ended. Raises ApiError: no
        more tokens will come."""
        return await self.deltas(await self.inbox.get())

    async def deltas(self, tokens: Sequence[Token] | ApiError) -> list[Delta]:
        if isinstance(tokens, ApiError):
            raise tokens
        id_ = tokens[0].id
        choice = self._choices[id_]
        if choice.finish:
            return []
        self._unwritten[id_] = self.streams[id_]
        if choice.num_tokens == 0:
            self._prompt_tokens = None
            if tokens[0].logprobs is not None:
                await self._tell_prompt(choice, tokens[0].logprobs.prompt)
        deltas = []
        for start in range(0, len(tokens), TOKENS_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            deltas += [choice.push(token) for token in tokens[start : start + TOKENS_AT_ONCE]]
        if choice.finish:
            self.num_running -= 1
            if tokens[-1].finish is None:
                self._engine.cancel(self.streams[id_], finish_reason=choice.finish)
        return deltas

    async def _tell_prompt(self, choice: Choice, scores: Sequence[Logprobs]) -> None:
        for start in range(0, len(scores), TOKENS_AT_ONCE):
            choice.echo(scores[start : start + TOKENS_AT_ONCE])
            await asyncio.sleep(0)

    def settle(self, left: str) -> None:
        log = self._info.log
        self._prompt_tokens = None
        log["prompt_tokens"] = self._num_prompt_tokens
        log["cached_tokens"] = self.prompt_tokens().cached
        log["output_tokens"] = self._num_output_tokens
        log["finish_reasons"] = sorted({choice.finish or left for choice in self._choices.values()})
        self._info.phases = tuple(self._phases())
        if self._choices and not self.num_running:
            log |= {name: round(seconds, 6) for name, seconds in self.timings().items()}
        self._quota.settle(self._num_prompt_tokens + self._num_output_tokens if self._choices else 0)

    def prompt_tokens(self) -> PromptTokens:
        """Prompt tokens and cached tokens. Each prompt counts once, with the cached tokens of its first choice."""
        if self._prompt_tokens is None:
            streams = list(self.streams.values())
            cached = sum(stream.cached_tokens for stream in streams[:: self._request.num_choices])
            self._prompt_tokens = PromptTokens(self._num_prompt_tokens, cached)
        return self._prompt_tokens

    @property
    def _num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices.values())

    @property
    def last_token_s(self) -> float:
        """Time at which the step that sampled the last token ended."""
        return max(stream.last_token_s for stream in self.streams.values())

    def take_unwritten(self) -> float:
        """Return the end time of the step that sampled the oldest token not yet written, and forget it."""
        oldest_s = float("inf")
        for stream in self._unwritten.values():
            if stream.unwritten_s:
                oldest_s = min(oldest_s, stream.unwritten_s)
                stream.unwritten_s = 0.0
        self._unwritten.clear()
        return min(oldest_s, time.perf_counter())

    def _phases(self) -> Iterator[tuple[str, float, float]]:
        """Each lasts from its start in the first choice to its end in the last choice."""
        now_s = time.perf_counter()
        times = [(s.submitted_s, s.started_s, s.first_token_s, s.last_token_s) for s in self.streams.values()]
        edges = list(zip(*times, strict=True))  # 0 means that the event has not happened
        for name, begins, ends in zip(("waiting", "encoding", "decoding"), edges, edges[1:], strict=False):
            if begun := [begin for begin in begins if begin]:
                yield name, min(begun), max(end or now_s for end in ends)

    def timings(self) -> dict[str, float]:
        """Return the seconds from submission to each event, for the slowest choice. All choices have ended."""
        streams = self.streams.values()
        return {
            "queued_s": max(s.started_s - s.submitted_s for s in streams),
            "ttft_s": max(s.first_token_s - s.submitted_s for s in streams),
            "total_s": max(s.last_token_s - s.submitted_s for s in streams),
        }


LAST_WORDS_S = 1.0
"""Seconds in which a client can read that its answer has ended early."""
BYTES_AT_ONCE = 64 << 10
"""Number of bytes to write before other requests may continue."""
HEAD_S, COMMENT_S = 1.0, 15.0
"""Seconds without a token after which a stream's head is sent anyway, and seconds between later comments."""


class Answer(Response):
    """Submits a request's outputs when it is the request's turn, and removes them if the client disconnects."""

    def __init__(
        self, outputs: Outputs, writer: AnswerWriter, memory: RequestMemory, metrics: Metrics, *, stream: bool
    ) -> None:
        super().__init__()  # routes copy headers and background tasks onto any response
        self._outputs = outputs
        self._writer = writer
        self._memory = memory
        self._metrics = metrics
        self._write = self._events if stream else self._whole
        self._has_head = False
        """Whether the head of a stream was sent before its first token."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._run(scope, receive, send)
        finally:
            self._memory.free()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        outputs = self._outputs
        try:
            outputs.submit()
        except ApiError as error:
            outputs.settle("refused")
            await ErrorResponse(error)(scope, receive, send)
            return
        answer = asyncio.ensure_future(self._write(scope, receive, send))
        gone = asyncio.ensure_future(_disconnect(receive))
        left = "cancelled"
        try:
            await asyncio.wait((answer, gone), timeout=outputs.seconds_left, return_when=asyncio.FIRST_COMPLETED)
            if not (answer.done() or gone.done()):
                left = "timeout" if outputs.is_timeout else "deadline"
                await self._break_off(left, outputs.late("the answer was not complete"), answer, gone)
            if answer.done():
                answer.result()
        except asyncio.CancelledError:
            # The time for shutting down is over, so end the answer instead of breaking the connection.
            left = "shutdown"
            ended = ApiError(503, "the server is shutting down", code="shutting_down")
            await self._break_off(left, ended, answer, gone)
        finally:
            if not (answer.done() or gone.done()) and (abort := scope.get(ABORT)):
                abort()  # the client does not read the error, either
            answer.cancel()
            gone.cancel()
            outputs.take_out(left)
            outputs.settle(left)

    async def _break_off(self, left: str, error: ApiError, *ends: asyncio.Future[None]) -> None:
        self._outputs.take_out(left)
        self._outputs.inbox.put_nowait(error)
        await asyncio.wait(ends, timeout=LAST_WORDS_S, return_when=asyncio.FIRST_COMPLETED)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        outputs = self._outputs
        try:
            num_tokens = 0
            while outputs.num_running:
                num_tokens += len(await outputs.next())
                if num_tokens >= TOKENS_AT_ONCE:
                    num_tokens = 0
                    await asyncio.sleep(0)
        except ApiError as error:
            await ErrorResponse(error)(scope, receive, send)
            return
        sampled_s = outputs.last_token_s
        pieces: deque[bytes] = deque()
        for piece in self._writer.whole(outputs.choices, outputs.prompt_tokens(), outputs.timings()):
            pieces.append(piece)
            if len(piece) > BYTES_AT_ONCE:
                await asyncio.sleep(0)
        size = str(sum(map(len, pieces))).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", size)]
        await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": headers})
        while pieces:
            piece = pieces.popleft()
            while len(piece) < BYTES_AT_ONCE and pieces:
                piece += pieces.popleft()
            for start in range(0, len(piece), BYTES_AT_ONCE):
                await _send_body(send, piece[start : start + BYTES_AT_ONCE], more=True)
                await asyncio.sleep(0)
        await _send_body(send, b"", more=False)
        self._metrics.delivery_s.observe(time.perf_counter() - sampled_s)

    async def _events(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The headers are sent with the first token, so that a failure before it can still be answered with an error's
        status, or after `HEAD_S`, because proxies and clients close silent connections."""
        outputs = self._outputs
        first: Sequence[Token] | ApiError | None = await self._first(send)
        has_begun = self._has_head
        num_tokens = 0
        failure: ApiError | None = None
        while outputs.num_running and failure is None:
            # Tokens that arrived during the last write are written together, even if a failure follows.
            chunks: list[bytes] = []
            while not chunks or (outputs.num_running and not outputs.inbox.empty() and len(chunks) < TOKENS_AT_ONCE):
                try:
                    deltas = await outputs.next() if first is None else await outputs.deltas(first)
                except ApiError as error:
                    failure = error
                    break
                first = None
                prompt = outputs.prompt_tokens()
                for delta in deltas:
                    timings = None if outputs.num_running else outputs.timings()
                    num_tokens += delta.token is not None
                    chunks.append(self._writer.chunk(delta, timings, prompt, num_tokens))
            if not chunks:
                break
            if not outputs.num_running:
                chunks.append(self._writer.end(outputs.prompt_tokens(), num_tokens))
            sampled_s = outputs.take_unwritten()
            if not has_begun:
                has_begun = True
                await send(_EVENT_STREAM_HEAD)
            if (body := b"".join(chunks)) or not outputs.num_running:
                await _send_body(send, body, more=bool(outputs.num_running))
            if not outputs.inbox.empty():
                await asyncio.sleep(0)
            self._metrics.delivery_s.observe(time.perf_counter() - sampled_s)
        if failure is not None:
            if has_begun:
                await _send_body(send, self._writer.failure(failure), more=False)
            else:
                await ErrorResponse(failure)(scope, receive, send)

    async def _first(self, send: Send) -> Sequence[Token] | ApiError:
        getting = asyncio.ensure_future(self._outputs.inbox.get())
        try:
            while not getting.done():
                await asyncio.wait((getting,), timeout=COMMENT_S if self._has_head else HEAD_S)
                if getting.done():
                    break
                if self._has_head:
                    await _send_body(send, COMMENT, more=True)
                else:
                    self._has_head = True
                    await send(_EVENT_STREAM_HEAD)
            return getting.result()
        finally:
            getting.cancel()


_EVENT_STREAM_HEAD = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")],
}


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
