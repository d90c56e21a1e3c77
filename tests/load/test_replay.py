"""Many streams at once: every request gets its own tokens, all of them, in order."""

import asyncio
import gc

import pytest

from tests.fakes import VOCAB_SIZE, FakeExecutor, expected_tokens, fake_app, fake_engine, running
from xgpt.client import ClientRequest, replay
from xgpt.core.errors import InputError, MachineError


def requests(count: int, *, gap_s: float | None = None) -> list[ClientRequest]:
    """Prompts and outputs of many lengths; with `gap_s`, sent so far apart."""
    return [
        ClientRequest(
            tuple((i * 7 + j) % VOCAB_SIZE for j in range(1 + i % 13)),
            output_length=1 + i * 5 % 40,
            max_tokens=64,
            send_at_s=None if gap_s is None else i * gap_s,
        )
        for i in range(count)
    ]


def test_50_concurrent_streams_closed_loop() -> None:
    wanted = requests(150)
    engine = fake_engine(FakeExecutor(step_s=0.001), max_batch=32)
    with running(fake_app(engine)) as url:
        results = asyncio.run(replay(url, wanted, concurrency=50))
    for request, result in zip(wanted, results, strict=True):
        assert result.error is None
        assert request.output_length is not None
        assert result.token_ids == expected_tokens(request.prompt_ids, request.output_length)
        assert result.token_s == sorted(result.token_s)
        assert result.first_token_s is not None
        assert result.send_s <= result.first_token_s <= result.end_s
        assert result.server is not None
        assert result.server.total_s <= result.end_s - result.send_s
    assert engine.pool.is_idle
    assert engine.pool.reserved_blocks == 0


def test_closed_loop_keeps_so_many_outstanding() -> None:
    ended: list[int] = []
    with running(fake_app(fake_engine(FakeExecutor(step_s=0.001)))) as url:
        results = asyncio.run(replay(url, requests(20), concurrency=4, progress=ended.append))
    assert ended == list(range(1, 21))
    moments = [result.send_s for result in results]
    assert max(sum(r.send_s <= moment < r.end_s for r in results) for moment in moments) == 4


def test_open_loop_sends_on_time() -> None:
    wanted = requests(10, gap_s=0.01)
    with running(fake_app(fake_engine(FakeExecutor(step_s=0.005), max_batch=1))) as url:
        results = asyncio.run(replay(url, wanted, concurrency=None))
    for request, result in zip(wanted, results, strict=True):
        assert request.send_at_s is not None
        assert request.send_at_s <= result.send_s
    # The server is slower than the arrivals: later requests queue there, not here.
    assert results[-1].server is not None
    assert results[-1].server.queued_s > 0.1


def test_failures_are_told_one_by_one() -> None:
    wanted = [ClientRequest((1,), 4, 4), ClientRequest((VOCAB_SIZE,), 4, 4), ClientRequest((494,), 8, 8)]
    with running(fake_app(fake_engine(FakeExecutor(fail_at=500)))) as url:
        good, refused, crashed = asyncio.run(replay(url, wanted, concurrency=1))
    assert good.error is None
    assert refused.error is not None
    assert refused.error.startswith("HTTP 400: prompt: token id 1000 is outside")
    assert crashed.error == "the engine has failed: RuntimeError: the device has gone"
    assert crashed.num_tokens == 6


def test_a_closed_loop_stops_when_enough_requests_have_ended() -> None:
    ended: list[int] = []
    with running(fake_app(fake_engine(FakeExecutor(step_s=0.01)))) as url:
        results = asyncio.run(replay(url, requests(64), concurrency=4, enough=10, progress=ended.append))
    assert len(results) == ended[-1] == 10


def test_a_cancelled_replay_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """As Ctrl-C cancels it. The log had "_GatheringFuture exception was never retrieved"."""

    async def cancel(url: str) -> None:
        replaying = asyncio.create_task(replay(url, requests(16), concurrency=4))
        await asyncio.sleep(0.3)
        replaying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await replaying

    with running(fake_app(fake_engine(FakeExecutor(step_s=0.1)))) as url:
        asyncio.run(cancel(url))
        gc.collect()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_what_cannot_be_replayed() -> None:
    with pytest.raises(MachineError, match="does not answer"):
        asyncio.run(replay("http://127.0.0.1:9", requests(1), concurrency=1))
    with pytest.raises(InputError, match="open loop"):
        asyncio.run(replay("http://127.0.0.1:9", requests(1), concurrency=None))
    with pytest.raises(InputError, match="give at least 1 client"):
        asyncio.run(replay("http://127.0.0.1:9", requests(1), concurrency=0))
