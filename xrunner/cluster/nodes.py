"""The process that runs on every machine but the first: it starts workers as the engine on the first one orders."""

from __future__ import annotations

import secrets
import time

import zmq

from xgpt.core.errors import MachineError
from xrunner.cluster import messages as m
from xrunner.cluster.launching import LauncherProcess, LauncherSettings, StartWorkers
from xrunner.cluster.sockets import Secret, Sockets

JOIN_S = 0.5
"""Interval at which a machine reports that it is running."""
MEET_S = 600.0
"""Time in which the engine must answer for the first time."""
SILENCE_S = 30.0
"""An engine that has been silent for this time has ended."""
POLL_MS = 50


class Node:
    """One of several machines that run a plan together, not the first. Belongs to one thread.

    Args:
        number: the machine's rank, from 1.
        settings: its launcher's.

    Raises:
        MachineError: as `LauncherProcess` does.
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
        """Make `run` return soon; may be called from a signal handler."""
        self._is_over = True

    def run(self) -> None:
        """Run until the engine orders to stop, or `end` is called.

        Raises:
            MachineError: the first machine cannot be reached, or not any more.
        """
        next_join, heard_s, is_refused, has_met = 0.0, time.monotonic(), False, False
        try:
            while not self._is_over:
                now = time.monotonic()
                if now >= next_join:
                    self._send(m.Join(self._number, self._incarnation))
                    next_join = now + JOIN_S
                self._wait()
                while self._engine.poll(0):
                    match m.decode_to_node(self._engine.recv()):
                        case m.JoinRefused():
                            is_refused = True
                            continue
                        case m.Start(epoch, first, count, total):
                            self._started = StartWorkers(epoch, first, count, total)
                            self._launcher.start(self._started)
                        case m.Stop():
                            self._send(m.StopAcknowledged(self._number))
                            self._is_over = True
                    heard_s, has_met = time.monotonic(), True
                self._report_exits()
                if time.monotonic() - heard_s > (SILENCE_S if has_met else MEET_S):
                    raise MachineError(self._why(is_refused and not has_met))
        finally:
            self._launcher.close()
            self._sockets.close(linger_ms=1000)

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._engine, zmq.POLLIN)
        poller.register(self._launcher, zmq.POLLIN)
        poller.poll(POLL_MS)

    def _report_exits(self) -> None:
        """Report to the engine which workers have ended; if the launcher has ended, all of them have."""
        started = self._started
        try:
            gone = [m.WorkerExited(exited.epoch, exited.worker) for exited in self._launcher.exited()]
        except MachineError:
            self._launcher.close()
            self._launcher = LauncherProcess(self._settings)
            gone = [] if started is None else [m.WorkerExited(started.epoch, started.first)]
        for message in gone:
            self._send(message)

    def _send(self, message: m.Join | m.WorkerExited | m.StopAcknowledged) -> None:
        self._engine.send(m.encode(message))

    def _why(self, is_refused: bool) -> str:
        if is_refused:
            return f"node rank {self._number} is taken, or the first machine was started with a smaller `nnodes`"
        return f"the first machine at {self._settings.engine} cannot be reached any more"
