"""Define the HTTP application: its routes, and the checks before them."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import cache, partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from xgpt.core.errors import MachineError, nearest
from xgpt.pages import render_live
from xrunner.server.access.hosts import AllowedHosts
from xrunner.server.access.keys import ApiKeys, Classes
from xrunner.server.api.errors import ApiError, ErrorResponse
from xrunner.server.api.openapi import describe
from xrunner.server.api.text import ServedModel
from xrunner.server.engine_client import EngineClient
from xrunner.server.http.guard import Guard
from xrunner.server.http.service import Service
from xrunner.server.observe.pages import Pages
from xrunner.server.submission import Limits

if TYPE_CHECKING:
    from xrunner.server.observe.spans import Tracer


def create_app(
    engine: EngineClient,
    model: ServedModel,
    *,
    limits: Limits | None = None,
    keys: ApiKeys | None = None,
    classes: Classes | None = None,
    hosts: AllowedHosts | None = None,
    tracer: Tracer | None = None,
) -> Starlette:
    """Return the endpoint's app. The engine's client starts and stops together with the app."""
    service = Service(engine, model, limits or Limits())
    count = engine.metrics.note_answer
    guard = Middleware(Guard, keys=keys, classes=classes or Classes(None), hosts=hosts, tracer=tracer, on_answer=count)
    guards = [guard]
    if hosts is not None and hosts.origins:
        origins, methods = sorted(hosts.origins), ("GET", "POST")
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=("*",))
        guards.insert(0, cors)
    pages = Pages()
    routes = [
        *(Route(path, answer, methods=["POST"]) for path, answer in service.posts.items()),
        *_model_routes(engine, model, pages, has_keys=keys is not None),
        *_state_routes(engine),
        _page(pages, "/metrics", engine.metrics.read, "text/plain; version=0.0.4"),
        *_plan_routes(engine, model, pages),
    ]
    app = _app(routes, guards, partial(_lifespan, engine, keys, pages))
    app.state.engine = engine
    return app


def _app(routes: list[Route], guards: list[Middleware], lifespan: Any = None) -> Starlette:
    handlers = {ApiError: _refuse, HTTPException: _refuse, RecursionError: _refuse, ClientDisconnect: _say_nothing}
    app = Starlette(routes=routes, middleware=guards, exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.state.is_leaving = False
    return app


@asynccontextmanager
async def _lifespan(engine: EngineClient, keys: ApiKeys | None, pages: Pages, _: Starlette) -> AsyncIterator[None]:
    engine.start()
    if keys is not None and keys.path is not None:
        _reload_on_hangup(keys)
    sampling = asyncio.create_task(engine.live.run())
    try:
        yield
    finally:
        sampling.cancel()
        pages.close()
        await engine.stop()


def _reload_on_hangup(keys: ApiKeys) -> None:
    if threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, keys.reload)


MAX_PATH_SHOWN = 100
NOT_SERVED = {
    **dict.fromkeys(("/embeddings", "/score", "/rerank", "/pooling"), "this server only generates text"),
    "/ping": "use /health, or /ready",
}
"""Paths, without /v1, that other servers have. For each, the message for clients that use it."""


async def _refuse(http: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        says = str(error.detail)
        if error.status_code in (404, 405):
            says = _no_route(http, error)
        error = ApiError(error.status_code, says, headers=error.headers)
    if isinstance(error, RecursionError):  # encoding can run out of stack on a value that could just be decoded
        error = ApiError(400, "the body nests too deeply")
    assert isinstance(error, ApiError)
    return ErrorResponse(error)


def _no_route(http: Request, error: HTTPException) -> str:
    path = http.scope["path"][:MAX_PATH_SHOWN]
    says = f"there is no {http.method} {path}"
    if error.status_code == 405:
        return f"{says}: use {(error.headers or {}).get('Allow', 'POST').replace('HEAD, ', '').replace(', HEAD', '')}"
    if (reason := NOT_SERVED.get(path.removeprefix("/v1"))) is not None:
        return f"{says}: {reason}"
    known = [route.path for route in http.app.routes]
    near = f": did you mean /v1{path}?" if f"/v1{path}" in known else nearest(path, known)
    return f"{says}{near or '; /openapi.json lists all paths'}"


async def _say_nothing(_: Request, __: Exception) -> Response:
    return Response()  # the client disconnected in the middle of its request


def _route(path: str, value_of: Callable[[Request], Any], media_type: str = "application/json") -> Route:
    async def show(http: Request) -> Response:
        value = value_of(http)
        if isawaitable(value):
            value = await value
        content = value if isinstance(value, bytes) else msgspec.json.encode(value)
        return Response(content, media_type=media_type)

    return Route(path, show, methods=["GET"])


def _page(
    pages: Pages, path: str, read: Callable[[], Callable[[], Any]], media_type: str = "application/json"
) -> Route:
    async def show(_: Request) -> Response:
        return Response(await pages.get(path, read), media_type=media_type)

    return Route(path, show, methods=["GET"])


def _model_routes(engine: EngineClient, model: ServedModel, pages: Pages, *, has_keys: bool) -> Iterator[Route]:
    warning = engine.watch.plan.seeded_weights
    now_s, context = int(time.time()), model.spec.max_context
    card = {"object": "model", "created": now_s, "owned_by": "xgpt", "max_model_len": context}
    # Anthropic's clients read these members.
    card |= {"type": "model", "created_at": f"{datetime.fromtimestamp(now_s, UTC):%Y-%m-%dT%H:%M:%SZ}"}
    card |= {"lifecycle": "active", "max_input_tokens": context, "max_tokens": context}
    card |= {"warning": warning} if warning else {}
    cards = [{"id": name, "display_name": name} | card for name in model.names]
    page = {"object": "list", "data": cards, "has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    description = cache(partial(describe, model.names, model.spec, has_keys=has_keys))

    def retrieve(http: Request) -> dict[str, Any]:
        for found in cards:
            if found["id"] == http.path_params["name"]:
                return found
        raise ApiError(404, f"this model is not served here; ask for {model.name!r}", code="model_not_found")

    yield _page(pages, "/openapi.json", lambda: description)
    yield _route("/v1/models", lambda _: page)
    yield _route("/v1/models/{name:path}", retrieve)


def _state_routes(engine: EngineClient) -> Iterator[Route]:
    def health(_: Request) -> dict[str, str]:
        if engine.failure is not None:
            raise ApiError(503, engine.failure)
        return {"status": "ok"}

    def ready(http: Request) -> dict[str, str]:
        if http.app.state.is_leaving or engine.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if engine.is_restarting:
            raise ApiError(503, "the engine is being restarted; requests wait until it runs", code="restarting")
        if engine.remote.is_emptying:
            raise ApiError(503, "another plan is being deployed; requests wait until it runs", code="redeploying")
        return health(http)

    yield _route("/health", health)
    yield _route("/ready", ready)


def _plan_routes(engine: EngineClient, model: ServedModel, pages: Pages) -> Iterator[Route]:
    live, plan = engine.live, engine.watch.plan

    async def decision() -> dict[str, Any] | None:
        try:
            return await live.decision()
        except MachineError as error:
            raise ApiError(503, str(error), code="planning_failed") from None

    page = render_live(f"{model.name}: {plan.policy.kind}", plan.seeded_weights).encode()
    yield _page(pages, "/plan", live.plan)
    yield _page(pages, "/plan/history", live.history)
    yield _route("/plan/decision", lambda _: decision())
    yield _page(pages, "/live", live.now)
    yield _route("/", lambda _: page, "text/html; charset=utf-8")
