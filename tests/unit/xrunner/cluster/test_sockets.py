"""Addresses of the control plane."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import pytest
import zmq

from tests.rings import LOOPBACKS
from xgpt.core import network
from xgpt.core.errors import MachineError
from xrunner.cluster import sockets


@pytest.mark.parametrize("host", LOOPBACKS)
def test_a_machine_finds_its_address_and_its_interface(host: str) -> None:
    assert network.address_towards(host) == host
    assert network.interface_of(host) == "lo"
    with network.listen_towards(host, 0) as listener:
        network.reach(network.address_text(*listener.getsockname()[:2]))


def test_an_interface_that_no_address_has() -> None:
    assert network.interface_of("fd12::7") is None and network.interface_of("192.0.2.7") is None


@pytest.mark.parametrize("text", ["", ":1", "a:b", "[::1", "host:70000", "a/b", "user@host", "[::1]x", "fd00::1:x"])
def test_a_text_that_is_no_address(text: str) -> None:
    with pytest.raises(ValueError):
        network.split_address(text, 1)


def test_a_name_that_is_not_known_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's name is published seconds after its processes start."""
    unknown = [socket.gaierror(socket.EAI_NONAME, "Name or service not known")] * 2
    both = (socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1")

    def resolved(*_: Any, **__: Any) -> list[Any]:
        if unknown:
            raise unknown.pop()
        return [(family, socket.SOCK_DGRAM, 17, "", (address, 1)) for family, address in both]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert network.address_towards("leader-0.group.ns") == "127.0.0.1"
    unknown[:] = [socket.gaierror(socket.EAI_NONAME, "Name or service not known")]
    with pytest.raises(MachineError, match="there is no route to leader"):
        network.address_towards("leader-0.group.ns", named_within_s=-1)


GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00CURVE" + b"\0" * 15 + b"\0" * 32
"""What a ZeroMQ client that asks for CURVE begins with."""


def sent_before_it_is_cut_off(stranger: socket.socket) -> int:
    """Send a frame of a gibibyte to a listener that does not know us, and return how many bytes it took."""
    stranger.settimeout(10)
    count = 0
    with suppress(OSError):
        stranger.sendall(GREETING)
        stranger.sendall(b"\x06" + (1 << 30).to_bytes(8, "big"))
        while count < 1 << 30:
            count += stranger.send(b"x" * 65536)
    return count


@pytest.mark.parametrize("max_bytes", [sockets.CONTROL_BYTES, sockets.DATA_BYTES])
def test_a_stranger_cannot_fill_the_memory_through_a_port(max_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1.5 GiB were taken before the key was checked."""
    monkeypatch.setattr(sys, "platform", "another")  # which has no abstract Unix sockets
    opened = sockets.Sockets(sockets.Secret.new(), "127.0.0.1")
    try:
        _, endpoint = opened.bind(zmq.ROUTER, max_bytes)
        with socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2]))) as stranger:
            assert sent_before_it_is_cut_off(stranger) < 16 << 20
    finally:
        opened.close()


@pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are Linux's")
def test_a_listener_on_loopback_has_no_port_and_keeps_other_users_out() -> None:
    secret = sockets.Secret.new()
    opened = sockets.Sockets(secret, "127.0.0.1")
    try:
        listener, endpoint = opened.bind(zmq.PULL)
        assert endpoint.startswith("ipc://@")
        with socket.socket(socket.AF_UNIX) as stranger:  # of the same user, without the secret
            stranger.connect("\0" + endpoint.removeprefix("ipc://@"))
            assert sent_before_it_is_cut_off(stranger) < 16 << 20
        if os.getuid() == 0:
            answer = subprocess.run(
                [sys.executable, "-c", AS_ANOTHER_USER, endpoint.removeprefix("ipc://@")],
                capture_output=True,
                text=True,
            )
            assert answer.stdout.strip() in ("b''", "ConnectionResetError"), answer.stderr
        opened.connect(zmq.PUSH, endpoint).send(b"known")
        assert listener.poll(10_000) and listener.recv() == b"known"
    finally:
        opened.close()


AS_ANOTHER_USER = """
import os, socket, sys
os.setuid(65534)
client = socket.socket(socket.AF_UNIX)
client.settimeout(10)
client.connect(chr(0) + sys.argv[1])
try:
    print(client.recv(10))
except OSError as error:
    print(type(error).__name__)
"""
