"""The HTTP side: routes, answers that stop when nobody listens any more, and the server process."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import msgspec
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer

from xgpt.errors import MachineError
from xgpt.schema import ModelSpec
from xrunner.engine import Token
from xrunner.server.engine_thread import EngineStopped, EngineThread, Stream
from xrunner.server.protocol import (
    ApiError,
    CompletionRequest,
    CompletionWriter,
    check_tokens,
    parse_request,
    prompts_of,
    refuse,
)
from xrunner.server.text import Detokenizer

MAX_BODY_BYTES = 32 << 20
SHUTDOWN_GRACE_S = 10
"""How long running requests may go on after the first SIGTERM or SIGINT."""
KEEP_ALIVE_S = 60
"""Longer than clients keep idle connections, so that it is never the server who closes under a request."""


def create_app(
    engine_thread: EngineThread,
    *,
    model_name: str,
    spec: ModelSpec,
    tokenizer: Tokenizer | None,
    eos_token_ids: Collection[int],
    plan_json: str,
) -> FastAPI:
    """The endpoint; the engine's thread runs from the app's startup to its shutdown.

    Args:
        model_name: what requests must ask for.
        tokenizer: None: prompts are token ids only, and answers carry no text.
        eos_token_ids: tokens that end an output.
        plan_json: what GET /plan answers.
    """
    service = _Service(engine_thread, model_name, spec, tokenizer, frozenset(eos_token_ids))
    created = int(time.time())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine_thread.start()
        try:
            yield
        finally:
            await engine_thread.stop()

    app = FastAPI(lifespan=lifespan, openapi_url=None)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return _error(error)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        return _error(ApiError(error.status_code, str(error.detail)))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return Response()  # nobody reads it; the client has left in the middle of its request

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await service.complete(await _body(request))

    @app.get("/v1/models")
    async def models() -> Response:
        model = {"id": model_name, "object": "model", "created": created, "owned_by": "xgpt"}
        return _json({"object": "list", "data": [model | {"max_model_len": spec.max_context}]})

    @app.get("/health")
    async def health() -> Response:
        if engine_thread.failure is not None:
            raise ApiError(503, engine_thread.failure)
        return _json({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(engine_thread.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.get("/plan")
    async def plan() -> Response:
        return Response(plan_json, media_type="application/json")

    return app


def serve(app: FastAPI, host: str, port: int) -> None:
    """Answer requests until SIGTERM, then return; SIGINT ends in KeyboardInterrupt. Port 0 takes a free one.

    Raises:
        MachineError: the address cannot be had.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
    )
    # uvicorn raises a signal again when it has shut down; SIGTERM must not end us before our caller cleans up.
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with _listen(host, port) as listener:
            _Server(config).run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, previous)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        raise MachineError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"listening on http://{shown}:{port}", file=sys.stderr, flush=True)


async def _body(request: Request) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    return b"".join(parts)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _error(error: ApiError) -> Response:
    return Response(error.body(), status_code=error.status, media_type="application/json")


class _Service:
    """What every completion needs to know."""

    def __init__(
        self,
        engine_thread: EngineThread,
        model_name: str,
        spec: ModelSpec,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.engine_thread = engine_thread
        self.model_name = model_name
        self.spec = spec
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids

    async def complete(self, body: bytes) -> Response:
        request = parse_request(body)
        if request.model != self.model_name:
            raise ApiError(
                404,
                f"model: {request.model!r} is not served here; ask for {self.model_name!r}",
                param="model",
                code="model_not_found",
            )
        prompts = [await self._encode(prompt) for prompt in prompts_of(request)]
        for prompt in prompts:
            check_tokens(prompt, request, self.spec)
            if not self.engine_thread.can_ever_fit(len(prompt), request.output_limit):
                refuse(
                    "max_tokens",
                    f"{len(prompt)} prompt tokens and max_tokens {request.output_limit} are more than this "
                    "server's K/V memory holds",
                )
        return _Completion(self, request, prompts)

    async def _encode(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            refuse("prompt", "this model has no tokenizer; send token ids")
        encoding = await asyncio.to_thread(self.tokenizer.encode, prompt)
        return encoding.ids or refuse("prompt", "it has no tokens")


class _Completion(Response):
    """The answer to one request, whole or as server-sent events. Takes its prompts out of the engine when the
    client goes away."""

    def __init__(self, service: _Service, request: CompletionRequest, prompts: list[list[int]]) -> None:
        super().__init__()  # routes copy headers and background tasks onto any response
        self._service = service
        self._request = request
        self._prompts = prompts
        self._num_prompt_tokens = sum(map(len, prompts))
        self._writer = CompletionWriter(f"cmpl-{uuid.uuid4().hex}", int(time.time()), request)
        self._streams: dict[int, Stream] = {}
        self._inbox: asyncio.Queue[Token | EngineStopped] = asyncio.Queue()
        self._stop_token_ids = (
            frozenset() if request.ignore_eos or request.output_length is not None else service.eos_token_ids
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write = self._events if self._request.stream else self._whole
        answer = asyncio.ensure_future(write(scope, receive, send))
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        except asyncio.CancelledError:
            # The server shuts down, and the grace it gave is over: end the answer rather than break it off.
            self._inbox.put_nowait(EngineStopped("the server is shutting down"))
            await answer
        finally:
            answer.cancel()
            gone.cancel()
            for stream in self._streams.values():
                self._service.engine_thread.cancel(stream)

    def _submit(self) -> None:
        """Raises EngineStopped."""
        for prompt in self._prompts:
            stream = self._service.engine_thread.submit(
                tuple(prompt),
                max_output=self._request.output_limit,
                stop_token_ids=self._stop_token_ids,
                output_length=self._request.output_length,
                inbox=self._inbox,
            )
            self._streams[stream.id] = stream

    async def _next(self) -> Token:
        """Raises EngineStopped."""
        item = await self._inbox.get()
        if isinstance(item, EngineStopped):
            raise item
        return item

    def _outputs(self) -> dict[int, _Output]:
        """One a prompt, in order, by the engine's id."""
        return {
            id_: _Output(index, Detokenizer(self._service.tokenizer), self._stop_token_ids)
            for index, id_ in enumerate(self._streams)
        }

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._submit()
            outputs = self._outputs()
            running = len(outputs)
            while running:
                token = await self._next()
                outputs[token.id].push(token)
                running -= token.finish is not None
        except EngineStopped as error:
            await _error(ApiError(500, str(error)))(scope, receive, send)
            return
        choices = [("".join(o.texts), o.token_ids, o.finish) for o in outputs.values()]
        body = self._writer.whole(choices, self._num_prompt_tokens, self._timings())
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _events(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The head is sent with the first token, so that an engine that fails before it is an honest 500."""
        has_begun = False
        try:
            self._submit()
            outputs = self._outputs()
            running = len(outputs)
            num_tokens = 0
            while running:
                token = await self._next()
                if not has_begun:
                    has_begun = True
                    await send(_EVENT_STREAM_HEAD)
                # All that has come meanwhile goes into one write.
                chunks: list[bytes] = []
                while True:
                    num_tokens += 1
                    running -= token.finish is not None
                    text = outputs[token.id].push(token)
                    timings = None if running else self._timings()
                    chunks.append(self._writer.chunk(outputs[token.id].index, text, token.token, token.finish, timings))
                    if self._inbox.empty():
                        break
                    token = await self._next()
                if not running:
                    chunks.append(self._writer.end(self._num_prompt_tokens, num_tokens))
                await _send_body(send, b"".join(chunks), more=bool(running))
        except EngineStopped as error:
            failure = ApiError(500, str(error))
            if has_begun:
                await _send_body(send, b"data: " + failure.body() + b"\n\n", more=False)
            else:
                await _error(failure)(scope, receive, send)

    def _timings(self) -> dict[str, float]:
        """Of the slowest prompt; all of them have ended."""
        streams = self._streams.values()
        return {
            "queued_s": max(s.started_s - s.submitted_s for s in streams),
            "ttft_s": max(s.first_token_s - s.submitted_s for s in streams),
            "total_s": max(s.last_token_s - s.submitted_s for s in streams),
        }


class _Output:
    """What has come of one prompt's output."""

    def __init__(self, index: int, detokenizer: Detokenizer, stop_token_ids: frozenset[int]) -> None:
        self.index = index
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.finish = ""
        self._detokenizer = detokenizer
        self._stop_token_ids = stop_token_ids

    def push(self, token: Token) -> str:
        """Account for a token; returns the text that it adds. A stop token is counted, but has no text."""
        self.token_ids.append(token.token)
        text = "" if token.token in self._stop_token_ids else self._detokenizer.push(token.token)
        if token.finish is not None:
            self.finish = token.finish
            text += self._detokenizer.flush()
        self.texts.append(text)
        return text


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
