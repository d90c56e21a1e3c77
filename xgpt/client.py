"""The load client: send requests to a completions endpoint, and record when each token arrives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from xgpt.connection import Connection, Failure, own_api_key, within
from xgpt.core.errors import InputError, MachineError, reason_of
from xgpt.core.schema.report import TokensFrom
from xgpt.metrics_pages import read_samples

OK = 200
ANSWER_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request to send.

    Attributes:
        output_length: exact number of output tokens. None means that the model or `max_tokens` ends the output.
    """

    prompt_ids: Sequence[int]
    output_length: int | None
    max_tokens: int
    send_at_s: float | None = None


class ServerTimes(msgspec.Struct):
    """Times that the server measured: seconds from its receipt of a request to the first step, the first token, and the
    last token.
    """

    queued_s: float
    ttft_s: float
    total_s: float


@dataclass(slots=True)
class ClientResult:
    """The result of a request. Times are in seconds from the start of the replay.

    Attributes:
        token_s: time at which each token arrived. If the server sends no token ids, the entries are for chunks of text.
            Tokens from the same read of the socket have the same time.
        token_ids: the tokens, if the server sends them.
        server: times that the server measured, or None if it reported none. Only xgpt's server reports them.
        error: why the request failed, on one line, or None if it did not fail.
        is_lost: whether the request failed because the server stopped answering. In a closed loop, the client that sent
            this request then sends no more.
    """

    send_s: float
    end_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    usage_tokens: int | None = None
    server: ServerTimes | None = None
    error: str | None = None
    is_lost: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_s) if self.token_ids or self.usage_tokens is None else self.usage_tokens

    @property
    def tokens_from(self) -> TokensFrom:
        if self.token_ids:
            return "token_ids"
        return "chunks" if self.usage_tokens is None else "usage"

    @property
    def first_token_s(self) -> float | None:
        return self.token_s[0] if self.token_s else None


class _ChoiceTokens(msgspec.Struct):
    token_ids: list[int] | None = None
    text: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Error(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    choices: list[_ChoiceTokens] = []
    usage: _Usage | None = None
    xgpt: ServerTimes | None = None
    error: _Error | None = None


class _Model(msgspec.Struct):
    id: str
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[_Model]


_decode_event = msgspec.json.Decoder(_Event).decode


async def replay(
    url: str,
    requests: Sequence[ClientRequest],
    *,
    concurrency: int | None,
    enough: int | None = None,
    stream: bool = True,
    ca_file: Path | None = None,
    api_key: str | None = None,
    progress: Callable[[int], None] = lambda ended: None,
    until: Callable[[ClientResult], bool] = lambda result: False,
) -> list[ClientResult]:
    """Send requests to the server at `url` (without /v1), and read the responses. Return results in the order of the
    requests.

    Args:
        concurrency: number of outstanding requests in a closed loop, where each end of a request causes the next one to
            be sent. None means an open loop, where each request is sent at its `send_at_s`.
        stream: whether responses are streamed. Without streams, client and server need less processor time.
        enough: number of finished requests after which a closed loop stops. The requests that still run then have no
            result.
        until: called with each result of an open loop. Once it returns True, no request is sent any more, and requests
            that still run are cancelled and have no result.

    Raises:
        InputError: `concurrency` is below 1, a request of a closed loop has `send_at_s`, or a request of an open loop
            has none.
        MachineError: no server answers at `url`. (Errors of single requests are in their results.)
    """
    if concurrency is not None and concurrency < 1:
        raise InputError("concurrency", concurrency, "give at least 1 client")
    if any((request.send_at_s is None) == (concurrency is None) for request in requests):
        accepted = "give either concurrency (a closed loop) or send_at_s in every request (an open loop), not both"
        raise InputError("concurrency", concurrency, accepted)
    async with _Connections(url, ca_file, api_key) as connections:
        async with connections.one() as connection:
            model = await _served_model(connection, url)
        client = _Client(connections, model, stream)
        num_ended = 0

        async def send(request: ClientRequest) -> ClientResult:
            nonlocal num_ended
            result = await client.send(request)
            num_ended += 1
            progress(num_ended)
            return result

        if concurrency is None:
            return await _until([asyncio.ensure_future(send(request)) for request in requests], until)
        results: list[ClientResult | None] = [None] * len(requests)
        queue = iter(enumerate(requests))

        async def work() -> None:
            for index, request in queue:
                result = results[index] = await send(request)
                if result.is_lost:
                    return
                if num_ended == enough:
                    for worker in workers:
                        worker.cancel()
                    return

        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(work()) for _ in range(concurrency)]
        return [result for result in results if result is not None]


class ClientTurn(NamedTuple):
    """A turn of a session to send.

    Attributes:
        kept: number of tokens of the session so far with which its prompt begins. None means all.
    """

    added: Sequence[int]
    output_length: int
    pause_s: float = 0.0
    kept: int | None = None


async def replay_sessions(
    url: str,
    sessions: Sequence[Sequence[ClientTurn]],
    starts_s: Sequence[float],
    *,
    ca_file: Path | None = None,
    api_key: str | None = None,
    progress: Callable[[int], None] = lambda ended: None,
) -> list[list[ClientResult]]:
    """Send sessions to the server at `url`, each in a loop of its own: a turn follows a pause after the answer before
    it, and its prompt contains that answer. Return the results of each session's turns. A session ends with its first
    turn that fails.
    """
    async with _Connections(url, ca_file, api_key) as connections:
        async with connections.one() as connection:
            model = await _served_model(connection, url)
        client, ended = _Client(connections, model, stream=True), 0

        async def drive(turns: Sequence[ClientTurn], start_s: float) -> list[ClientResult]:
            nonlocal ended
            said, results, send_at_s = list[int](), list[ClientResult](), start_s
            for turn in turns:
                said = [*said[: turn.kept], *turn.added]
                result = await client.send(ClientRequest(said, turn.output_length, turn.output_length, send_at_s))
                results.append(result)
                if result.error is not None:
                    break
                # Without token ids, the answer is stood for by as many other tokens, which the cache does not have.
                said += result.token_ids or [0] * result.num_tokens
                send_at_s = result.end_s + turn.pause_s
            ended += 1
            progress(ended)
            return results

        return list(await asyncio.gather(*map(drive, sessions, starts_s)))


async def _until(
    sending: list[asyncio.Future[ClientResult]], until: Callable[[ClientResult], bool]
) -> list[ClientResult]:
    try:
        for following in asyncio.as_completed(sending):
            if until(await following):
                break
    finally:
        for each in sending:
            each.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
    return [each.result() for each in sending if not each.cancelled()]


async def served_model(url: str, api_key: str | None = None) -> str:
    """Return the name of the model that the server at `url` serves.

    Raises:
        MachineError: no server answers at `url`, or not as an OpenAI-compatible endpoint does.
    """
    async with _Connections(url, None, api_key) as connections, connections.one() as connection:
        return (await _served_model(connection, url)).id


async def _served_model(connection: Connection, url: str) -> _Model:
    try:
        status, body = await within(ANSWER_TIMEOUT_S, connection.get("/v1/models"), "no answer")
        if status == OK:
            return msgspec.json.decode(body, type=_Models).data[0]
        error: object = _message(status, body)
    except (*Failure, msgspec.MsgspecError, IndexError) as failure:
        error = reason_of(failure) if isinstance(failure, OSError) else failure
    raise MachineError(
        f"{url.rstrip('/')}/v1/models does not answer like an OpenAI-compatible endpoint: {error}; start the server, "
        "or correct the URL"
    )


class _Connections:
    def __init__(self, url: str, ca_file: Path | None, api_key: str | None) -> None:
        self._url = url
        self._ca_file = ca_file
        self._api_key = api_key
        self._all: list[Connection] = []
        self._idle: list[Connection] = []

    async def __aenter__(self) -> _Connections:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._all:
            connection.close()
        await asyncio.sleep(0)  # asyncio closes connections in the next iteration of its loop

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Connection]:
        if not self._idle:
            self._all.append(Connection(self._url, self._ca_file, self._api_key))
            self._idle.append(self._all[-1])
        connection = self._idle.pop()
        try:
            yield connection
        finally:
            self._idle.append(connection)


class _Client:
    def __init__(self, connections: _Connections, model: _Model, stream: bool) -> None:
        self._connections = connections
        self._model = model
        self._stream = stream
        self._start_s = time.perf_counter()

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s

    async def send(self, request: ClientRequest) -> ClientResult:
        body = {
            "model": self._model.id,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": self._stream,
            **self._ending(request),
        }
        content = msgspec.json.encode(body)
        if request.send_at_s is not None:
            await asyncio.sleep(request.send_at_s - self._now_s())
        result = ClientResult(self._now_s())
        try:
            async with self._connections.one() as connection:
                status = await connection.ask("POST", "/v1/completions", content)
                if status != OK:
                    result.error = _message(status, await connection.read_all())
                elif self._stream:
                    await self._read(connection, result)
                else:
                    self._take(result, await connection.read_all(), self._now_s())
        except (*Failure, msgspec.MsgspecError) as error:
            result.error = f"{type(error).__name__}: {error}"
            result.is_lost = isinstance(error, TimeoutError)
        result.end_s = self._now_s()
        return result

    def _ending(self, request: ClientRequest) -> dict[str, Any]:
        """Return the request's fields that set the output's length. xgpt's server does not tell its scheduler this
        length. Other servers get the length as `max_tokens`.
        """
        if self._model.owned_by == "xgpt":
            return {"output_length": request.output_length}
        ending: dict[str, Any] = {} if request.output_length is None else {"max_tokens": request.output_length}
        if self._model.owned_by == "vllm":
            return ending | {"return_token_ids": True, "ignore_eos": request.output_length is not None}
        return ending | ({"stream_options": {"include_usage": True}} if self._stream else {})

    async def _read(self, connection: Connection, result: ClientResult) -> None:
        unfinished = b""
        done = False
        while (piece := await connection.read()) is not None:
            now_s = self._now_s()
            *lines, unfinished = (unfinished + piece).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):  # the end of an event, or a comment that means that no token is ready
                    continue
                data = line[len(b"data:") :].strip()
                if data == b"[DONE]":
                    done = True
                else:
                    self._take(result, data, now_s)
        if result.error is None and not (done and result.token_s):
            result.error = "the answer has no tokens" if done else "the stream ended before the answer was complete"

    def _take(self, result: ClientResult, data: bytes, now_s: float) -> None:
        event = _decode_event(data)
        for choice in event.choices:
            if choice.token_ids is not None:
                result.token_ids += choice.token_ids
                result.token_s += [now_s] * len(choice.token_ids)
            elif choice.text:
                result.token_s.append(now_s)
        if event.usage is not None:
            result.usage_tokens = event.usage.completion_tokens
        if event.error is not None:
            result.error = event.error.message
        result.server = event.xgpt or result.server


def _message(status: int, body: bytes) -> str:
    try:
        error = _decode_event(body).error
    except msgspec.MsgspecError:
        error = None
    return f"HTTP {status}" + (f": {error.message}" if error else "")


TOLD_WITHIN_S = 1.2
"""Seconds to wait until all workers have reported. They report twice a second."""
TIMEOUT_S = 10.0


def busy_of_workers(url: str) -> dict[str, float]:
    """Return how many seconds each worker has executed steps since its start. This first waits long enough for every
    worker to report.
    """
    time.sleep(TOLD_WITHIN_S)
    samples = read_samples(url, ["xgpt_busy_seconds_total{"], TIMEOUT_S, own_api_key())
    if samples is None:
        raise MachineError(f"{url}/metrics does not answer: check that the server is running")
    return {sample.labels["process"]: sample.value for sample in samples}
