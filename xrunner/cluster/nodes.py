"""The process that runs on every machine but the first: it starts workers as the first machine's engine says."""

from __future__ import annotations

import secrets
import time

import zmq

from xgpt.errors import MachineError
from xrunner.cluster import messages as m
from xrunner.cluster.launching import LauncherProcess, LauncherSettings, StartWorkers
from xrunner.cluster.sockets import Secret, Sockets

JOIN_S = 0.5
"""How often a machine says that it is there."""
MEET_S = 600.0
"""From a machine's start until the engine has answered."""
SILENCE_S = 30.0
"""An engine that has been silent for this time has ended."""
POLL_MS = 50


class Node:
    """One of several machines that run a plan together, not the first. Belongs to one thread.

    Args:
        number: of the machine, from 1.
        settings: of its launcher.

    Raises:
        MachineError: `LauncherProcess`'s.
    """

    def __init__(self, number: int, settings: LauncherSettings) -> None:
        self._number = number
        self._settings = settings
        self._incarnation = secrets.randbits(63)
        self._is_over = False
        self._sockets = Sockets(Secret.of(settings.secret), settings.host)
        self._engine = self._sockets.connect(zmq.DEALER, settings.engine)
        self._launcher = LauncherProcess(settings)
        self._started: StartWorkers | None = None

    def end(self) -> None:
        """Have `run` return soon. May be called from a signal's handler."""
        self._is_over = True

    def run(self) -> None:
        """Run until the engine, or `end`, says to stop.

        Raises:
            MachineError: the first machine cannot be met, or is met no more.
        """
        next_join, heard_s, is_occupied, has_met = 0.0, time.monotonic(), False, False
        try:
            while not self._is_over:
                now = time.monotonic()
                if now >= next_join:
                    self._say(m.Join(self._number, self._incarnation))
                    next_join = now + JOIN_S
                self._wait()
                while self._engine.poll(0):
                    match m.decode_to_node(self._engine.recv()):
                        case m.Occupied():
                            is_occupied = True
                            continue
                        case m.Start(epoch, first, count, total):
                            self._started = StartWorkers(epoch, first, count, total)
                            self._launcher.start(self._started)
                        case m.Stop():
                            self._say(m.Goodbye(self._number))
                            self._is_over = True
                    heard_s, has_met = time.monotonic(), True
                self._hear_launcher()
                if time.monotonic() - heard_s > (SILENCE_S if has_met else MEET_S):
                    raise MachineError(self._why(is_occupied and not has_met))
        finally:
            self._launcher.close()
            self._sockets.close(linger_ms=1000)

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._engine, zmq.POLLIN)
        poller.register(self._launcher, zmq.POLLIN)
        poller.poll(POLL_MS)

    def _hear_launcher(self) -> None:
        """Tell the engine which workers have ended; all of them, with a launcher that has ended."""
        started = self._started
        try:
            gone = [m.Gone(exited.epoch, exited.worker) for exited in self._launcher.hear()]
        except MachineError:
            self._launcher.close()
            self._launcher = LauncherProcess(self._settings)
            gone = [] if started is None else [m.Gone(started.epoch, started.first)]
        for message in gone:
            self._say(message)

    def _say(self, message: m.Join | m.Gone | m.Goodbye) -> None:
        self._engine.send(m.encode(message))

    def _why(self, is_occupied: bool) -> str:
        if is_occupied:
            return f"machine {self._number} is there already, or the plan's first machine knows of fewer"
        return f"the first machine at {self._settings.engine} cannot be reached any more"
