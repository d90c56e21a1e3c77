"""Answer one request: take tokens from the engine, send text to the client, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from xrunner.generation import Logprobs, Token, of_choices
from xrunner.server.access.quota import Quota
from xrunner.server.api.allowance import Allowance
from xrunner.server.api.choices import Choice
from xrunner.server.api.errors import ApiError, error_response
from xrunner.server.api.model import ServedModel
from xrunner.server.api.parsing import parse_deadline
from xrunner.server.api.protocol import GenerationRequest
from xrunner.server.api.writers import Delta, PromptTokens, Writer
from xrunner.server.engine_client import EngineClient, Inbox, Promise, Stream, Submission
from xrunner.server.http.bodies import Memory
from xrunner.server.http.limits import Limits
from xrunner.server.observe.metrics import Bounds
from xrunner.server.request_info import ABORT, RequestInfo

LAST_WORDS_S = 1.0
"""Time in which a client may read that its answer has been broken off."""
TOKENS_AT_ONCE = 64
"""Tokens that are turned into text (and BYTES_AT_ONCE: bytes that are written) before other requests get a turn."""
BYTES_AT_ONCE = 64 << 10
HEAD_S, COMMENT_S = 1.0, 15.0
"""Time after which a stream's head goes out without a token, and between two comments after that."""


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """A prompt that the model accepts, and the bounds of its output's length."""

    tokens: tuple[int, ...]
    allowance: Allowance
    echo: str = ""
    """The prompt's text, if the answer is to begin with it; otherwise empty."""


class Answer(Response):
    """Submits a request's prompts, n times each, when it is its turn to be sent; takes them out of the engine when
    the client goes away."""

    def __init__(
        self,
        engine: EngineClient,
        model: ServedModel,
        limits: Limits,
        request: GenerationRequest,
        prompts: list[CheckedPrompt],
        writer: Writer,
        info: RequestInfo,
        memory: Memory,
    ) -> None:
        super().__init__()  # routes copy headers and background tasks onto any response
        self._engine = engine
        self._request = request
        self._prompts = prompts
        self._writer = writer
        self._codec = model.codec
        self._limits = limits
        self._info = info
        self._memory = memory
        self._quota = info.quota or Quota()
        self._seconds = parse_deadline(info.deadline_header, request.deadline_s)
        self._end_s = info.received_s + min(self._seconds or math.inf, limits.request_timeout_s or math.inf)
        self._num_prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
        self._streams: dict[int, Stream] = {}
        self._choices: dict[int, Choice] = {}
        self._num_running = 0
        self._has_head = False
        """Whether the head of a stream went out before its first token."""
        self._inbox: Inbox = asyncio.Queue()
        ends = frozenset(request.stop_token_ids or ())
        runs_on = request.ignore_eos or request.output_length is not None
        self._stop_token_ids = ends if runs_on else ends | model.eos_token_ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._run(scope, receive, send)
        finally:
            self._memory.free()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._submit()
        except ApiError as error:
            self._note("refused")
            self._quota.settle(0)
            await error_response(error)(scope, receive, send)
            return
        write = self._events if self._request.stream else self._whole
        answer = asyncio.ensure_future(write(scope, receive, send))
        gone = asyncio.ensure_future(_disconnect(receive))
        left = "cancelled"
        try:
            timeout_s = None if self._end_s == math.inf else self._end_s - time.perf_counter()
            await asyncio.wait((answer, gone), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not (answer.done() or gone.done()):
                left = "timeout" if self._is_timeout else "deadline"
                await self._break_off(left, self._late("the answer was not complete"), answer, gone)
            if answer.done():
                answer.result()
        except asyncio.CancelledError:
            # The server's time for shutting down is over: end the answer rather than break it off.
            left = "shutdown"
            ended = ApiError(503, "the server is shutting down", code="shutting_down")
            await self._break_off(left, ended, answer, gone)
        finally:
            if not (answer.done() or gone.done()) and (abort := scope.get(ABORT)):
                abort()  # the client does not even read the end
            answer.cancel()
            gone.cancel()
            self._take_out(left)
            self._note(left)
            self._quota.settle(self._num_prompt_tokens + self._num_output_tokens)

    async def _break_off(self, left: str, error: ApiError, *ends: asyncio.Future[None]) -> None:
        """Remove the outputs from the engine, and send the client the reason, if it reads."""
        self._take_out(left)
        self._inbox.put_nowait(error)
        await asyncio.wait(ends, timeout=LAST_WORDS_S, return_when=asyncio.FIRST_COMPLETED)

    def _take_out(self, left: str) -> None:
        for stream in self._streams.values():
            self._engine.cancel(stream, finish_reason=left)

    def _note(self, left: str) -> None:
        """Note what the log line of this answer says."""
        log = self._info.log
        log["prompt_tokens"] = self._num_prompt_tokens
        log["cached_tokens"] = self._prompt_tokens().cached
        log["output_tokens"] = self._num_output_tokens
        log["finish_reasons"] = sorted({choice.finish or left for choice in self._choices.values()})
        self._info.phases = tuple(self._phases())
        if self._choices and not self._num_running:
            log |= {name: round(seconds, 6) for name, seconds in self._timings().items()}

    def _submit(self) -> None:
        """Submit all choices to the engine, or none.

        Raises:
            ApiError: 429, too many are waiting, or the key has used up its tokens of this minute; 500, the engine has
                failed; 503, the server shuts down; 504, the deadline has passed.
        """
        if self._engine.failure is not None:
            raise ApiError(500, self._engine.failure)
        if self._engine.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if self._end_s <= time.perf_counter():
            raise self._late("it was not the request's turn")
        num_choices = self._request.num_choices
        promise = self._check_room(len(self._prompts) * num_choices)
        outputs = sum(prompt.allowance.promised_output or prompt.allowance.max_output for prompt in self._prompts)
        self._quota.reserve(self._num_prompt_tokens + num_choices * outputs)
        seed = secrets.randbits(64) if self._request.seed is None else self._request.seed
        key = self._info.key
        submission = Submission(
            inbox=self._inbox,
            account=key.account,
            bounds=Bounds(key.ttft_s, key.tpot_s, key.whole_s or key.answer_within_s),
            stop_token_ids=self._stop_token_ids,
            output_length=self._request.output_length,
            end_s=self._end_s,
            has_deadline=self._seconds is not None,
            read_s=self._info.read_s,
            promise=promise,
            # Log probabilities take far less memory as they are written than as they come.
            hold=not (self._request.stream or self._request.stops or self._request.num_logprobs is not None),
        )
        sampling = self._request.sampling(seed)  # once: a grammar is written for it
        choices = list(of_choices(sampling, seed, num_choices))
        for prompt in self._prompts:
            for sampling in choices:
                stream = self._engine.submit(prompt.tokens, prompt.allowance, sampling, submission)
                self._streams[stream.id] = stream
                scored = prompt.tokens if sampling.prompt_logprobs is not None else ()
                self._choices[stream.id] = Choice(
                    len(self._choices),
                    self._request,
                    self._codec,
                    self._stop_token_ids,
                    self._writer,
                    prompt.echo,
                    scored,
                )
        self._num_running = len(self._choices)

    @property
    def _is_timeout(self) -> bool:
        """Whether the server's own time limit has passed, rather than the client's deadline."""
        timeout_s = self._limits.request_timeout_s
        return timeout_s is not None and timeout_s < (self._seconds or math.inf)

    def _late(self, what: str) -> ApiError:
        if self._is_timeout:
            return ApiError(504, f"{what} within the {self._limits.request_timeout_s:g} s given here", code="timeout")
        return ApiError(504, f"{what} by its deadline", code="deadline_exceeded")

    def _prompt_tokens(self) -> PromptTokens:
        """Prompt and cached tokens; each prompt counts once, with the cached tokens of its first choice."""
        streams = list(self._streams.values())
        cached = sum(stream.cached_tokens for stream in streams[:: self._request.num_choices])
        return PromptTokens(self._num_prompt_tokens, cached)

    @property
    def _num_output_tokens(self) -> int:
        """Output tokens so far."""
        return sum(choice.num_tokens for choice in self._choices.values())

    def _check_room(self, num_outputs: int) -> Promise | None:
        """Return the time that is promised for these outputs; None: none is promised.

        Raises:
            ApiError: 429, too many are waiting, or these would be answered too late.
        """
        engine, limits = self._engine, self._limits
        account, within_s = self._info.key.account, self._info.key.answer_within_s or limits.answer_within_s
        promise = reason = None
        if not engine.has_room(account, num_outputs, limits.max_waiting):
            reason = f"{engine.num_waiting} requests wait already, {limits.max_waiting} may"
        elif within_s is not None and (expected_s := engine.answer_s(account, num_outputs)) is not None:
            promise = Promise(expected_s, within_s)
            if (answer_s := engine.caution * expected_s) > within_s:
                reason = f"the answer would take {answer_s:.2g} s, {within_s:g} s are promised"
        if reason is not None:
            retry_after_s = engine.retry_after_s()
            raise ApiError(429, f"{reason}; try again later", code="queue_full", retry_after_s=retry_after_s)
        return promise

    async def _next(self) -> list[Delta]:
        """Return what the next tokens add to a choice; nothing if it has ended.

        Raises:
            ApiError: no more tokens will come.
        """
        return await self._deltas(await self._inbox.get())

    async def _deltas(self, tokens: Sequence[Token] | ApiError) -> list[Delta]:
        """Return what tokens add to their choice. Raises ApiError."""
        if isinstance(tokens, ApiError):
            raise tokens
        id_ = tokens[0].id
        choice = self._choices[id_]
        if choice.finish:
            return []
        if tokens[0].logprobs is not None and choice.num_tokens == 0:
            await self._tell_prompt(choice, tokens[0].logprobs.prompt)
        deltas = []
        for start in range(0, len(tokens), TOKENS_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            deltas += [choice.push(token) for token in tokens[start : start + TOKENS_AT_ONCE]]
        if choice.finish:
            self._num_running -= 1
            if tokens[-1].finish is None:
                self._engine.cancel(self._streams[id_], finish_reason=choice.finish)
        return deltas

    async def _tell_prompt(self, choice: Choice, scores: Sequence[Logprobs]) -> None:
        """Give a choice the log probabilities of its prompt's tokens, a few at a time."""
        for start in range(0, len(scores), TOKENS_AT_ONCE):
            choice.echo(scores[start : start + TOKENS_AT_ONCE])
            await asyncio.sleep(0)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            num_tokens = 0
            while self._num_running:
                num_tokens += len(await self._next())
                if num_tokens >= TOKENS_AT_ONCE:
                    num_tokens = 0
                    await asyncio.sleep(0)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        sampled_s = max(stream.last_token_s for stream in self._streams.values())
        pieces: deque[bytes] = deque()
        for piece in self._writer.whole(list(self._choices.values()), self._prompt_tokens(), self._timings()):
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
        self._engine.metrics.delivery_s.observe(time.perf_counter() - sampled_s)

    async def _events(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events. The head goes out with the first token, so that an earlier failure gives an error's status.

        If that takes longer than `HEAD_S`, it goes out before: proxies and clients give a silent connection up.
        """
        first: Sequence[Token] | ApiError | None = await self._first(send)
        has_begun = self._has_head
        num_tokens = 0
        failure: ApiError | None = None
        while self._num_running and failure is None:
            # What has arrived meanwhile goes into one write, even if a failure follows it.
            chunks: list[bytes] = []
            while not chunks or (self._num_running and not self._inbox.empty() and len(chunks) < TOKENS_AT_ONCE):
                try:
                    deltas = await self._next() if first is None else await self._deltas(first)
                except ApiError as error:
                    failure = error
                    break
                first = None
                prompt = self._prompt_tokens()
                for delta in deltas:
                    timings = None if self._num_running else self._timings()
                    num_tokens += 1
                    chunks.append(self._writer.chunk(delta, timings, prompt, num_tokens))
            if not chunks:
                break
            if not self._num_running:
                chunks.append(self._writer.end(self._prompt_tokens(), num_tokens))
            sampled_s = self._take_unwritten()
            if not has_begun:
                has_begun = True
                await send(_EVENT_STREAM_HEAD)
            if (body := b"".join(chunks)) or not self._num_running:
                await _send_body(send, body, more=bool(self._num_running))
            if not self._inbox.empty():
                await asyncio.sleep(0)
            self._engine.metrics.delivery_s.observe(time.perf_counter() - sampled_s)
        if failure is not None:
            if has_begun:
                await _send_body(send, b"data: " + failure.body() + b"\n\n", more=False)
            else:
                await error_response(failure)(scope, receive, send)

    async def _first(self, send: Send) -> Sequence[Token] | ApiError:
        """Return the first tokens, or why there are none; if they take long, send the head, and then comments."""
        getting = asyncio.ensure_future(self._inbox.get())
        try:
            while not getting.done():
                await asyncio.wait((getting,), timeout=COMMENT_S if self._has_head else HEAD_S)
                if getting.done():
                    break
                if self._has_head:
                    await _send_body(send, b": waiting\n\n", more=True)
                else:
                    self._has_head = True
                    await send(_EVENT_STREAM_HEAD)
            return getting.result()
        finally:
            getting.cancel()

    def _take_unwritten(self) -> float:
        """Return and reset the end of the step that sampled the oldest token about to be written."""
        oldest_s = float("inf")
        for stream in self._streams.values():
            if stream.unwritten_s:
                oldest_s = min(oldest_s, stream.unwritten_s)
                stream.unwritten_s = 0.0
        return min(oldest_s, time.perf_counter())

    def _phases(self) -> Iterator[tuple[str, float, float]]:
        """Yield the phases (waiting, encoding, decoding): each from the first choice's start to the last one's end."""
        now_s = time.perf_counter()
        times = [(s.submitted_s, s.started_s, s.first_token_s, s.last_token_s) for s in self._streams.values()]
        edges = list(zip(*times, strict=True))  # 0: not yet
        for name, begins, ends in zip(("waiting", "encoding", "decoding"), edges, edges[1:], strict=False):
            if begun := [begin for begin in begins if begin]:
                yield name, min(begun), max(end or now_s for end in ends)

    def _timings(self) -> dict[str, float]:
        """Return the times of the slowest choice, once all have ended."""
        streams = self._streams.values()
        return {
            "queued_s": max(s.started_s - s.submitted_s for s in streams),
            "ttft_s": max(s.first_token_s - s.submitted_s for s in streams),
            "total_s": max(s.last_token_s - s.submitted_s for s in streams),
        }


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
