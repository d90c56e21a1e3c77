"""Servers, files and values that do not end, or are none of their kind, are refused in a line and in bounded memory."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.fakes import fake_plan
from xgpt.calibrating import read_loads
from xgpt.cli import cli
from xgpt.client import busy_of_workers, served_model
from xgpt.comparing.launched import find_engine
from xgpt.core.errors import InputError, MachineError
from xgpt.core.io import load_yaml
from xgpt.core.schema.tuning import WatchAlarm
from xgpt.metrics_pages import samples_of
from xgpt.tuning import metrics
from xgpt.tuning.watch import post
from xrunner.server.access.keys import ApiKeys
from xscheduler.replanning.replanner import observe_server

HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


@contextmanager
def answering(*pieces: bytes, every_s: float = 0.0) -> Iterator[str]:
    """A server that repeats the last of these pieces without an end."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            try:
                peer.recv(65536)
                for piece in chain(pieces, repeat(pieces[-1])):
                    peer.sendall(piece)
                    time.sleep(every_s)
            except OSError:
                peer.close()

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


ANSWERS = {
    "a line without an end": ((HEAD, b"a" * 65536), 0.0),
    "lines without an end": ((HEAD, b'vllm:num_requests_running{engine="1"} 1\n' * 1000), 0.0),
    "bytes of a body": ((HEAD, b"a"), 0.05),
    "bytes of a head": ((b"HTTP/1.1 200 OK\r\nx: ", b"a"), 0.05),
    "continue": ((b"HTTP/1.1 100 Continue\r\n\r\n",), 0.05),
    "nothing": ((b"",), 0.05),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_servers_of_others_answer_ends(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xgpt.connection.MOST_BYTES", 1 << 20)
    for limit in ("client.TIMEOUT_S", "client.ANSWER_TIMEOUT_S", "tuning.metrics.TIMEOUT_S", "tuning.watch.HOOK_S"):
        monkeypatch.setattr(f"xgpt.{limit}", 0.3)
    monkeypatch.setattr("xgpt.client.TOLD_WITHIN_S", 0.0)
    monkeypatch.setattr("xscheduler.replanning.replanner.ANSWER_S", 0.3)
    pieces, every_s = ANSWERS[answer]
    alarm = WatchAlarm(cause="rate", planned=1.0, observed=2.0, num_requests=9, text="")
    with answering(*pieces, every_s=every_s) as url:
        started = time.monotonic()
        with pytest.raises(MachineError):
            asyncio.run(served_model(url))
        with pytest.raises(MachineError):
            busy_of_workers(url)
        with pytest.raises(MachineError):
            observe_server(fake_plan(), url)
        assert metrics.read_page(url) is None
        assert not post(url, alarm)
        assert time.monotonic() - started < 6


@pytest.mark.parametrize(
    "make",
    [
        lambda: "vllm:num_requests_running{{{}}} 1\n".format(",".join(f'l{i}="1"' for i in range(200_000))),
        lambda: "".join(f"x{i} 1\n" for i in range(300_000)),
    ],
    ids=["labels", "families"],
)
def test_a_page_takes_little_time(make: Callable[[], str]) -> None:
    page = make()
    started = time.process_time()
    samples_of(page, metrics.KNOWN)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("text", ["a: 2026-99-99", 'a: !!int ""', "a: !!bool x", f"a: {'9' * 5000}", "[" * 5000])
def test_yaml_that_is_none_of_its_tag_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match="workload"):
        load_yaml(path, "workload")


def test_a_device_is_no_file_of_settings() -> None:
    with pytest.raises(InputError, match="256 MiB"):
        load_yaml(Path("/dev/zero"), "workload")


def test_keys_are_in_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "keys", 0o600)
    with pytest.raises(InputError, match="no regular file"):
        ApiKeys.read(tmp_path / "keys", [])


def doubled(first: str, each: str) -> str:
    return first + "".join(each.format(i, i - 1) for i in range(1, 42))


@pytest.mark.parametrize(
    "text",
    [
        "services: &s\n  v: *s\n",
        "services: " + "[" * 100_000,
        "replicas: " + "9" * 5000,
        doubled("a0: &a0 [x]\n", "a{0}: &a{0} [*a{1}, *a{1}]\n") + "services: *a41",
        doubled("A0=xx; ", "A{0}=$A{1}$A{1}; ") + "vllm serve $A41",
        "".join(f"A{i}=1\n" for i in range(2000)) + "vllm serve m",
        "echo a\\\x0c" * 8_000,
        "x" * 3000,
    ],
)
def test_a_manifest_that_is_none_starts_no_engine(text: str) -> None:
    with pytest.raises(InputError, match="current"):
        find_engine(text)


NESTED = ["[" * 100_000, '{"a":' * 500 + "1" + "}" * 500, '{"schema_version": ' + "9" * 5000]


@pytest.mark.parametrize("text", NESTED, ids=["lists", "objects", "digits"])
@pytest.mark.parametrize(
    "command",
    [
        "report {}",
        "simulate {}",
        "plan --model {} --cluster h200x1 --latency-bound 8",
        "plan --model llama-3.1-8b --cluster h200x1 --latency-bound 8 --workload {}",
        "compare --cluster h200x1 --latency-bound 8 --current 'vllm serve llama-3.1-8b --hf-overrides {text}'",
        "compare --cluster h200x1 --latency-bound 8 --current 'vllm serve llama-3.1-8b --speculative-config {text}'",
    ],
)
def test_json_that_nests_is_refused_in_a_line(command: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    words = [word.replace("{}", str(path)).replace("{text}", f'"{text}"') for word in shlex.split(command)]
    with pytest.raises(InputError, match="measured"):
        read_loads(path)
    result = CliRunner().invoke(cli, words)
    assert isinstance(result.exception, InputError), result.exception
    assert "\n" not in str(result.exception)
