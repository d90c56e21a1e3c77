"""Define error responses, in OpenAI's format or Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from xgpt.core.errors import MAX_SHOWN, cut

MAX_MESSAGE = 400
"""Largest number of characters of an error's message. Only the beginning and the end of a longer message are sent."""
KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 504: "timeout_error"}
MAX_LOGGED = 200
"""Characters of an error's message in the log."""


def quoted(text: str) -> str:
    """Return a text in quotes for an error message: at most `MAX_SHOWN` characters, on one line."""
    return cut(repr(text[:MAX_SHOWN]))


class ApiError(Exception):
    """An error response: a status other than 200, with a message. `retry_after_s`: seconds after which a retry may
    succeed. None means that a retry will not succeed."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_SHOWN]} ... {message[-MAX_MESSAGE + MAX_SHOWN :]}"
        super().__init__(message)
        self.status = status
        self.param = param and cut(param)
        self.code = code
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(retry_after_s)

    def body(self) -> bytes:
        type_ = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": str(self), "type": type_, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def refuse(param: str, message: str, code: str | None = None) -> NoReturn:
    """Raise an error, with status 400, about a field of the body."""
    raise ApiError(400, f"{param}: {message}", param=param, code=code)


ANTHROPIC_PATH = "/v1/messages"
"""Prefix of paths whose errors are in Anthropic's format."""


def anthropic_error(error: ApiError) -> dict[str, str]:
    kinds = KINDS | {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    # Clients recognise a prompt that does not fit by these words, and shorten it.
    begin = "prompt is too long: " if error.code == "context_length_exceeded" else ""
    return {"type": kind, "message": f"{begin}{error}"}


class ErrorResponse(Response):
    """An error as an HTTP response, in the format of the API to which the request's path belongs."""

    def __init__(self, error: ApiError) -> None:
        super().__init__()  # routes copy headers and background tasks onto any response
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error, body = self._error, self._error.body()
        if "xgpt" in scope:
            scope["xgpt"].log["error"] = str(error)[:MAX_LOGGED]
        if scope["path"].startswith(ANTHROPIC_PATH):
            body = msgspec.json.encode({"type": "error", "error": anthropic_error(error)})
        answer = Response(body, status_code=error.status, headers=error.headers, media_type="application/json")
        await answer(scope, receive, send)
