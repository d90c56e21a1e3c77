"""Addresses of the control plane."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from xgpt.core.errors import MachineError
from xrunner.cluster import sockets


def test_a_name_that_is_not_known_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's name is published seconds after its processes start."""
    unknown = [socket.gaierror(socket.EAI_NONAME, "Name or service not known")] * 2

    class Opened(socket.socket):
        def connect(self, address: Any) -> None:
            if unknown:
                raise unknown.pop()
            super().connect(("127.0.0.1", 1))

    monkeypatch.setattr(socket, "socket", Opened)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert sockets.address_towards("leader-0.group.ns") == "127.0.0.1"
    unknown[:] = [socket.gaierror(socket.EAI_NONAME, "Name or service not known")]
    with pytest.raises(MachineError, match="there is no route to leader"):
        sockets.address_towards("leader-0.group.ns", named_within_s=-1)
