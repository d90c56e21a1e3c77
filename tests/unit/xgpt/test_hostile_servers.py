"""Servers, files and values that do not end, or are none of their kind, are refused in a line and in bounded memory."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from xgpt.client import served_model
from xgpt.comparing.launched import find_engine
from xgpt.core.errors import InputError, MachineError
from xgpt.core.io import load_yaml
from xgpt.tuning import metrics
from xrunner.server.access.keys import ApiKeys


@pytest.fixture
def endless() -> Iterator[str]:
    """A server whose every answer is a line without an end."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            try:
                peer.recv(65536)
                peer.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
                while True:
                    peer.sendall(b"a" * 65536)
            except OSError:
                peer.close()

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


def test_an_answer_without_an_end_is_cut(endless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xgpt.connection.MOST_BYTES", 1 << 20)
    with pytest.raises(MachineError, match="over 1 MiB"):
        asyncio.run(served_model(endless, None))
    started = time.monotonic()
    assert metrics.read_page(endless) is None
    assert time.monotonic() - started < 2 * metrics.TIMEOUT_S


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


@pytest.mark.parametrize("text", ["services: &s\n  v: *s\n", "services: " + "[" * 100_000, "replicas: " + "9" * 5000])
def test_a_manifest_that_is_none_starts_no_engine(text: str) -> None:
    with pytest.raises(InputError, match="current"):
        find_engine(text)
