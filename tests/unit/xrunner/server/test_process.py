"""The server as a process: how it ends on a signal, alone or in the middle of an answer."""

import asyncio
import json
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.fakes import FakeExecutor, certificate_in, fake_app, fake_engine, fake_plan, running
from tests.rings import few
from xgpt.client import ClientRequest, replay
from xgpt.connection import tls_context
from xgpt.core.errors import InputError, MachineError
from xrunner.server.http import answer
from xrunner.server.http.listener import most_connections
from xrunner.server.http.process import server_context
from xscheduler.replanning.replanner import observe_server

PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits it ignored
from tests.fakes import *
from pathlib import Path
from xrunner.server.http.process import serve
from xrunner.server.http.process import server_context
try:
    serve(fake_app(fake_engine(FakeExecutor(step_s=0.05))), "127.0.0.1", 0, OPTIONS)
except KeyboardInterrupt:
    print("interrupted")
print("cleaned up")
"""


def start(options: str = "", files: int | None = None) -> tuple[subprocess.Popen[str], str]:
    """The process and its URL; `options` are further arguments of `serve`, `files` how many it may open."""
    limit = None if files is None else partial(resource.setrlimit, resource.RLIMIT_NOFILE, (files, files))
    program = PROGRAM.replace("OPTIONS", options)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=limit
    )
    assert process.stderr is not None
    ready = process.stderr.readline()
    assert ready.startswith("listening on http")
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


@pytest.mark.parametrize("stream", few([True, False]))
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


def get(url: str, path: str) -> int:
    return httpx.get(url + path, trust_env=False, timeout=10).status_code


def test_load_balancers_learn_of_the_end_before_it_comes() -> None:
    process, url = start("shutdown_delay_s=1.5")
    body = {"model": "fake", "prompt": [1], "max_tokens": 2, "ignore_eos": True}
    with process:
        assert get(url, "/ready") == 200
        begin_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert (get(url, "/ready"), get(url, "/health")) == (503, 200)
        assert httpx.post(url + "/v1/completions", json=body, trust_env=False).status_code == 200
        out, err = process.communicate(timeout=20)
        assert time.monotonic() - begin_s > 1.5
    assert (process.returncode, out, err) == (0, "cleaned up\n", "")


@pytest.mark.long
def test_a_second_signal_does_not_wait_for_load_balancers() -> None:
    process, _ = start("shutdown_delay_s=60")
    with process:
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        out, err = process.communicate(timeout=5)
    assert (process.returncode, out, err) == (0, "cleaned up\n", "")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1, signed with its own key, and that key."""
    return certificate_in(tmp_path_factory.mktemp("certificate"))


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_handshake_that_is_not_continued_takes_little_memory(certificate: tuple[Path, Path]) -> None:
    """Without a key, each took 300 KiB, for a buffer of asyncio's."""
    process, url = start("tls=server_context(Path({!r}), Path({!r}))".format(*map(str, certificate)))
    status = Path(f"/proc/{process.pid}/status")

    def kib() -> int:
        return int(status.read_text().split("VmRSS:")[1].split()[0])

    with process, ExitStack() as clients:
        before = kib()
        for _ in range(200):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))))
            client.sendall(b"\x16\x03\x01")
        time.sleep(0.5)
        after = kib()
        process.kill()
    assert (after - before) / 200 < 128


def test_https(certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = certificate
    process, url = start(f"tls=server_context(Path({str(cert)!r}), Path({str(key)!r}))")
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    with process:
        assert url.startswith("https://")
        trusting = ssl.create_default_context(cafile=cert)
        with httpx.Client(verify=trusting, trust_env=False, timeout=10) as client:
            assert client.get(url + "/v1/models").status_code == 200
        results = asyncio.run(replay(url, [ClientRequest([1, 2], 3, 8) for _ in range(4)], concurrency=2, ca_file=cert))
        assert [result.error for result in results] == [None] * 4
        with pytest.raises(MachineError, match="certificate"):
            asyncio.run(replay(url, [ClientRequest([1], 3, 8)], concurrency=1))
        plan = fake_plan()
        with pytest.raises(MachineError, match="certificate"):
            observe_server(plan, url)
        with monkeypatch.context() as context:
            context.setenv("SSL_CERT_FILE", str(cert))
            tls_context.cache_clear()
            assert observe_server(plan, url)[0].model == plan.model
        tls_context.cache_clear()
        # Neither older TLS nor plain HTTP is answered, and neither takes the server along.
        old = ssl.create_default_context(cafile=cert)
        old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        old.set_ciphers("ALL:@SECLEVEL=0")
        with socket.create_connection(address) as plain, pytest.raises((ssl.SSLError, ConnectionError)):
            old.wrap_socket(plain, server_hostname="127.0.0.1")
        with socket.create_connection(address) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert not plain.recv(100).startswith(b"HTTP")
        process.terminate()
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "cleaned up\n", "")


def test_certificates_that_cannot_be_shown(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    other, locked = tmp_path / "other.pem", tmp_path / "locked.pem"
    subprocess.run(
        ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-out", str(other)],
        check=True,
    )
    locking = ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(locking, check=True)
    for first, second, says in (
        (tmp_path / "none", None, "No such file"),
        (cert, tmp_path / "none", "No such file"),
        (cert, None, "it must contain a certificate and its key"),
        (key, key, "it must contain a certificate and its key"),
        (cert, other, "the key belongs to another certificate"),
        (cert, locked, "encrypted"),
    ):
        with pytest.raises(InputError, match=says) as found:
            server_context(first, second)
        assert "\n" not in str(found.value)


def test_an_engine_that_has_failed_ends_the_process() -> None:
    """It answered 500 for ever; now a supervisor can see it and start it anew."""
    program = """
import sys
from tests.fakes import *
from xgpt.core.errors import XgptError
from xrunner.server.http.process import serve
try:
    serve(fake_app(fake_engine(FakeExecutor(fail_at=7))), "127.0.0.1", 0)
except XgptError as error:
    print(error)
    sys.exit(error.exit_code)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    with process:
        url = process.stderr.readline().split()[-1]
        body = {"model": "fake", "prompt": [5], "max_tokens": 4}
        assert httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=10).status_code == 500
        out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (4, "the engine has failed: RuntimeError: the device has gone\n")


def test_more_idle_sockets_than_files() -> None:
    process, url = start(files=256)
    with process, ExitStack() as idle:
        for _ in range(300):
            idle.enter_context(socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))))
        for _ in range(5):
            begin_s = time.monotonic()
            assert get(url, "/health") == 200
            assert time.monotonic() - begin_s < 3
        process.terminate()
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "cleaned up\n", "")


def test_too_few_files_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (80, 80))
    with pytest.raises(MachineError, match="80 open files are too few"):
        most_connections()


def test_a_stream_that_waits_long_for_its_first_token_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comments that keep such a stream alive were read as tokens."""
    monkeypatch.setattr(answer, "HEAD_S", 0.01)
    monkeypatch.setattr(answer, "COMMENT_S", 0.02)
    with running(fake_app(fake_engine(FakeExecutor(step_s=0.1)))) as url:
        (result,) = asyncio.run(replay(url, [ClientRequest([5, 6], None, 3)], concurrency=1))
    assert (result.error, result.token_ids) == (None, [11, 12, 13])
