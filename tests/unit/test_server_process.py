"""The server as a process: how it ends on a signal, alone or in the middle of an answer."""

import json
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits it ignored
from tests.fakes import *
from xrunner.server import serve
try:
    serve(fake_app(fake_engine(FakeExecutor(step_s=0.05))), "127.0.0.1", 0)
except KeyboardInterrupt:
    print("interrupted")
print("cleaned up")
"""


def start() -> tuple[subprocess.Popen[str], str]:
    """The process and its URL."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    ready = process.stderr.readline()
    assert ready.startswith("listening on http://127.0.0.1:")
    return process, ready.split()[-1]


@pytest.mark.parametrize(
    ("sent", "says"), [(signal.SIGTERM, "cleaned up\n"), (signal.SIGINT, "interrupted\ncleaned up\n")]
)
def test_serve_until_a_signal(sent: signal.Signals, says: str) -> None:
    process, url = start()
    with process:
        assert httpx.get(f"{url}/health", trust_env=False, timeout=10).status_code == 200
        process.send_signal(sent)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, says, "")


def test_a_head_without_end_is_not_read_on() -> None:
    process, url = start()
    with process, socket.create_connection(url.removeprefix("http://").split(":")) as connection:
        with pytest.raises(ConnectionError):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: ")
            for _ in range(100):
                connection.sendall(b"x" * 1_000_000)
        assert httpx.get(f"{url}/health", trust_env=False, timeout=10).status_code == 200
        process.terminate()
        process.communicate(timeout=20)


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_ctrl_c_ends_at_once_and_quietly(stream: bool) -> None:
    process, url = start()
    body = json.dumps({"model": "fake", "prompt": [1], "max_tokens": 500, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with process, socket.create_connection(url.removeprefix("http://").split(":")) as connection:
        connection.sendall(head + body)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        begin_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        answer = connection.makefile("rb").read().decode()
    assert time.monotonic() - begin_s < 5
    assert (process.returncode, out, err) == (0, "interrupted\ncleaned up\n", "")
    assert "the server is shutting down" in answer
