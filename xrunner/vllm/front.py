"""WAA on two vLLMs: takes requests, hands each from the encode lane's vLLM to the decode lane's.

    python -m xrunner.vllm.front plan.json --encode URL --decode URL --port 8000

Our two-lane rule decides which prompts the encode lane takes together, and holds them back until all of them fit under
the decode lane's cap. A request's K/V moves by vLLM's connector: the encode lane leaves it there when it ends the
prompt, and says where, unless the decode lane finds it by the prompt alone.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from xgpt import policies
from xgpt.errors import InputError
from xgpt.io import load_json
from xgpt.policies import Request, Step
from xgpt.schema import Plan, WaaSettings


@dataclass(slots=True)
class _Waiting:
    """A request on its way to the decode lane.

    Attributes:
        handed_over: done when its K/V is ready for the decode lane; what the encode lane answered, where it failed.
        transfer: what the encode lane's connector says of its K/V, for that of the decode lane; None: nothing.
    """

    prompt: list[int]
    handed_over: asyncio.Future[str | None]
    transfer: dict[str, Any] | None = None
    encoded_s: float = 0.0


@dataclass(slots=True)
class HandOver:
    """Seconds from the end of a prompt's encoding to its first token from the decode lane: K/V's way, a place in the
    batch, and one step."""

    seconds: list[float] = field(default_factory=list)


class Front:
    """The two-lane rule over two endpoints. All methods belong to one event loop.

    Raises:
        InputError: the plan is not WAA's, or promises K/V memory by quantile, which takes a view of each step.
    """

    def __init__(self, plan: Plan, encode: httpx.AsyncClient, decode: httpx.AsyncClient) -> None:
        if not isinstance(plan.policy, WaaSettings):
            raise InputError("plan.policy", plan.policy.kind, "the front is for waa")
        if plan.admission.kv != "reserve":
            raise InputError("plan.admission.kv", plan.admission.kv, "on two vLLMs memory is promised by reserve")
        self.model = plan.model.name
        self.hand_over = HandOver()
        self._schedule = policies.build(plan)
        self._encode, self._decode = encode, decode
        self._waiting: dict[int, _Waiting] = {}
        self._num_seen = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def complete(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """The decode lane's answer to a completion request, as it comes.

        Raises:
            InputError: the request is one that the front does not take.
            httpx.HTTPError: a lane does not answer.
        """
        prompt, max_output = body.get("prompt"), body.get("max_tokens")
        if not (isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt)):
            raise InputError("prompt", type(prompt).__name__, "one list of token ids")
        if not isinstance(max_output, int) or max_output < 1:
            raise InputError("max_tokens", max_output, "a whole number, at least 1: memory is set aside for so many")
        request = Request(self._num_seen, len(prompt), max_output, time.perf_counter_ns())
        if not self._schedule.pool.can_ever_fit(request):
            raise InputError("prompt", len(prompt), "prompt and output are longer than the plan's K/V memory holds")
        self._num_seen += 1
        waiting = _Waiting(prompt, asyncio.get_running_loop().create_future())
        self._waiting[request.id] = waiting
        self._schedule.submit(request)
        self._advance()
        try:
            failure = await waiting.handed_over
            if failure is not None:
                raise httpx.HTTPError(failure)
            body = body | {"kv_transfer_params": waiting.transfer}  # where K/V is, is not the client's to say
            async with self._decode.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    reason = (await answer.aread())[:200].decode(errors="replace")
                    raise httpx.HTTPError(f"the decode lane answers {answer.status_code}: {reason}")
                is_first = True
                async for piece in answer.aiter_raw():
                    if is_first:
                        self.hand_over.seconds.append(time.perf_counter() - waiting.encoded_s)
                        is_first = False
                    yield piece
        finally:
            del self._waiting[request.id]
            self._schedule.cancel(request.id)
            self._advance()

    async def lanes_answer(self) -> bool:
        """Whether both lanes take requests: vLLM answers once its model is loaded."""
        try:
            answers = [await lane.get("/health", timeout=5.0) for lane in (self._encode, self._decode)]
        except httpx.HTTPError:
            return False
        return all(answer.status_code == httpx.codes.OK for answer in answers)

    def _advance(self) -> None:
        """Begin every step that can: whoever has been transferred goes on by himself."""
        while (step := self._schedule.next_step("transfer")) is not None:
            self._schedule.settle(step, ())
            for id_ in step.transfer:
                if (waiting := self._waiting.get(id_)) is not None and not waiting.handed_over.done():
                    waiting.handed_over.set_result(None)
        while (step := self._schedule.next_step("encode")) is not None:
            task = asyncio.get_running_loop().create_task(self._encode_batch(step))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _encode_batch(self, step: Step) -> None:
        inside = [waiting for chunk in step.encode if (waiting := self._waiting.get(chunk.id)) is not None]
        failures = await asyncio.gather(*map(self._encode_one, inside))
        now_s = time.perf_counter()
        for waiting, failure in zip(inside, failures, strict=True):
            waiting.encoded_s = now_s
            if failure is not None and not waiting.handed_over.done():
                waiting.handed_over.set_result(failure)
        self._schedule.settle(step, ())
        self._advance()

    async def _encode_one(self, waiting: _Waiting) -> str | None:
        """A prompt is a request of its own: an answer to several says of the first alone where its K/V is.

        Returns:
            What failed; None: nothing.
        """
        body = {
            "model": self.model,
            "prompt": waiting.prompt,
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": {"do_remote_decode": True},  # vLLM's NixlConnector keeps no other K/V
        }
        try:
            answer = await self._encode.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            return f"the encode lane does not answer: {str(error) or type(error).__name__}"
        if answer.status_code != httpx.codes.OK:
            return f"the encode lane answers {answer.status_code}: {answer.text[:200]}"
        waiting.transfer = answer.json().get("kv_transfer_params")
        return None


def create_app(plan: Plan, encode_url: str, decode_url: str) -> Starlette:
    """The endpoint: completions of token ids, streamed or not, as the decode lane answers them."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # A connection for each request: vLLM closes those that are idle for seconds, perhaps as one is taken up again.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(None, connect=10.0)
        async with (
            httpx.AsyncClient(base_url=encode_url, limits=limits, timeout=timeout, trust_env=False) as encode,
            httpx.AsyncClient(base_url=decode_url, limits=limits, timeout=timeout, trust_env=False) as decode,
        ):
            app.state.front = Front(plan, encode, decode)
            yield

    app = Starlette(lifespan=lifespan)

    async def completions(http: HttpRequest) -> Response:
        try:
            body = msgspec.json.decode(await http.body(), type=dict[str, Any])
            pieces = app.state.front.complete(body)
            first = await anext(pieces)
        except (InputError, msgspec.MsgspecError) as error:
            return _error(400, str(error))
        except (httpx.HTTPError, StopAsyncIteration) as error:
            return _error(502, str(error) or type(error).__name__)  # some of httpx's errors say nothing

        async def all_pieces() -> AsyncIterator[bytes]:
            yield first
            async for piece in pieces:
                yield piece

        media_type = "text/event-stream" if body.get("stream") else "application/json"
        return StreamingResponse(all_pieces(), media_type=media_type)

    async def models(_: HttpRequest) -> Response:
        # What the decode lane's vLLM is told in a request, it is told through us: clients shall take us for it.
        model = {"id": plan.model.name, "object": "model", "owned_by": "vllm"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(_: HttpRequest) -> Response:
        return Response(status_code=200 if await app.state.front.lanes_answer() else 503)

    async def hand_over(_: HttpRequest) -> Response:
        return JSONResponse({"seconds": app.state.front.hand_over.seconds})

    app.add_route("/v1/completions", completions, methods=["POST"])
    app.add_route("/v1/models", models)
    app.add_route("/health", health)
    app.add_route("/hand_over", hand_over)
    return app


def _error(status: int, message: str) -> Response:
    content = msgspec.json.encode({"error": {"message": message, "code": status}})
    return Response(content, status_code=status, media_type="application/json")


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--encode", required=True, help="URL of the encode lane's vLLM")
    parser.add_argument("--decode", required=True, help="URL of the decode lane's vLLM")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    plan = load_json(given.plan, Plan, "plan")
    uvicorn.run(create_app(plan, given.encode, given.decode), host=given.host, port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
