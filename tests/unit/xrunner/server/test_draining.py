"""A server that ends: running requests finish, new ones and /ready are refused, and the log says so."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.fakes import FakeExecutor, eventually, fake_app, fake_engine
from xgpt.core.errors import MachineError
from xrunner.server.http.listener import Listener, check_address
from xrunner.server.http.process import Server
from xscheduler.replanning.replanner import BackgroundPlanner


def test_a_port_in_use_is_reported_before_an_engine_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            check_address("127.0.0.1", port)
    check_address("127.0.0.1", port)


def test_a_draining_server_answers_that_it_is_not_ready(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    body = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 50}
    with Listener(socket.create_server(("127.0.0.1", 0))) as listener, ThreadPoolExecutor(1) as pool:
        server = Server(fake_app(fake_engine(FakeExecutor(step_s=0.02))), listener, drain_s=5)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def ask() -> httpx.Response:
            return httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=30)

        running = pool.submit(ask)
        assert eventually(lambda: server._engine.num_requests == 1)
        server.should_exit = True
        assert eventually(lambda: server._engine.is_draining)
        ready = httpx.get(f"{url}/ready", trust_env=False)
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "shutting_down")
        assert ask().status_code == 503
        assert running.result().status_code == 200
        thread.join()
    assert [record.getMessage() for record in caplog.records if record.name.endswith("process")] == [
        "draining 1 requests, up to 5 s; a second signal ends them at once",
        "stopped",
    ]


def test_the_end_of_the_planning_process_is_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    planner = BackgroundPlanner.__new__(BackgroundPlanner)
    with subprocess.Popen(["sleep", "30"]) as process:
        planner._process = process
        process.send_signal(signal.SIGKILL)
        planner._report_end(process)
    assert f"the re-planning process {process.pid} has ended: signal 9" in caplog.text
