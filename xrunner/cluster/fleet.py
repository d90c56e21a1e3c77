"""The workers of one replica, seen from the engine's process: started, told what to hold, watched."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
import uuid
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import zmq

from xgpt.errors import MachineError, XgptError
from xrunner.cluster import messages as m
from xrunner.cluster.agent_settings import AgentSettings, start_agent
from xrunner.cluster.deployment import Deployment
from xrunner.cluster.sockets import Secret, Sockets, free_port
from xrunner.executor import WorkerLost

SILENCE_S = 4.0
"""A worker that has said nothing for so long is taken for dead."""
START_S = 120.0
"""From starting the workers to the last one's first word."""
LOAD_S = 3600.0
"""From telling them what to hold to the last one's answer."""
RESTARTS = 3
PERIOD_S = 60.0
"""More than so many restarts in so short a time are no accident."""
POLL_MS = 50
FAREWELL_S = 5.0
"""For workers on other machines to answer that they know of the end."""


class DeploymentRefused(XgptError):
    """A worker cannot build its part; the message and the exit code are its own error's."""

    def __init__(self, loaded: m.Loaded) -> None:
        super().__init__(f"worker {loaded.worker}: {loaded.error}")
        self.exit_code = loaded.exit_code


@dataclass(slots=True)
class Member:
    """What is known of a worker: bytes that it has sent, seconds that it has executed steps, since it was started."""

    hello: m.Hello
    heard_s: float
    control_bytes: int = 0
    tensor_bytes: int = 0
    busy_s: float = 0.0

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine."""
        return self.hello.node == socket.gethostname()


@dataclass(slots=True)
class _Shared:
    """What the watching thread and the engine's share; `changed` is held to touch the rest."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    members: dict[int, Member] = field(default_factory=dict)
    loaded: dict[int, m.Loaded] = field(default_factory=dict)
    lost: str | None = None
    gone: set[int] = field(default_factory=set)
    """Workers on other machines that have said goodbye."""


class Fleet:
    """Starts workers, deploys to them, and says when one is lost.

    Args:
        num_workers: one for each device.
        num_nodes: machines they are on, as many on each; the others run an agent themselves.
        host: address of the interface that this machine's sockets bind to.
        rendezvous: address and port at which the machines meet; the workers then find the engine at the port behind
            it. None: on this machine, at any port.
        secret: what all machines share; None: a new one.
        first_device: number of the first device on this machine that is theirs.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        num_nodes: int = 1,
        host: str = "127.0.0.1",
        rendezvous: str | None = None,
        secret: Secret | None = None,
        first_device: int = 0,
    ) -> None:
        self.num_workers = num_workers
        self.host = host
        self.secret = secret or Secret.new()
        self._restarts: list[float] = []
        self._epoch = 0
        self._shared = _Shared()
        self._orders: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        self._closing = False
        self._looked_s = time.monotonic()
        self._sockets = Sockets(self.secret, host)
        port = None if rendezvous is None else int(rendezvous.rpartition(":")[2]) + 1
        self._socket, endpoint = self._sockets.bind(zmq.ROUTER, port)
        self._socket.router_handover = True  # a worker that is started anew has its predecessor's name
        self._agent = start_agent(
            AgentSettings(
                num_workers // num_nodes,
                num_nodes,
                rendezvous or f"{host}:{free_port(host)}",
                "xgpt" if rendezvous else str(uuid.uuid4()),
                endpoint,
                self.secret.private,
                host,
                first_device,
            )
        )
        self._watching = threading.Thread(target=self._watch, name="workers", daemon=True)
        self._watching.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self.close()

    # The engine's thread -------------------------------------------------------------------------------------

    @property
    def members(self) -> dict[int, Member]:
        """The workers that have started."""
        with self._shared.changed:
            return dict(self._shared.members)

    def check(self) -> None:
        """See whether all are well.

        Raises:
            WorkerLost: one is not.
        """
        if self._shared.lost is not None:
            raise WorkerLost(self._shared.lost)

    def deploy(self, deployment: Deployment, answers_to: str) -> dict[int, float]:
        """Have all workers build their parts, replacing what they hold; nothing may be under way.

        Returns:
            Seconds that each took.

        Raises:
            MachineError: the workers do not start.
            WorkerLost: one dies over it.
            DeploymentRefused: one cannot build its part.
        """
        members = self._await_all()
        content = deployment.model_dump_json().encode()
        with self._shared.changed:
            self._shared.loaded.clear()
        for worker in range(self.num_workers):
            seat = deployment.seat(worker) if worker < deployment.num_workers else None
            hands_on_to = [members[other].hello.inbox for other in (seat.hands_on_to if seat else ())]
            self._orders.put((worker, m.encode(m.Deploy(content, self._epoch, hands_on_to, answers_to))))
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(lambda: len(shared.loaded) == self.num_workers or shared.lost, LOAD_S)
            loaded = dict(shared.loaded)
        self.check()
        for answer in loaded.values():
            if answer.error:
                raise DeploymentRefused(answer)
        if len(loaded) < self.num_workers:
            raise MachineError(f"{self.num_workers - len(loaded)} workers have not loaded after {LOAD_S:.0f} s")
        return {worker: answer.seconds for worker, answer in loaded.items()}

    def restart(self) -> None:
        """End what is left of the workers and let the launcher start them all anew.

        Raises:
            MachineError: that has been necessary too often of late.
        """
        now = time.monotonic()
        self._restarts = [then for then in self._restarts if now - then < PERIOD_S]
        if len(self._restarts) >= RESTARTS:
            raise MachineError(
                f"workers have died {RESTARTS + 1} times within {PERIOD_S:.0f} s, the last time: {self._shared.lost}"
            )
        self._restarts.append(now)
        self._epoch += 1
        with self._shared.changed:
            members = list(self._shared.members.values())
            self._shared.members.clear()
            self._shared.lost = None
        _kill(members)

    def forgive(self) -> None:
        """Count restarts anew."""
        self._restarts.clear()

    def close(self) -> None:
        """End all workers of this machine, and their agent; tell those elsewhere to end."""
        if self._closing:
            return
        elsewhere = [worker for worker, member in self.members.items() if not member.is_here]
        for worker in elsewhere:
            self._orders.put((worker, m.encode(m.Stop())))
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: self._shared.gone.issuperset(elsewhere), FAREWELL_S)
        self._closing = True
        assert self._agent.stdin is not None
        self._agent.stdin.close()
        _kill(list(self.members.values()))
        try:
            self._agent.wait(5)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            self._agent.wait()
        self._watching.join()

    def _await_all(self) -> dict[int, Member]:
        shared = self._shared
        deadline = time.monotonic() + START_S
        with shared.changed:
            while len(shared.members) < self.num_workers:
                if self._agent.poll() is not None:
                    raise MachineError(f"the launcher of the workers has ended with exit code {self._agent.returncode}")
                if time.monotonic() > deadline:
                    missing = sorted(set(range(self.num_workers)) - set(shared.members))
                    raise MachineError(f"workers {missing} have not started within {START_S:.0f} s")
                shared.changed.wait(0.2)
            return dict(shared.members)

    # The watching thread -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        while not self._closing:
            ready = poller.poll(POLL_MS)
            with self._shared.changed:
                while ready and self._socket.poll(0):
                    sender, content = self._socket.recv_multipart()
                    self._hear(sender, m.decode_to_engine(content))
                self._look()
            while not self._orders.empty():
                worker, order = self._orders.get()
                self._socket.send_multipart([str(worker).encode(), order])
        self._sockets.close()

    def _hear(self, sender: bytes, message: m.ToEngine) -> None:
        shared = self._shared
        match message:
            case m.Hello():
                if message.worker in shared.members:
                    self._lose(f"worker {message.worker} has been started anew")
                shared.members[message.worker] = Member(message, time.monotonic())
                shared.changed.notify_all()
            case m.Loaded():
                shared.loaded[message.worker] = message
                shared.changed.notify_all()
            case m.Goodbye(worker):
                shared.gone.add(worker)
                shared.changed.notify_all()
            case m.Alive():
                member = shared.members.get(message.worker)
                if member is not None and message.incarnation == member.hello.incarnation:
                    member.heard_s = time.monotonic()
                    member.control_bytes, member.tensor_bytes = message.control_bytes, message.tensor_bytes
                    member.busy_s = message.busy_s

    def _look(self) -> None:
        """Notice who has died (on this machine: at once) or fallen silent."""
        now = time.monotonic()
        if now - self._looked_s > SILENCE_S / 4:  # it was we who did not run: nobody could be heard
            for member in self._shared.members.values():
                member.heard_s = now
        self._looked_s = now
        for worker, member in self._shared.members.items():
            if member.is_here and not _is_running(member.hello.pid):
                self._lose(f"worker {worker} has died")
            elif now - member.heard_s > SILENCE_S:
                self._lose(f"worker {worker} has been silent for {SILENCE_S:.0f} s")

    def _lose(self, why: str) -> None:
        if self._shared.lost is None:
            self._shared.lost = why
            self._shared.changed.notify_all()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return True


def _kill(members: list[Member]) -> None:
    for member in members:
        if member.is_here:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(member.hello.pid, signal.SIGKILL)
