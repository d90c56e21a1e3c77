"""The HTTP side: every route, and what stands before them."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from xgpt.pages import render_live
from xgpt.schema import ModelSpec
from xrunner.server.access.hosts import AllowedHosts
from xrunner.server.access.keys import ApiKeys
from xrunner.server.api.errors import ApiError, error_response
from xrunner.server.api.openapi import describe
from xrunner.server.api.text import TextCodec
from xrunner.server.engine_thread import EngineThread
from xrunner.server.http.guard import Guard
from xrunner.server.http.limits import Limits
from xrunner.server.http.service import Service

if TYPE_CHECKING:
    from xrunner.server.observe.traces import Tracer


def _reload_on_hangup(keys: ApiKeys) -> None:
    """Read the key file again on SIGHUP, where the app has a process of its own."""
    if threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, keys.reload)


def create_app(
    engine_thread: EngineThread,
    *,
    model_name: str,
    spec: ModelSpec,
    tokenizer: TextCodec | None,
    eos_token_ids: Collection[int],
    limits: Limits | None = None,
    keys: ApiKeys | None = None,
    hosts: AllowedHosts | None = None,
    tracer: Tracer | None = None,
    sampling_defaults: Mapping[str, float] | None = None,
) -> Starlette:
    """The endpoint; the engine's thread runs from the app's startup to its shutdown.

    Args:
        model_name: what requests must ask for.
        tokenizer: None: prompts are token ids only, and answers carry no text.
        eos_token_ids: tokens that end an output.
        keys: None: nobody needs one.
        hosts: names under which this server may be asked for; None: any.
        tracer: what is told of requests that have ended; None: nothing.
        sampling_defaults: of fields that a request leaves out (`checkpoint.sampling_defaults`).
    """
    service = Service(
        engine_thread,
        model_name,
        spec,
        tokenizer,
        frozenset(eos_token_ids),
        limits or Limits(),
        sampling_defaults or {},
    )
    created = int(time.time())
    description = describe(model_name)
    live = engine_thread.live

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine_thread.start()
        if keys is not None and keys.path is not None:
            _reload_on_hangup(keys)
        sampling = None if live is None else asyncio.create_task(live.run())
        try:
            yield
        finally:
            if sampling is not None:
                sampling.cancel()
            await engine_thread.stop()

    app = Starlette(lifespan=lifespan)
    app.router.redirect_slashes = False
    app.state.engine_thread = engine_thread
    app.state.is_leaving = False
    app.add_middleware(Guard, keys=keys, hosts=hosts, tracer=tracer)

    async def refused(_: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            error = ApiError(error.status_code, str(error.detail), headers=error.headers)
        assert isinstance(error, ApiError)
        return error_response(error)

    async def gone(_: Request, __: Exception) -> Response:
        return Response()  # nobody reads it; the client has left in the middle of its request

    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_route("/v1/completions", service.complete, methods=["POST"])
    app.add_route("/v1/chat/completions", service.chat, methods=["POST"])

    def read(path: str, answer: Callable[[], Any], media_type: str = "application/json") -> None:
        """A route that only shows something, awaited if need be: bytes as they are, anything else as JSON."""

        async def show(_: Request) -> Response:
            value = answer()
            if isawaitable(value):
                value = await value
            content = value if isinstance(value, bytes) else msgspec.json.encode(value)
            return Response(content, media_type=media_type)

        app.add_route(path, show, methods=["GET"])

    warning = None if engine_thread.watch is None else engine_thread.watch.plan.seeded_weights
    model = {"id": model_name, "object": "model", "created": created, "owned_by": "xgpt"}
    model |= {"max_model_len": spec.max_context} | ({"warning": warning} if warning else {})
    models = {"object": "list", "data": [model]}

    def health() -> dict[str, str]:
        if engine_thread.failure is not None:
            raise ApiError(503, engine_thread.failure)
        return {"status": "ok"}

    def ready() -> dict[str, str]:
        if app.state.is_leaving or engine_thread.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if engine_thread.is_redeploying:
            raise ApiError(503, "another plan is being deployed; who comes now waits", code="redeploying")
        return health()

    read("/openapi.json", lambda: description)
    read("/v1/models", lambda: models)
    read("/health", health)
    read("/ready", ready)
    read("/metrics", engine_thread.metrics.render, "text/plain; version=0.0.4")
    if live is not None and engine_thread.watch is not None:
        read("/plan", live.plan)
        read("/plan/history", live.history)
        read("/live", live.now)
        page = render_live(f"{model_name}: {engine_thread.watch.plan.policy.kind}", warning).encode()
        read("/", lambda: page, "text/html; charset=utf-8")
    return app
