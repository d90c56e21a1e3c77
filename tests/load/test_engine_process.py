"""`xgpt serve` with its engine in a process of its own: what happens when one of the two dies or hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from benchmarks.kills import requests, undisturbed
from benchmarks.lib.served_plans import PLANS, Served, left_over, listening, one_lane, plan, served
from tests.rings import few
from xgpt.client import ClientResult, replay

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")

COUNT = 48


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return undisturbed(COUNT)


async def struck(server: Served, blow: signal.Signals) -> list[ClientResult]:
    """Send requests, and meanwhile a signal to the engine; return what came of them."""
    streams = asyncio.create_task(replay(server.url, requests(COUNT), concurrency=16))
    await asyncio.sleep(0.5)
    before = server.engine
    assert not streams.done() and before is not None
    os.kill(before, blow)
    results = await streams
    assert server.engine not in (before, None)
    return results


@pytest.mark.parametrize(
    ("name", "blow"),
    few([("one device", signal.SIGKILL), ("one device", signal.SIGSTOP), *((name, signal.SIGKILL) for name in PLANS)]),
)
def test_a_lost_engine_is_replaced_and_every_stream_goes_on(
    name: str, blow: signal.Signals, expected: list[list[int]], tmp_path: Path
) -> None:
    what = PLANS[name]() if name in PLANS else plan(one_lane([1]))
    with served(what, tmp_path) as server:
        results = asyncio.run(struck(server, blow))
        sockets = listening(server.process.pid)
    assert [result.error for result in results] == [None] * COUNT
    assert [result.token_ids for result in results] == expected
    assert server.process.returncode == 0
    assert left_over(server.process.pid, sockets) == []
