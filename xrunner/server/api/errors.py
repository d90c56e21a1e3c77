"""Answers with a status other than 200, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import msgspec
from starlette.responses import Response

from xgpt.core.errors import MAX_SHOWN, cut

MAX_MESSAGE = 400
"""Characters of an error's message; of a longer one the beginning and the end are sent."""


def quoted(text: str) -> str:
    """Return a text in quotes as an error shows it: at most `MAX_SHOWN` characters, on one line."""
    return cut(repr(text[:MAX_SHOWN]))


class ApiError(Exception):
    """An answer with a status other than 200, in OpenAI's format.

    Args:
        retry_after_s: seconds until trying again may help; None: it does not.
        headers: further headers of the answer.
    """

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
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 504: "timeout_error"}
        type_ = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": str(self), "type": type_, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def refuse(param: str, message: str, code: str | None = None) -> NoReturn:
    """Raise an error, with status 400, about a field of the body."""
    raise ApiError(400, f"{param}: {message}", param=param, code=code)


def error_response(error: ApiError) -> Response:
    """Return the error as an HTTP answer."""
    return Response(error.body(), status_code=error.status, headers=error.headers, media_type="application/json")
