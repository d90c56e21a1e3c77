"""Run one vLLM on several machines: the first machine has the engine, and the others start workers when the engine
starts.

vLLM's own flags (`--nnodes`, `--node-rank`, `--master-addr`) join its workers. vLLM does not restart itself, and its
workers may wait for ever for a lost worker. So each other machine has a connection to the first machine, and starts its
workers on command. If one end of a connection is lost, the other end stops its part of vLLM, and connects again.
"""

from __future__ import annotations

import hmac
import logging
import select
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

import msgspec

from xgpt.core.errors import MachineError, reason_of
from xgpt.core.io import sha256
from xgpt.core.network import address_text, address_towards, interface_of, listen_towards
from xgpt.core.schema import Plan
from xrunner.vllm.command import Launch
from xrunner.vllm.process import Reader, package_path, preload, python, run_directory, started

logger = logging.getLogger(__name__)

START, STOP, REFUSED = b"start\n", b"stop\n", b"refused\n"
"""Messages from the first machine. They tell the receiver to start its workers, to end for good, or that it is refused.
It is refused if it has another plan, or if its rank is in use.
"""
GREETING_BYTES = 256
GREET_S = 5.0
MEET_S = 600.0
RETRY_S, LOOK_S = 0.5, 0.5
KEEPALIVE = {
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPALIVE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)  # TCP_KEEPALIVE is macOS's name
}


@dataclass(frozen=True)
class Machines:
    """The machines that run one vLLM, and this machine's number among them.

    Attributes:
        host, port: address of the first machine, and port to which the others connect. vLLM uses the next port.
    """

    count: int
    rank: int
    host: str
    port: int

    @property
    def address(self) -> str:
        return address_text(self.host, self.port)

    def spread(self, launch: Launch) -> Launch:
        """Return how to start this machine's part of a vLLM."""
        address = address_towards(self.host)
        interface = interface_of(address) or ""
        flags = (
            *("--distributed-executor-backend", "mp", "--nnodes", str(self.count), "--node-rank", str(self.rank)),
            *("--master-addr", self.host, "--master-port", str(self.port + 1)),
        )
        variables = {
            "VLLM_HOST_IP": address,
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # `host` has a store, so torch's workers need not open one
        }
        return replace(launch, arguments=launch.arguments + flags, variables=launch.variables | variables)


class _Greeting(msgspec.Struct):
    rank: int
    plan_sha256: str


class Followers:
    """The first machine's connections to the other machines, for one start of the engine."""

    def __init__(self, machines: Machines, plan: Plan, is_over: Callable[[], bool] = lambda: False) -> None:
        self._machines = machines
        self._digest = _digest(plan)
        self._is_over = is_over
        self._connections: dict[int, socket.socket] = {}
        try:
            self._listener = listen_towards(machines.host, machines.port)
        except OSError as error:
            raise MachineError(
                f"cannot listen on {machines.address}: {reason_of(error)}; give this machine's address "
                "and a free port as `master_addr`"
            ) from None
        self._listener.settimeout(RETRY_S)

    def start(self) -> None:
        """Wait for all machines, then make them start their workers."""
        until_s = time.monotonic() + MEET_S
        while missing := sorted(set(range(1, self._machines.count)) - self._connections.keys()):
            if self._is_over() or time.monotonic() > until_s:
                raise MachineError(
                    f"machines {missing} have not connected to this one within {MEET_S:.0f} s: start `xgpt serve` with "
                    "--node-rank on each, and check that --master-addr reaches this machine"
                )
            with suppress(OSError):
                self._greet(self._listener.accept()[0])
            for rank in self._gone():
                self._connections.pop(rank).close()
        self._tell(START)

    def why_ended(self) -> str | None:
        gone = self._gone()
        return f"the workers of machine {gone[0]} have ended, or the network has cut it off" if gone else None

    def close(self, *, for_good: bool) -> None:
        """Make all other machines end their workers. Unless `for_good`, these machines then connect again."""
        if for_good:
            self._tell(STOP)
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._listener.close()

    def _tell(self, what: bytes) -> None:
        for connection in self._connections.values():
            with suppress(OSError):
                connection.sendall(what)

    def _greet(self, connection: socket.socket) -> None:
        connection.settimeout(GREET_S)
        try:
            greeting = msgspec.json.decode(_line(connection), type=_Greeting)
        except (OSError, msgspec.MsgspecError):
            connection.close()
            return
        is_expected = 0 < greeting.rank < self._machines.count and greeting.rank not in self._connections
        if not is_expected or not hmac.compare_digest(greeting.plan_sha256, self._digest):
            with suppress(OSError):
                connection.sendall(REFUSED)
            connection.close()
            return
        _keep_alive(connection)
        self._connections[greeting.rank] = connection

    def _gone(self) -> list[int]:
        """A readable connection has ended, since machines send no messages after their greeting."""
        if not self._connections:
            return []
        ready, _, _ = select.select(list(self._connections.values()), [], [], 0)
        return sorted(rank for rank, connection in self._connections.items() if connection in ready)


def follow(plan: Plan, machines: Machines, launch: Launch, is_over: Callable[[], bool]) -> None:
    """Start this machine's workers whenever the first machine starts the engine, until the first machine sends `STOP`.

    Args:
        is_over: called twice a second. When it returns True, this function returns.

    Raises:
        MachineError: the first machine has another plan, or cannot be reached.
    """
    greeting = msgspec.json.encode(_Greeting(machines.rank, _digest(plan))) + b"\n"
    refused_s: float | None = None
    while not is_over():
        connection = _connected(machines, is_over)
        if connection is None:
            return
        with connection:
            connection.sendall(greeting)
            match _next(connection, is_over):
                case b"start\n":
                    refused_s = None
                    if not _run(launch, connection, is_over):
                        return
                case b"stop\n":
                    return
                # The first machine may not have noticed yet that this machine's previous connection was lost.
                case b"refused\n":
                    refused_s = refused_s or time.monotonic()
                    if time.monotonic() > refused_s + GREET_S:
                        says = f"node rank {machines.rank} is taken or too high, or that machine has another plan"
                        raise MachineError(f"{machines.address} refuses this machine: {says}")
        time.sleep(RETRY_S)


def _connected(machines: Machines, is_over: Callable[[], bool]) -> socket.socket | None:
    until_s = time.monotonic() + MEET_S
    while not is_over():
        try:
            connection = socket.create_connection((machines.host, machines.port), timeout=GREET_S)
        except OSError as error:
            if time.monotonic() > until_s:
                raise MachineError(
                    f"cannot reach {machines.address}: {reason_of(error)}; start `xgpt serve` there with "
                    "--node-rank 0, and check `master_addr`"
                ) from None
            time.sleep(RETRY_S)
        else:
            _keep_alive(connection)
            return connection
    return None


def _run(launch: Launch, connection: socket.socket, is_over: Callable[[], bool]) -> bool:
    """Run this machine's workers until they end, the first machine ends them, or `is_over` returns True.

    Returns:
        Whether to connect again.
    """
    vllm_python = python()
    with ExitStack() as at_end:
        directory = at_end.enter_context(run_directory())
        packages = at_end.enter_context(package_path(directory))
        variables = {"VLLM_RPC_BASE_PATH": str(directory)} | launch.variables | preload(vllm_python)
        reader = Reader(at_end.enter_context(started(launch.command(vllm_python, str(directory)), packages, variables)))
        while not is_over():
            if reader.process.poll() is not None:
                logger.error("this machine's workers have ended: %s", reader.last_error())
                return True
            if select.select([connection], [], [], LOOK_S)[0]:
                return _next(connection, is_over) != STOP
        return False


def _next(connection: socket.socket, is_over: Callable[[], bool]) -> bytes:
    while not is_over():
        if select.select([connection], [], [], LOOK_S)[0]:
            with suppress(OSError):
                return _line(connection)
            return b""
    return b""


def _line(connection: socket.socket) -> bytes:
    """Return a line, read byte by byte so that no later bytes are read. Raises OSError."""
    line = b""
    while not line.endswith(b"\n") and len(line) < GREETING_BYTES:
        byte = connection.recv(1)
        if not byte:
            break
        line += byte
    return line


def _digest(plan: Plan) -> str:
    """Return a digest that is equal for equal plans, even if machines store the weights in different places."""
    return sha256(plan.deployed(checkpoint=None))


def _keep_alive(connection: socket.socket) -> None:
    connection.settimeout(GREET_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
