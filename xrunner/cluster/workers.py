"""Start, deploy and watch the workers of one replica, from the engine's process."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Collection
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import zmq

from xgpt.core.errors import MachineError, XgptError
from xgpt.core.processes import is_at_work, too_often
from xrunner.cluster import messages as m
from xrunner.cluster.deployment import Deployment
from xrunner.cluster.launching import THIS_MACHINE, LauncherSettings, MachineGroup, MachineLauncher, StartWorkers
from xrunner.cluster.sockets import CONTROL_BYTES, Secret, Sockets, Wakeup
from xrunner.cluster.store import EpochKeys
from xrunner.executor import WorkerLost

SILENCE_S = 4.0
"""Seconds of silence after which a worker counts as lost, unless the operating system shows that it is working."""
BUSY_S = 60.0
"""The same for a worker that the operating system shows to be working, or that loads its part on another machine."""
START_S = 120.0
"""Seconds within which all workers must start. The time in which their launchers are starting or working does not
count.
"""
LOAD_S = 3600.0
RESTARTS = 3
PERIOD_S = 60.0
"""Seconds. After more than `RESTARTS` restarts within this time, the server ends."""
POLL_MS = 50


class DeploymentRefused(XgptError):
    def __init__(self, loaded: m.Loaded) -> None:
        super().__init__(f"worker {loaded.worker}: {loaded.error}")
        self.exit_code = loaded.exit_code


@dataclass(slots=True)
class WorkerStatus:
    hello: m.Hello
    sender: bytes
    heard_s: float
    control_bytes: int = 0
    tensor_bytes: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class _Shared:
    """State that the watching thread and the engine's thread share. Hold `changed` to access the other fields.

    Attributes:
        unstarted: index of the machine, if its launcher was lost before any of its workers had started. None for other
            losses.
    """

    changed: threading.Condition = field(default_factory=threading.Condition)
    epoch: int = 1
    members: dict[int, WorkerStatus] = field(default_factory=dict)
    loaded: dict[int, m.Loaded] = field(default_factory=dict)
    prepared: dict[int, dict[int, str]] = field(default_factory=dict)
    lost: str | None = None
    unstarted: int | None = None


class RestartBudget:
    """Limits the number of restarts. The loss of a machine counts as one restart, although it may be noticed twice:
    first by its silent workers, then by its lost launcher.
    """

    def __init__(self) -> None:
        self._restarts: list[float] = []
        self._noticed: set[int] = set()

    def spend(self, lost: str | None, unstarted: int | None) -> None:
        """Count a restart after a loss.

        Raises:
            MachineError: there have already been `RESTARTS` restarts within the last `PERIOD_S` seconds.
        """
        if unstarted is not None and unstarted not in self._noticed:
            self._noticed.add(unstarted)
            return
        self._noticed.clear()
        if too_often(self._restarts, RESTARTS, PERIOD_S):
            raise MachineError(f"workers have died {RESTARTS + 1} times within {PERIOD_S:.0f} s, the last time: {lost}")


class _PreparedGrammar:
    """A handle of a grammar. Workers keep the grammar compiled as long as the handle is referenced."""


class Workers:
    """Starts workers, deploys a plan's parts to them, and detects when a worker is lost."""

    def __init__(
        self, num_workers: int, *, host: str = "127.0.0.1", first_device: int = 0, machines: MachineGroup = THIS_MACHINE
    ) -> None:
        self.num_workers = num_workers
        self.host = host
        self.secret = Secret.new()
        self._machines = machines
        self._budget = RestartBudget()
        self._shared = _Shared()
        self._orders: SimpleQueue[tuple[bytes, bytes]] = SimpleQueue()
        self._closing = False
        self._looked_s = time.monotonic()
        self._sockets = Sockets(self.secret, host)
        self._socket, endpoint = self._sockets.bind(zmq.ROUTER, CONTROL_BYTES)
        self._wakeup = Wakeup()
        self._numbers = itertools.count()
        self._keys = EpochKeys(lambda caller, answer: self._socket.send_multipart([caller, m.encode(answer)]))
        self._settings = LauncherSettings(endpoint, self.secret.private, host, first_device)
        self._launchers: list[MachineLauncher | None] = [launch(self._settings) for launch in machines.launches]
        self._started_epoch = 0
        self._watching = threading.Thread(target=self._watch, name="workers", daemon=True)
        self._watching.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self.close()

    # The engine's thread -------------------------------------------------------------------------------------

    @property
    def members(self) -> dict[int, WorkerStatus]:
        with self._shared.changed:
            return dict(self._shared.members)

    def check(self) -> None:
        if self._shared.lost is not None:
            raise WorkerLost(self._shared.lost)

    def deploy(self, deployment: Deployment, answers_to: str) -> dict[int, float]:
        """Make all workers build their parts of `deployment`, in place of the previous ones. No step may be under way.

        Returns:
            Each worker's build time in seconds, by the worker's number.

        Raises:
            MachineError: the workers have not started, or not built their parts, in time.
            WorkerLost: a worker was lost meanwhile.
            DeploymentRefused: a worker cannot build its part.
        """
        members = self._await_all()
        content = deployment.model_dump_json().encode()
        shared = self._shared
        links = [members[worker].hello.address for worker in sorted(members)]
        with shared.changed:
            shared.loaded.clear()
        for worker, member in members.items():
            role = deployment.role(worker) if worker < deployment.num_workers else None
            forwards_to = [members[other].hello.inbox for other in (role.forwards_to if role else ())]
            self._order(member, m.Deploy(content, forwards_to, answers_to, links))

        def is_over() -> bool:
            is_refused = any(answer.error for answer in shared.loaded.values())
            return len(shared.loaded) == self.num_workers or is_refused or shared.lost is not None

        with shared.changed:
            shared.changed.wait_for(is_over, LOAD_S)
            loaded = dict(shared.loaded)
        for answer in loaded.values():
            if answer.error:
                raise DeploymentRefused(answer)
        self.check()
        if len(loaded) < self.num_workers:
            says = f"{self.num_workers - len(loaded)} workers have not loaded the model within {LOAD_S:.0f} s"
            raise MachineError(says)
        return {worker: answer.seconds for worker, answer in loaded.items()}

    def prepare(self, grammar: str, workers: Collection[int]) -> object:
        """Make these workers compile a grammar, and wait for them. Any thread may call this.

        Returns:
            A handle. The workers keep the grammar compiled as long as it is referenced. If workers are replaced, the
            new ones compile the grammar when they need it.

        Raises:
            MachineError: a worker cannot compile the grammar.
        """
        shared, number = self._shared, next(self._numbers)
        with shared.changed:
            epoch = shared.epoch
            members = [shared.members[worker] for worker in workers if worker in shared.members]
            errors = shared.prepared[number] = {}
        for member in members:
            self._order(member, m.Prepare(number, grammar))

        def is_over() -> bool:
            are_gone = shared.epoch != epoch or shared.lost is not None or self._closing
            return are_gone or len(errors) == len(members)

        with shared.changed:
            shared.changed.wait_for(is_over)
            del shared.prepared[number]
        prepared, forget = _PreparedGrammar(), m.encode(m.Forget(number))
        for member in members:
            weakref.finalize(prepared, self._orders.put, (member.sender, forget)).atexit = False
        for error in errors.values():
            if error:
                raise MachineError(error)
        return prepared

    def _order(self, member: WorkerStatus, message: m.Deploy | m.Prepare) -> None:
        self._orders.put((member.sender, m.encode(message)))
        self._wakeup.wake()

    def restart(self) -> None:
        """Restart all workers, including those that still run."""
        self._budget.spend(self._shared.lost, self._shared.unstarted)
        self.renew()

    def renew(self) -> None:
        with self._shared.changed:
            self._shared.epoch += 1
            self._shared.members.clear()
            self._shared.loaded.clear()
            self._shared.lost = self._shared.unstarted = None
            self._shared.changed.notify_all()

    def close(self) -> None:
        if self._closing:
            return
        with self._shared.changed:
            self._closing = True
            self._shared.changed.notify_all()
        self._watching.join()
        self._machines.free()

    def _await_all(self) -> dict[int, WorkerStatus]:
        shared = self._shared
        deadline = time.monotonic() + START_S
        with shared.changed:
            while len(shared.members) < self.num_workers:
                self.check()
                if any(launcher is not None and launcher.is_at_work() for launcher in self._launchers):
                    deadline = time.monotonic() + START_S
                if time.monotonic() > deadline:
                    missing = sorted(set(range(self.num_workers)) - set(shared.members))
                    raise MachineError(f"workers {missing} have not started within {START_S:.0f} s")
                shared.changed.wait(0.2)
            return dict(shared.members)

    # The watching thread -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup.socket, zmq.POLLIN)
        try:
            while not self._closing:
                if self._wakeup.socket.fileno() in dict(poller.poll(POLL_MS)):
                    self._wakeup.clear()
                with self._shared.changed:
                    while self._socket.poll(0):
                        sender, content = self._socket.recv_multipart()
                        self._handle(sender, m.decode_to_engine(content))
                    self._check_silence()
                    self._start()
                while not self._orders.empty():
                    self._socket.send_multipart(self._orders.get())
        finally:
            for launcher in self._launchers:
                if launcher is not None:
                    launcher.close()
            self._sockets.close()
            self._wakeup.close()

    def _start(self) -> None:
        shared = self._shared
        if shared.lost is not None:
            return
        if self._keys.epoch != shared.epoch:
            self._keys.begin(shared.epoch)
        if self._started_epoch == shared.epoch:
            return
        self._started_epoch = shared.epoch
        count = self.num_workers // len(self._launchers)
        for number, launch in enumerate(self._machines.launches):
            launcher = self._launchers[number] = self._launchers[number] or launch(self._settings)
            launcher.start(StartWorkers(shared.epoch, number * count, count, self.num_workers))

    def _handle(self, sender: bytes, message: m.ToEngine) -> None:
        shared = self._shared
        match message:
            case m.StoreCall():
                self._keys.call(sender, message)
            case m.Hello() if message.epoch == shared.epoch:
                shared.members[message.worker] = WorkerStatus(message, sender, time.monotonic())
                shared.changed.notify_all()
            case m.Loaded():
                shared.loaded[message.worker] = message
                shared.changed.notify_all()
            case m.Prepared() if message.number in shared.prepared:
                shared.prepared[message.number][message.worker] = message.error
                shared.changed.notify_all()
            case m.WorkerAlive():
                member = shared.members.get(message.worker)
                if member is not None and message.epoch == shared.epoch:
                    member.heard_s = time.monotonic()
                    member.control_bytes, member.tensor_bytes = message.control_bytes, message.tensor_bytes
                    member.busy_s = message.busy_s

    def _check_silence(self) -> None:
        now, shared = time.monotonic(), self._shared
        if now - self._looked_s > SILENCE_S / 4:  # this process itself was suspended, so it could receive nothing
            for member in shared.members.values():
                member.heard_s = now
            for launcher in self._launchers:
                if launcher is not None:
                    launcher.excuse_silence()
        self._looked_s = now
        for worker, member in shared.members.items():
            silent_s = now - member.heard_s
            if silent_s > SILENCE_S and not self._is_excused(worker, member, silent_s):
                self._report_loss(f"worker {worker} has been silent for {silent_s:.0f} s")
        for number, launcher in enumerate(self._launchers):
            if launcher is None:
                continue
            try:
                for exited in launcher.exited():
                    if exited.epoch == shared.epoch:
                        self._report_loss(f"worker {exited.worker} has died")
            except MachineError as error:
                launcher.close()
                self._launchers[number] = None
                have_started = number in map(self._machine_of, shared.members)
                self._report_loss(str(error), None if have_started else number)

    def _machine_of(self, worker: int) -> int:
        return worker * len(self._launchers) // self.num_workers

    def _is_excused(self, worker: int, member: WorkerStatus, silent_s: float) -> bool:
        """Return whether a silent worker may be working: compiling, loading, or waiting for a processor.

        While a worker builds its part, it may be silent for `LOAD_S`. On another machine, where its state cannot be
        seen, it may be silent only for `BUSY_S`.
        """
        is_loading = worker not in self._shared.loaded
        launcher = self._launchers[self._machine_of(worker)]
        if launcher is None or not launcher.sees_workers:
            return is_loading and silent_s < BUSY_S
        return silent_s < (LOAD_S if is_loading else BUSY_S) and is_at_work(member.hello.pid)

    def _report_loss(self, why: str, unstarted: int | None = None) -> None:
        if self._shared.lost is None:
            self._shared.lost, self._shared.unstarted = why, unstarted
            self._shared.changed.notify_all()
