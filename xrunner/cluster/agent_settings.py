"""What an agent is told, and how it is started; apart from `agent`, which imports the launcher."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

from xrunner.cluster.sockets import interface_of


class AgentSettings(msgspec.Struct, frozen=True):
    """One line of JSON on an agent's standard input.

    Attributes:
        num_workers: on this machine.
        num_nodes: machines that the replica's workers are on.
        rendezvous: address and port at which all machines meet.
        run: names the replica among those that meet there.
        is_host: whether this machine keeps the place where they meet.
        engine, secret, host, first_device: see `process.Settings`.
    """

    num_workers: int
    num_nodes: int
    rendezvous: str
    run: str
    engine: str
    secret: bytes
    host: str
    first_device: int = 0
    is_host: bool = True


def start_agent(settings: AgentSettings) -> subprocess.Popen[bytes]:
    """An agent with its settings told. It ends, and all of its workers with it, when its input is closed."""
    interface = interface_of(settings.host)
    # Workers that are killed leave a semaphore behind, which the launcher's tracker removes, but complains of.
    environment = os.environ | {"PYTHONWARNINGS": "ignore:resource_tracker:UserWarning"}
    if not os.environ.get("XGPT_DEBUG"):
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it would tell of every peer that has gone, at length
    if interface is not None:
        environment |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    command = [sys.executable, "-m", "xrunner.cluster.agent"]
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    assert agent.stdin is not None
    agent.stdin.write(msgspec.json.encode(settings) + b"\n")
    agent.stdin.flush()
    return agent
