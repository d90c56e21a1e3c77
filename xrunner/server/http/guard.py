"""Check request ids, host names and keys before every route, and write a log line for each request."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xrunner.server.access.hosts import ADMIN_PATHS, GENERATION_PATHS, OPEN_PATHS, AllowedHosts
from xrunner.server.access.keys import CLASS_HEADER, ApiKeys, Classes
from xrunner.server.api.errors import ApiError, ErrorResponse
from xrunner.server.request_info import RequestInfo

if TYPE_CHECKING:
    from xrunner.server.observe.spans import Tracer

logger = logging.getLogger("xrunner.server.access")

REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
"""Request ids that are accepted from clients. Other ids could forge lines of the log."""

SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
]
SINGLE_HEADERS = (
    *("host", "authorization", "x-api-key", "origin"),
    *("content-type", "x-class", "x-deadline-s", "x-request-id"),
)
"""Headers that must not occur twice: the server and a proxy in front of it might use different occurrences."""


class Guard:
    """An ASGI application that checks requests for another application, before any of the body is read.

    Args:
        keys: API keys. None means that clients need no key.
        hosts: accepted host names. None means all (in tests, and behind a proxy that checks names).
        on_answer: called with the status of each response, or 0 if the client had left."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys | None,
        classes: Classes,
        hosts: AllowedHosts | None,
        tracer: Tracer | None = None,
        on_answer: Callable[[int], None] = lambda status: None,
    ) -> None:
        self._app = app
        self._classes = classes
        self._keys = keys
        self._hosts = hosts
        self._tracer = tracer
        self._on_answer = on_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        id_ = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        info = RequestInfo(id_, time.perf_counter(), headers.get("x-deadline-s"), {})
        scope["xgpt"] = info
        own_headers = [(b"x-request-id", id_.encode()), *SECURITY_HEADERS]
        status = 0

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                nonlocal status
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *own_headers]}
            await send(message)

        try:
            refusal = _malformed(headers) or self._refusal(scope, headers, info) or self._classify(scope, headers, info)
            if refusal is None:
                await self._app(scope, receive, send_on)
            else:
                await ErrorResponse(refusal)(scope, receive, send_on)
        except Exception:
            # Whatever the error is, only this request fails.
            logger.exception("a request has failed", extra={"fields": {"request_id": id_, "path": scope["path"]}})
            if not status:
                await ErrorResponse(
                    ApiError(500, "the server has failed to handle this request; its log has the reason")
                )(scope, receive, send_on)
        finally:
            if self._tracer is not None and scope["path"] in GENERATION_PATHS:
                self._tracer.note(scope["method"], scope["path"], headers, status, info)
            self._on_answer(status)
            self._log(scope, status, info)

    def _refusal(self, scope: Scope, headers: Headers, info: RequestInfo) -> ApiError | None:
        path = scope["path"]
        if self._hosts is not None and path not in OPEN_PATHS:
            host = headers.get("host", "")
            if not self._hosts.accept(host):
                return ApiError(
                    HTTPStatus.MISDIRECTED_REQUEST,
                    "the Host header does not name this server; allow the name with --allowed-host",
                    code="host_not_allowed",
                )
            origin = headers.get("origin")
            if origin is not None and not self._hosts.accept_origin(origin, scope["scheme"], host):
                says = "pages of other sites may not use this server; allow this origin with --allowed-origin"
                return ApiError(403, says, code="origin_not_allowed")
        if self._keys is None or path in OPEN_PATHS:
            return None
        # Headers are latin-1, even if a client has sent other text.
        given = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"
        key = self._keys.find(given.encode("latin-1"))
        if key is None:
            return ApiError(
                401,
                "the request has no valid API key; send one as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": 'Basic realm="xgpt", charset="UTF-8"'},
            )
        info.key = key
        info.log["key"] = key.name
        if path in ADMIN_PATHS and not key.is_admin:
            return ApiError(403, f"{path} requires a key whose line in the key file says admin", code="admin_only")
        return None

    def _classify(self, scope: Scope, headers: Headers, info: RequestInfo) -> ApiError | None:
        if scope["path"] not in GENERATION_PATHS:
            return None
        try:
            info.key = self._classes.key_of(info.key, headers.get(CLASS_HEADER))
        except ApiError as error:
            return error
        if info.key.of_class:
            info.log["class"] = info.key.of_class
        return None

    def _log(self, scope: Scope, status: int, info: RequestInfo) -> None:
        level = logging.DEBUG if scope["path"] in OPEN_PATHS or scope["path"] == "/metrics" else logging.INFO
        if logger.isEnabledFor(level):
            client = scope.get("client")
            fields = {
                "request_id": info.id,
                "method": scope["method"],
                "path": scope["path"],
                # 0 means that the client disconnected before there was an answer.
                "status": status,
                "seconds": round(time.perf_counter() - info.received_s, 6),
                "client": client[0] if client else None,
                **info.log,
            }
            logger.log(level, "request", extra={"fields": fields})


def _malformed(headers: Headers) -> ApiError | None:
    """Return an error for headers that a proxy could interpret differently. The response closes the connection."""
    reason = None
    if "content-length" in headers and "transfer-encoding" in headers:
        reason = "a request must not have both Content-Length and Transfer-Encoding"
    elif repeated := next((name for name in SINGLE_HEADERS if len(headers.getlist(name)) > 1), None):
        reason = f"the header {repeated} came more than once"
    return None if reason is None else ApiError(400, reason, code="bad_http", headers={"connection": "close"})
