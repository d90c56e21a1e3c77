"""The front of WAA's two vLLMs, with stand-ins for these."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from tests.vllm.plans import waa_plan
from xrunner.vllm.front import Front, create_app

Lane = Callable[[httpx.Request], httpx.Response]
PROMPTS = [[number] * 8 for number in range(1, 11)]


def front_of(encode: Lane, decode: Lane) -> Front:
    lanes = (
        httpx.AsyncClient(transport=httpx.MockTransport(lane), base_url="http://lane") for lane in (encode, decode)
    )
    return Front(waa_plan(), *lanes)


def streamed(content: bytes) -> httpx.Response:
    async def pieces() -> AsyncIterator[bytes]:
        yield content

    return httpx.Response(200, content=pieces())


def answers(front: Front) -> list[bytes]:
    """To all prompts, sent at once."""

    async def one(prompt: list[int]) -> bytes:
        return b"".join([piece async for piece in front.complete({"prompt": prompt, "max_tokens": 4})])

    async def all_of_them() -> list[bytes]:
        return await asyncio.gather(*map(one, PROMPTS))

    return asyncio.run(all_of_them())


def test_each_request_is_told_where_its_own_kv_is() -> None:
    """vLLM's NixlConnector keeps K/V for whom the encode lane is asked to, and fetches it from where it is told."""

    def encode(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert body["kv_transfer_params"] == {"do_remote_decode": True}
        return httpx.Response(200, json={"kv_transfer_params": {"remote_block_ids": body["prompt"]}})

    def decode(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert body["kv_transfer_params"] == {"remote_block_ids": body["prompt"]}
        return streamed(json.dumps(body["prompt"]).encode())

    assert [json.loads(answer) for answer in answers(front_of(encode, decode))] == PROMPTS


def test_a_connector_that_tells_nothing_is_told_nothing() -> None:
    def decode(request: httpx.Request) -> httpx.Response:
        assert json.loads(request.content)["kv_transfer_params"] is None
        return streamed(b"tokens")

    def encode(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"kv_transfer_params": None})

    assert answers(front_of(encode, decode)) == [b"tokens"] * len(PROMPTS)


def test_what_the_encode_lane_refuses_fails_alone() -> None:
    refused = PROMPTS[1]

    def encode(request: httpx.Request) -> httpx.Response:
        return httpx.Response(500 if json.loads(request.content)["prompt"] == refused else 200, json={})

    front = front_of(encode, lambda request: streamed(b"tokens"))

    async def both() -> None:
        first, second = (front.complete({"prompt": prompt, "max_tokens": 4}) for prompt in PROMPTS[:2])
        given, failed = await asyncio.gather(anext(first), anext(second), return_exceptions=True)
        assert given == b"tokens"
        assert isinstance(failed, httpx.HTTPError) and "encode lane answers 500" in str(failed)
        await first.aclose()

    asyncio.run(both())


@pytest.mark.parametrize(("status", "is_up"), [(200, True), (503, False)])
def test_it_is_healthy_once_both_lanes_are(status: int, is_up: bool) -> None:
    front = front_of(lambda request: httpx.Response(200), lambda request: httpx.Response(status))
    assert asyncio.run(front.lanes_answer()) is is_up


def test_a_lane_that_is_not_there_is_not_healthy() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("nobody listens")

    assert not asyncio.run(front_of(refuse, refuse).lanes_answer())


def test_the_endpoint_says_what_it_is_and_which_lane_is_missing() -> None:
    async def ask() -> list[httpx.Response]:
        app = create_app(waa_plan(), "http://127.0.0.1:9", "http://127.0.0.1:9")
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as to:
            bodies = [{"prompt": prompt, "max_tokens": 2} for prompt in ([1, 2], "text")]
            completions = [await to.post("/v1/completions", json=body) for body in bodies]
            return [await to.get("/v1/models"), await to.get("/health"), *completions]

    models, health, no_lane, no_ids = asyncio.run(ask())
    assert [(model["id"], model["owned_by"]) for model in models.json()["data"]] == [("opt-125m", "vllm")]
    assert health.status_code == 503
    assert no_lane.status_code == 502 and "the encode lane does not answer" in no_lane.json()["error"]["message"]
    assert no_ids.status_code == 400
