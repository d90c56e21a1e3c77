"""Attacks by HTTP on a server of one device: what they get, and what others feel of it."""

from __future__ import annotations

import json
import multiprocessing
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.attack.target import ADMIN_KEY, Felt, Target, attacked

MIB = 1 << 20
FELT_S, TIMES_CALM = 1.0, 5
"""What a stream and a probe may feel: so much, or so many times what they feel before, where cores are busy."""


@pytest.fixture(scope="module")
def target(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("http")
    own = shutil.copytree(checkpoint, directory / "small")
    tokenizer = Tokenizer.from_file(str(own / "tokenizer.json"))
    tokenizer.add_tokens(["y" * 300])  # so that a text of 300 times the context is not refused by its length alone
    tokenizer.save(str(own / "tokenizer.json"))
    with attacked("one", own, directory) as target:
        yield target


@contextmanager
def unharmed(target: Target, mib: float) -> Iterator[Felt]:
    """The block leaves others' answers, the probe's tokens and the memory (but for so many MiB) as they were."""
    before, rss = target.probe(), target.rss_bytes()
    peak, over = [rss], threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            peak.append(target.rss_bytes())

    with target.felt() as calm:
        time.sleep(2)
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        with target.felt() as felt:
            yield felt
    finally:
        over.set()
        watching.join()
    grown = (max(peak) - rss) / MIB
    print(
        f"gap {calm.longest_gap_s:.3f} -> {felt.longest_gap_s:.3f} s, "
        f"/health {calm.slowest_health_s:.3f} -> {felt.slowest_health_s:.3f} s, memory +{grown:.0f} MiB"
    )
    assert felt.failures == []
    assert target.probe() == before
    assert felt.longest_gap_s < max(FELT_S, TIMES_CALM * calm.longest_gap_s)
    assert felt.slowest_health_s < max(FELT_S, TIMES_CALM * calm.slowest_health_s)
    assert grown < mib


def connect(address: tuple[str, int], timeout_s: float = 30.0) -> socket.socket:
    return socket.create_connection(address, timeout=timeout_s)


def request(body: Any, *, method: str = "POST", length: int | None = None, extra: str = "", path: str = "") -> bytes:
    """A whole request; `length`: another Content-Length than its body's."""
    content = body if isinstance(body, bytes) else json.dumps({"model": "small", **body}).encode()
    lines = [
        f"{method} {path or '/v1/completions'} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {ADMIN_KEY}",
        f"Content-Length: {len(content) if length is None else length}",
    ]
    return "\r\n".join([*lines, extra + "\r\n"]).encode() + content


def read_all(client: socket.socket) -> bytes:
    parts = []
    try:
        while part := client.recv(1 << 16):
            parts.append(part)
    except OSError:
        pass
    return b"".join(parts)


def elsewhere(attack: Callable[..., Any], *arguments: Any) -> Any:
    """What an attack returns that runs in a process of its own: it would hold up what is felt here."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(attack, *arguments).result(timeout=200)


def statuses(address: tuple[str, int], requests: list[bytes], at_once: int = 60) -> list[int]:
    """Sends each on a connection of its own; 0: no answer."""

    def ask(raw: bytes) -> int:
        with connect(address) as client:
            try:
                client.sendall(raw)
                answer = HTTPResponse(client)
                answer.begin()
                answer.read()
                return answer.status
            except (OSError, HTTPException):
                return 0

    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(ask, requests))


@pytest.mark.long
def test_idle_sockets(target: Target) -> None:
    """More than there are files; the system's limit falls below what the server counts on, too."""
    before = resource.prlimit(target.served.process.pid, resource.RLIMIT_NOFILE)
    num_lines = len(target.served.lines)
    with ExitStack() as clients:
        try:
            resource.prlimit(target.served.process.pid, resource.RLIMIT_NOFILE, (256, before[1]))
            with target.felt() as felt:
                idle = [clients.enter_context(connect(target.address)) for _ in range(300)]
                time.sleep(20)  # accepts fail until the first ten seconds are over
        finally:
            resource.prlimit(target.served.process.pid, resource.RLIMIT_NOFILE, before)
        assert all(read_all(client) == b"" for client in idle)
        assert target.ask("GET", "/health", timeout_s=5)[0] == 200
    said = sum(map(len, target.served.lines[num_lines:]))
    print(f"/health {felt.slowest_health_s:.1f} s, {said} bytes of log")
    assert felt.slowest_health_s < 13 and said < 300_000
    target.probe()


def send_unfinished(address: tuple[str, int], count: int) -> None:
    raw = request(b" " * (15 * MIB), length=16 * MIB)
    with ExitStack() as clients:

        def begin(_: int) -> None:
            client = clients.enter_context(connect(address))
            with suppress(OSError):
                client.sendall(raw)

        with ThreadPoolExecutor(16) as threads:
            list(threads.map(begin, range(count)))
        time.sleep(1)


def test_unfinished_bodies(target: Target) -> None:
    with unharmed(target, mib=300):
        elsewhere(send_unfinished, target.address, 60)


def test_long_prompts(target: Target) -> None:
    """As long as any that is not refused by its length alone."""
    requests = [request({"prompt": "the quick brown fox " * 7_500}) for _ in range(60)]
    with unharmed(target, mib=300):
        found = elsewhere(statuses, target.address, requests * 5)
    assert set(found) == {400}
