"""Attacks beside the requests: the log's pipe, signals, names that others choose, files and planners."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.lib.served_plans import left_over, one_lane, plan
from tests import fake_vllm
from tests.attack.client import connect, read_all, request
from tests.attack.target import FAKE_VLLM, FLAVOURS, OURS, PROBE, Target, attacked
from tests.fakes import eventually
from xgpt.checkpoints.files import read_spec
from xgpt.core.io import dump_json
from xgpt.core.processes import free_port, run_module
from xrunner.vllm.process import PYTHON_VARIABLE

STARTS = (*FLAVOURS, FAKE_VLLM)


def start(
    flavour: str,
    checkpoint: Path,
    directory: Path,
    *options: str,
    stderr: int | None = subprocess.DEVNULL,
    before: Callable[[], object] | None = None,
) -> subprocess.Popen[bytes]:
    """A server that is only being started."""
    environment = dict(os.environ)
    if flavour == FAKE_VLLM:
        environment[PYTHON_VARIABLE] = str(fake_vllm.program(directory))
        options += ("--engine", "vllm")
    model = read_spec(checkpoint)
    made_plan = FLAVOURS.get(flavour, lambda model: plan(one_lane([1]), model=model))(model)
    path = directory / "plan.json"
    path.write_text(dump_json(made_plan.model_copy(update={"checkpoint": str(checkpoint)})))
    command = [*run_module("xgpt"), "serve", str(path), "--port", "0", *options]
    return subprocess.Popen(command, stderr=stderr, env=environment, start_new_session=True, preexec_fn=before)


@pytest.mark.long
@pytest.mark.point(24)
def test_a_hangup_ends_no_server_and_a_log_that_is_not_read_holds_up_no_request(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Without a key file, or before the server had started, SIGHUP ended it. A pipe of 4 KiB was full after a dozen
    requests, and the server stood still."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    process = start("one", checkpoint, tmp_path, "--no-replan", stderr=writing)
    os.close(writing)
    try:
        status = Path(f"/proc/{process.pid}/status")
        # It has read its options, and checks the plan or builds the engine.
        assert eventually(lambda: int(status.read_text().split("SigCgt:")[1].split()[0], 16) & 1 == 1, 60)
        said = b""
        while b"listening on " not in said:
            process.send_signal(signal.SIGHUP)
            said += (read := os.read(reading, 4096))
            assert read, process.wait(10)
        process.send_signal(signal.SIGHUP)
        host, port = said.rpartition(b"http://")[2].decode().split()[0].split(":")
        assert httpx.get(f"http://{host}:{port}/health", trust_env=False).status_code == 200
        for _ in range(100):
            with connect((host, int(port)), 20) as client:
                client.sendall(b"GET /v1/nothing HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                assert read_all(client).startswith(b"HTTP/1.1 404")
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reading)


@pytest.mark.long
@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_what_a_server_is_started_with(closed: tuple[int, ...], checkpoint: Path, tmp_path: Path) -> None:
    """Without standard error, the server ended with an internal error that nobody could read. With blocked signals,
    only SIGKILL ended it. Modules in the current directory were run.
    """
    here = tmp_path / "here"
    here.mkdir()
    for name in ("msgspec", "numpy", "tokenizers", "torch", "xrunner"):
        (here / f"{name}.py").write_text("open('ran', 'w')\n")

    def before() -> None:
        os.chdir(here)
        for number in closed:
            os.close(number)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())

    port = free_port()
    process = start("one", checkpoint, tmp_path, "--no-replan", "--port", str(port), stderr=None, before=before)
    try:
        body = {"model": read_spec(checkpoint).name, "prompt": [3, 5], "max_tokens": 2}

        def answers() -> bool:
            with suppress(httpx.TransportError):
                url = f"http://127.0.0.1:{port}/v1/completions"
                return httpx.post(url, json=body, timeout=20, trust_env=False).status_code == 200
            return False

        assert eventually(answers, 120)
        process.terminate()
        assert process.wait(30) == 0
        assert not (here / "ran").exists()
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.point(20)
@pytest.mark.parametrize("flavour", STARTS)
def test_sigterm_whenever_it_comes_leaves_nothing(flavour: str, checkpoint: Path, tmp_path: Path) -> None:
    """While it is imported, while workers start, while they load, and once more soon after."""
    generator = random.Random(0)
    for number in range(4):
        process = start(flavour, checkpoint, tmp_path, "--no-replan")
        time.sleep(generator.uniform(0.2, 8))
        process.terminate()
        if number % 2:
            time.sleep(generator.uniform(0, 0.5))
            process.terminate()
        try:
            assert process.wait(45) in (0, 130, -signal.SIGTERM)
            end_s = time.monotonic() + 40
            while (found := left_over(process.pid, ())) and time.monotonic() < end_s:
                time.sleep(0.2)
            assert found == []
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.long
@pytest.mark.point(20)
@pytest.mark.parametrize("seed", range(4))
def test_sigterm_while_workers_are_deployed_anew(seed: int, checkpoint: Path, tmp_path: Path) -> None:
    """To a pipeline and back, all the time; what has arrived is answered, and nothing is left."""
    model = read_spec(checkpoint)
    paths = [tmp_path / f"{name}.json" for name in ("pp", "tp")]
    for path, degrees in zip(paths, ([1, 1], [2]), strict=True):
        subject = plan(one_lane(degrees), model=model).model_copy(update={"checkpoint": str(checkpoint)})
        path.write_text(dump_json(subject))
    command = [sys.executable, "-m", "tests.attack.to_and_fro", *map(str, paths), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    said: list[str] = []
    reading = threading.Thread(target=lambda: said.extend(process.stderr or ()))
    reading.start()
    try:
        assert eventually(lambda: any("listening on " in line for line in said), 60)
        (listening,) = (line for line in said if "listening on " in line)
        url = f"http://{listening.rpartition('http://')[2].strip()}/v1/completions"
        answers: list[int] = []

        def ask() -> None:
            for _ in range(2):
                with suppress(httpx.TransportError):
                    body = {"model": model.name, "prompt": [3, 5], "max_tokens": 8, "ignore_eos": True}
                    answers.append(httpx.post(url, json=body, timeout=90, trust_env=False).status_code)

        with ThreadPoolExecutor(8) as pool:
            for _ in range(8):
                pool.submit(ask)
            assert eventually(lambda: any("re-planned" in line for line in said), 30)
            time.sleep(random.Random(seed).uniform(0, 3))
            process.terminate()
        assert process.wait(60) == 0
        assert len(answers) >= 8 and set(answers) <= {200, 503}
        assert not any("Traceback" in line for line in said), said
        assert eventually(lambda: left_over(process.pid, ()) == [], 40)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reading.join()
        process.stderr.close()


@pytest.fixture(scope="module", params=OURS)
def target(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Target:  # type: ignore[misc]
    """Of a model whose name is markup, with keys of all characters that a name may have."""
    directory = tmp_path_factory.mktemp("names")
    named = shutil.copytree(checkpoint, directory / NAME)
    with attacked(request.param, named, directory, keys="a.b@c-d_e alices-alices-alices\n") as running:
        yield running


NAME = "<script>alert(1)<|script>\n\x1b[31m{{7*7}}\"'"


@pytest.mark.long
def test_names_of_others_stay_names(target: Target) -> None:
    """Of the model, in pages, logs, metrics and answers; ids of requests and traces that forge lines."""
    before = target.probe()
    status, page = target.ask("GET", "/")
    assert status == 200 and b"<script>alert" not in page and b"{{7*7}}" in page
    hostile = [
        "a\x1b[2Jb",
        "a\tb",
        "\xe4\xf6",
        "x" * 10_000,
        '","level":"error',
        "0" * 128,
        "%0d%0aSet-Cookie:a=b",
        "${jndi:x}",
    ]
    traces = ["00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ff-x", "00-" + "g" * 32, "-" * 5000, "00-\xe4-1-1"]
    for id_ in hostile:
        for trace in traces:
            extra = f"X-Request-Id: {id_}\r\ntraceparent: {trace}\r\ntracestate: {'a=b,' * 100}\r\n"
            body = {"model": target.model, "prompt": [3], "max_tokens": 1}
            sent = request(body, extra=extra + "Connection: close\r\n")
            with connect(target.address) as client:
                client.sendall(sent)
                head = read_all(client).partition(b"\r\n\r\n")[0]
            assert head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400")), head[:200]
            assert b"Set-Cookie:" not in head.replace(b"%0d%0aSet-Cookie:a=b", b"") and b"\x1b" not in head
    assert target.ask("POST", f"/{NAME.encode().hex()}/%1b%0a%0d", b"{}")[0] in (404, 405)
    asked = {"Authorization": "Bearer alices-alices-alices", "Content-Type": "application/json"}
    assert target.ask("POST", "/v1/completions", {"model": target.model, **PROBE}, asked)[0] == 200
    _, metrics = target.ask("GET", "/metrics")
    families = list(text_string_to_metric_families(metrics.decode()))
    labels = {sample.labels.get("key") for family in families for sample in family.samples}
    assert "a.b@c-d_e" in labels
    assert target.probe() == before
    assert eventually(lambda: any('"key":"a.b@c-d_e"' in line for line in target.served.lines))
    for line in list(target.served.lines):
        assert "\x1b" not in line
        if line.startswith("{"):
            json.loads(line)


@pytest.mark.long
def test_hang_ups_without_end(target: Target) -> None:
    """300 in a second, during requests; each reads the keys anew."""
    with target.felt() as felt:
        for _ in range(300):
            target.served.process.send_signal(signal.SIGHUP)
            time.sleep(0.002)
        time.sleep(0.5)
    assert felt.failures == []


@pytest.mark.long
def test_clients_that_go_at_once(target: Target) -> None:
    """200 requests whose clients leave in the head, the body, or the answer, some with a reset."""
    before = target.probe()
    raw = request(
        {"model": target.model, "prompt": [3, 4], "max_tokens": 200, "n": 2, "ignore_eos": True, "stream": True}
    )
    generator = random.Random(0)
    with target.felt() as felt, ExitStack() as late:
        for number in range(200):
            client = connect(target.address)
            client.sendall(raw[: generator.choice((10, 60, len(raw) - 1, len(raw), len(raw)))])
            if number % 3 == 0:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if number % 5 == 0:
                late.enter_context(client)
            else:
                client.close()
    assert felt.failures == []
    assert eventually(target.is_idle)  # the memory is free a step after the front has counted the last request
    assert target.probe() == before


@pytest.mark.long
def test_files_that_are_none(checkpoint: Path, tmp_path: Path) -> None:
    """What a stranger's checkpoint brings ends in one line, not in a traceback."""
    deep = b"[" * 1_000_000
    for name, content in {
        "generation_config.json": deep,
        "tokenizer_config.json": deep,
        "tokenizer.json": deep,
        "chat_template.jinja": b"{% for %}",
        "model.safetensors": (2**63).to_bytes(8, "little"),
    }.items():
        small = shutil.copytree(checkpoint, tmp_path / name / "small")
        (small / name).write_bytes(content)
        subject = plan(one_lane([1]), model=read_spec(checkpoint)).model_copy(update={"checkpoint": str(small)})
        (tmp_path / "plan.json").write_text(dump_json(subject))
        command = [sys.executable, "-m", "xgpt", "serve", str(tmp_path / "plan.json"), "--port", "0", "--no-replan"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 2, (name, ended.stderr)
        assert ended.stderr.splitlines()[-1].startswith("xgpt: "), name
