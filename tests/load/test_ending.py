"""`xgpt serve` ends without leaving anything behind."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kills import requests
from benchmarks.lib.served_plans import PLANS, left_over, listening, one_lane, plan, served
from tests.fakes import eventually
from tests.rings import few
from xgpt.client import replay
from xgpt.core.io import dump_json

HOLD = """
import sys, time, xgpt
with xgpt.served(sys.argv[1]) as url:
    print(url, flush=True)
    time.sleep(60)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel ends no process with its parent")
@pytest.mark.parametrize("sent", few([signal.SIGKILL, signal.SIGTERM]))
def test_a_server_ends_with_what_has_started_it(sent: signal.Signals, tmp_path: Path) -> None:
    """As `xgpt bench` does; a bench that was killed left its server to run on."""
    path = tmp_path / "plan.json"
    path.write_text(dump_json(plan(one_lane([1]))))
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline().startswith("http://")
        sockets = listening(process.pid)
        assert sockets
        process.send_signal(sent)
        assert process.wait(20) == -sent
        assert eventually(lambda: left_over(process.pid, sockets) == [], 30)


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
