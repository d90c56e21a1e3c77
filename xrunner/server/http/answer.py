"""Answer one request: send the text of its outputs to the client."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from http import HTTPStatus

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from xrunner.generation import Token
from xrunner.server.api.errors import ApiError, ErrorResponse
from xrunner.server.api.writers import COMMENT, AnswerWriter
from xrunner.server.http.bodies import RequestMemory
from xrunner.server.http.outputs import TOKENS_AT_ONCE, Outputs
from xrunner.server.observe.metrics import Metrics
from xrunner.server.request_info import ABORT

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
