"""`xgpt serve` on several devices ends without leaving anything behind."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.faults import requests
from benchmarks.lib.served_plans import PLANS, left_over, listening, served
from xgpt.client import replay


@pytest.mark.long
@pytest.mark.parametrize("name", PLANS)
def test_sigterm_in_mid_stream_leaves_no_process_and_no_socket(name: str, tmp_path: Path) -> None:
    async def until_some_stream(url: str) -> asyncio.Task[object]:
        streams = asyncio.create_task(replay(url, requests(64), concurrency=16))
        await asyncio.sleep(1)
        assert not streams.done()
        return streams

    with asyncio.Runner() as loop:
        with served(PLANS[name](), tmp_path) as server:
            streams = loop.run(until_some_stream(server.url))
            sockets = listening(server.process.pid)
            assert sockets
        assert server.process.returncode == 0
        assert left_over(server.process.pid, sockets) == []
        assert not [line for line in server.lines if "Traceback" in line]
        streams.cancel()
