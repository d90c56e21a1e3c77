"""The HTTP side: routes, limits, and the server process."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import msgspec
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from xgpt.errors import MachineError
from xgpt.schema import ModelSpec
from xrunner.server.answer import Answer, Prompt, error_response
from xrunner.server.engine_thread import EngineThread
from xrunner.server.openapi import describe
from xrunner.server.protocol import (
    ApiError,
    GenerationRequest,
    check_tokens,
    parse_chat,
    parse_completion,
    refuse,
)
from xrunner.server.text import TextCodec
from xrunner.server.writers import ChatWriter, CompletionWriter

MAX_BODY_BYTES = 32 << 20
BODY_TIMEOUT_S = 60
"""How long a body may take to come in."""
MAX_WAITING = 4096
MAX_OUTPUTS = 1024
"""Prompts times choices of one request, at most."""
SHUTDOWN_GRACE_S = 10
"""How long running requests may go on after the first SIGTERM or SIGINT."""
KEEP_ALIVE_S = 60
"""Longer than clients keep idle connections, so that it is never the server who closes under a request."""


def create_app(
    engine_thread: EngineThread,
    *,
    model_name: str,
    spec: ModelSpec,
    tokenizer: TextCodec | None,
    eos_token_ids: Collection[int],
    plan_json: str,
    max_waiting: int = MAX_WAITING,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FastAPI:
    """The endpoint; the engine's thread runs from the app's startup to its shutdown.

    Args:
        model_name: what requests must ask for.
        tokenizer: None: prompts are token ids only, and answers carry no text.
        eos_token_ids: tokens that end an output.
        plan_json: what GET /plan answers.
        max_waiting: outputs that may wait for their first step; what comes beyond is answered with 429.
        max_body_bytes: longer bodies are answered with 413.
    """
    service = _Service(engine_thread, model_name, spec, tokenizer, frozenset(eos_token_ids), max_waiting)
    created = int(time.time())
    description = describe(model_name)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine_thread.start()
        try:
            yield
        finally:
            await engine_thread.stop()

    app = FastAPI(lifespan=lifespan, openapi_url=None, redirect_slashes=False)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        return error_response(ApiError(error.status_code, str(error.detail)))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return Response()  # nobody reads it; the client has left in the middle of its request

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await service.complete(await _body(request, max_body_bytes))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await service.chat(await _body(request, max_body_bytes))

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return _json(description)

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
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:
            # A second Ctrl-C does not wait for answers; the engine must still stop before its loop is closed.
            for task in self.server_state.tasks:
                task.cancel()
            await self.lifespan.shutdown()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"listening on http://{shown}:{port}", file=sys.stderr, flush=True)


async def _body(request: Request, max_bytes: int) -> bytes:
    """Raises ApiError (413, 408)."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > max_bytes:
                    raise ApiError(413, f"the body is longer than {max_bytes} bytes")
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S} s") from None
    return b"".join(parts)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


class _Service:
    """From a body to an answer: what every request needs to know."""

    def __init__(
        self,
        engine_thread: EngineThread,
        model_name: str,
        spec: ModelSpec,
        codec: TextCodec | None,
        eos_token_ids: frozenset[int],
        max_waiting: int,
    ) -> None:
        self._engine_thread = engine_thread
        self._model_name = model_name
        self._spec = spec
        self._codec = codec
        self._eos_token_ids = eos_token_ids
        self._max_waiting = max_waiting

    async def complete(self, body: bytes) -> Response:
        request = parse_completion(body)
        self._check(request)
        limit = min(MAX_OUTPUTS, self._max_waiting)
        prompts = request.prompts(max(limit, self._spec.max_context))
        if len(prompts) * request.num_choices > limit:
            refuse("prompt", f"{len(prompts)} prompts, {request.num_choices} choices each: {limit} are accepted")
        tokens = [await self._encode(prompt, "prompt") if isinstance(prompt, str) else prompt for prompt in prompts]
        return self._answer(request, tokens, CompletionWriter)

    async def chat(self, body: bytes) -> Response:
        request = parse_chat(body)
        self._check(request)
        if self._codec is None or self._codec.chat_template is None:
            raise ApiError(
                400, f"{self._model_name} has no chat template; use /v1/completions", code="no_chat_template"
            )
        render = self._codec.chat_template.render
        try:
            text = await asyncio.to_thread(
                render,
                [message.for_template() for message in request.messages],
                add_generation_prompt=request.add_generation_prompt is not False,
                variables=request.chat_template_kwargs,
            )
        except ValueError as error:
            refuse("messages", f"the chat template refuses them: {error}")
        return self._answer(request, [await self._encode(text, "messages", add_special_tokens=False)], ChatWriter)

    def _check(self, request: GenerationRequest) -> None:
        if request.model != self._model_name:
            raise ApiError(
                404,
                f"model: {request.model!r} is not served here; ask for {self._model_name!r}",
                param="model",
                code="model_not_found",
            )
        if request.stops and self._codec is None:
            refuse("stop", "this model has no tokenizer; send stop_token_ids")

    async def _encode(self, text: str, field: str, *, add_special_tokens: bool = True) -> list[int]:
        if self._codec is None:
            refuse(field, "this model has no tokenizer; send token ids")
        longest = self._spec.max_context * self._codec.longest_token
        if len(text) > longest:
            # Not worth the time and memory of taking it apart.
            refuse(
                field,
                f"{len(text)} characters are more than any {self._spec.max_context} tokens, the model's context, hold",
                "context_length_exceeded",
            )
        tokens = await asyncio.to_thread(self._codec.encode, text, add_special_tokens=add_special_tokens)
        return tokens or refuse(field, "it has no tokens")

    def _answer(
        self, request: GenerationRequest, prompts: list[list[int]], writer: type[CompletionWriter | ChatWriter]
    ) -> Answer:
        capacity = self._engine_thread.capacity
        return Answer(
            self._engine_thread,
            request,
            [Prompt(tuple(tokens), check_tokens(tokens, request, self._spec, capacity)) for tokens in prompts],
            writer(request.model, int(time.time()), include_usage=request.include_usage),
            self._codec,
            self._eos_token_ids,
            self._max_waiting,
        )
