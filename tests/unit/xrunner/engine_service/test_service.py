"""The engine's gRPC service over a fake executor: what goes in, what comes out, what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

grpc = pytest.importorskip("grpc")
pb = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2")

from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc  # noqa: E402

from benchmarks.lib.engine_threads import in_threads  # noqa: E402
from tests.fakes import SPEC, FakeExecutor, expected_tokens, fake_engine, fake_plan  # noqa: E402
from xgpt.serving.gateway import admin_server  # noqa: E402
from xrunner.engine_service.server import service as grpc_service  # noqa: E402
from xrunner.server.access.keys import Classes  # noqa: E402
from xrunner.server.api.text import ServedModel  # noqa: E402
from xrunner.server.engine_client import EngineClient  # noqa: E402
from xrunner.server.observe.watch import Watch  # noqa: E402
from xrunner.server.submission import Limits  # noqa: E402

PROMPT = [5, 6, 7]


@asynccontextmanager
async def service(
    executor: FakeExecutor | None = None, *, max_waiting: int = 64, ends: frozenset[int] = frozenset(), **limits: Any
) -> AsyncIterator[tuple[Any, EngineClient]]:
    """Run the service; yields its stub and its engine's client."""
    plan = fake_plan()
    engine = EngineClient(in_threads(fake_engine(executor or FakeExecutor(), max_batch=2)), Watch(plan))
    model = ServedModel(("fake",), SPEC, eos_token_ids=ends)
    limited = Limits(max_waiting=max_waiting, **limits)
    async with (
        grpc_service(engine, model, limited, Classes(plan), drain_s=1.0) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield pb_grpc.VllmEngineStub(channel), engine


def request(prompt: list[int] = PROMPT, *, stream: bool = True, **sampling: Any) -> Any:
    return pb.GenerateRequest(
        request_id="one",
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(**{"max_tokens": 4} | sampling),
        stream=stream,
    )


async def answer(stub: Any, asked: Any, **options: Any) -> list[Any]:
    return [message async for message in stub.Generate(asked, **options)]


async def refusal(stub: Any, asked: Any, **options: Any) -> tuple[Any, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(stub, asked, **options)
    return caught.value.code(), caught.value.details()


def test_a_stream_brings_each_token_and_then_all_of_the_last_step() -> None:
    async def run() -> None:
        async with service() as (stub, _):
            *chunks, last = await answer(stub, request())
            assert [token for each in chunks for token in each.chunk.token_ids] == expected_tokens(PROMPT, 4)
            assert last.complete.finish_reason == "length"
            assert last.complete.prompt_tokens == 3

    asyncio.run(run())


def test_without_stream_one_message_has_all_tokens_and_their_log_probabilities() -> None:
    async def run() -> None:
        async with service() as (stub, _):
            (whole,) = await answer(stub, request(stream=False, logprobs=2))
            assert list(whole.complete.output_ids) == expected_tokens(PROMPT, 4)
            scores = whole.complete.output_logprobs
            assert list(scores.token_logprobs) == [-1.0] * 4
            assert [list(top.values) for top in scores.top_logprobs] == [[-1.0, -2.0]] * 4

    asyncio.run(run())


def test_a_stop_token_ends_the_output_and_is_named() -> None:
    async def run() -> None:
        async with service() as (stub, _):
            (whole,) = await answer(stub, request(stream=False, stop_token_ids=[20]))
            assert list(whole.complete.output_ids) == [18, 19, 20]
            assert (whole.complete.finish_reason, whole.complete.matched_token_id) == ("stop", 20)

    asyncio.run(run())


def test_the_models_end_tokens_end_an_output_unless_they_are_ignored() -> None:
    """Those that only the tokenizer names, too; they ended nothing once, and every min_tokens was refused."""

    async def run() -> None:
        async with service(ends=frozenset({19})) as (stub, _):
            (whole,) = await answer(stub, request(stream=False))
            assert list(whole.complete.output_ids) == [18, 19]
            for goes_on in ({"ignore_eos": True}, {"min_tokens": 4}, {"min_tokens": 2, "ignore_eos": True}):
                (whole,) = await answer(stub, request(stream=False, **goes_on))
                assert list(whole.complete.output_ids) == expected_tokens(PROMPT, 4)

    asyncio.run(run())


def test_several_outputs_are_told_apart() -> None:
    async def run() -> None:
        async with service() as (stub, _):
            wholes = await answer(stub, request(stream=False, n=3))
            assert {whole.complete.index for whole in wholes} == {0, 1, 2}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (pb.GenerateRequest(text="hi"), "input"),
        (request([]), "input_ids"),
        (request([SPEC.vocab_size]), "input_ids"),
        (request([1] * SPEC.max_context), "input_ids"),
        (request(max_tokens=SPEC.max_context), "max_tokens"),
        (request(max_tokens=0), "max_tokens: give at least 1"),
        (request(min_tokens=2), "min_tokens"),
        (request(temperature=float("nan")), "temperature"),
        (request(top_p=1.5), "top_p"),
        (request(logprobs=-1), "logprobs"),
        (request(logprobs=21), "logprobs"),
        (request(n=1000), "n:"),
        (request(logit_bias={SPEC.vocab_size: 1.0}), "logit_bias"),
        (request(logit_bias={1: float("nan")}), "logit_bias"),
        (request(json_schema="{}", ignore_eos=True), "ignore_eos: an output that follows a grammar"),
        (request(stop_token_ids=[SPEC.vocab_size]), "stop_token_ids"),
        (request(json_schema="{}"), "constraint"),
        (request(json_schema="{"), "json_schema"),
        (request(structural_tag="{}"), "structural_tag"),
    ],
)
def test_what_cannot_be_done_is_refused_and_named(asked: Any, field: str) -> None:
    async def run() -> None:
        async with service() as (stub, engine):
            code, says = await refusal(stub, asked)
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert says.startswith(field)
            assert not engine._streams

    asyncio.run(run())


def test_metadata_sets_a_deadline_and_an_exact_length() -> None:
    async def run() -> None:
        async with service(FakeExecutor(step_s=0.05)) as (stub, engine):
            asked = request(stream=False, max_tokens=50)
            (whole,) = await answer(stub, asked, metadata=[("xgpt-output-length", "3")])
            assert list(whole.complete.output_ids) == expected_tokens(PROMPT, 3)
            code, _ = await refusal(stub, asked, metadata=[("xgpt-deadline-s", "0.2")])
            assert code == grpc.StatusCode.DEADLINE_EXCEEDED
            assert not engine._streams
            for bad in ("-1", "nan", "x"):
                assert (await refusal(stub, asked, metadata=[("xgpt-deadline-s", bad)]))[0].name == "INVALID_ARGUMENT"
            assert (await refusal(stub, asked, metadata=[("xgpt-class", "none")]))[0].name == "INVALID_ARGUMENT"

    asyncio.run(run())


def test_a_caller_that_goes_away_and_an_abort_take_a_request_out() -> None:
    async def run() -> None:
        async with service(FakeExecutor(step_s=0.02)) as (stub, engine):
            for leave in ("cancel", "abort"):
                call = stub.Generate(request(max_tokens=400))
                await call.read()
                assert engine._streams
                if leave == "cancel":
                    call.cancel()
                else:
                    await stub.Abort(pb.AbortRequest(request_ids=["one", "unknown"]))
                for _ in range(100):
                    if not engine._streams:
                        break
                    await asyncio.sleep(0.02)
                assert not engine._streams

    asyncio.run(run())


def test_a_waiting_request_is_never_encoded_once_its_caller_has_gone() -> None:
    async def run() -> None:
        executor = FakeExecutor(step_s=0.02)
        begun: list[int] = []
        async with service(executor) as (stub, engine):
            engine.remote.listen(lambda record: begun.extend(chunk[0] for chunk in record.encode))
            running = [stub.Generate(request(max_tokens=60)) for _ in range(2)]
            await asyncio.gather(*(call.read() for call in running))
            waiting = [stub.Generate(request(max_tokens=60)) for _ in range(3)]
            while len(engine._streams) < 5:
                await asyncio.sleep(0.02)
            for call in waiting:
                call.cancel()
            for call in running:
                while await call.read() != grpc.aio.EOF:
                    pass
            assert not engine._streams
        assert begun == [0, 1]

    asyncio.run(run())


def test_more_waiting_requests_than_may_are_refused() -> None:
    async def run() -> None:
        async with service(FakeExecutor(step_s=0.05), max_waiting=2) as (stub, _):
            calls = [stub.Generate(request(max_tokens=100)) for _ in range(2)]
            await asyncio.gather(*(call.read() for call in calls))
            waiting = [stub.Generate(request()) for _ in range(2)]
            await asyncio.sleep(0.2)
            assert (await refusal(stub, request()))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
            for call in (*calls, *waiting):
                call.cancel()

    asyncio.run(run())


def test_a_message_that_is_too_long_is_refused_before_it_is_read() -> None:
    async def run() -> None:
        async with service() as (stub, _):
            asked = pb.GenerateRequest(tokenized=pb.TokenizedInput(original_text="x" * (8 << 20), input_ids=PROMPT))
            assert (await refusal(stub, asked))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED

    asyncio.run(run())


def test_an_engine_that_has_failed_is_unhealthy_and_takes_nothing() -> None:
    async def run() -> None:
        with pytest.raises(Exception, match="the device has gone"):
            async with service(FakeExecutor(fail_at=19)) as (stub, _):
                assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
                assert (await refusal(stub, request()))[0] in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)

    asyncio.run(run())


def test_state_and_load_are_told() -> None:
    async def run() -> None:
        async with service(FakeExecutor(step_s=0.05)) as (stub, engine):
            info = await stub.GetModelInfo(pb.GetModelInfoRequest())
            assert (info.served_model_name, info.max_context_length) == ("fake", SPEC.max_context)
            call = stub.Generate(request(max_tokens=50))
            await call.read()
            (load,) = (await stub.GetLoads(pb.GetLoadsRequest())).loads
            assert (load.num_running_reqs, load.num_waiting_reqs) == (1, 0)
            assert load.num_used_tokens > 0
            call.cancel()
            async with admin_server(engine, ServedModel(("fake",), SPEC), 0) as port, httpx.AsyncClient() as client:
                url = f"http://127.0.0.1:{port}"
                assert '"plan"' in (await client.get(f"{url}/plan")).text
                assert "# TYPE" in (await client.get(f"{url}/metrics")).text
                assert (await client.get(f"{url}/ready")).status_code == 200
                assert (await client.get(f"{url}/etc/passwd")).status_code == 404
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Embed(pb.EmbedRequest())

    asyncio.run(run())
