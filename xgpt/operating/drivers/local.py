"""Replicas of `xgpt serve` as processes of this machine, behind a front.

All state is in a directory and in the processes themselves, so a restarted controller continues with
it: a file for each replica, which the front reads (`xrunner.front`), and in each process's
environment the directory and the name of its replica. A file without a process is removed; a process without a file
gets one when it is ready.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec

from xgpt.core.errors import InputError, MachineError
from xgpt.core.io import dump_json, write_atomic
from xgpt.core.outputs import OutputFile, is_recorded
from xgpt.core.schema.fleet import FleetPlan
from xgpt.operating.drivers.base import Counts, read_counts
from xscheduler.fleet.controller import ReplicaState, State

MARK = "XGPT_FLEET_REPLICA"
"""Environment variable of a fleet's process: DIRECTORY NAME KIND PORT; the front's name is `front`."""
FRONT = "front"
TIMEOUT_S = 2.0
FRONT_STARTS_S = 20.0
ENDS_S = 60.0


class _Process(NamedTuple):
    """A process of the fleet."""

    pid: int
    name: str
    kind: int
    port: int
    since_s: float


class LocalWorld:
    """The world of a fleet on this machine.

    Args:
        directory: directory of the fleet's state; an existing one is continued.
        port: the front's port.
        clock_began_s: when the planned day began, s since the epoch.

    Raises:
        InputError: the directory holds other files than a fleet's state.
        MachineError: the directory cannot be written, or the front does not start.
    """

    def __init__(self, fleet: FleetPlan, directory: Path, port: int, clock_began_s: float) -> None:
        self._fleet, self._directory, self._began_s = fleet, directory.resolve(), clock_began_s
        self._port = port
        self._states = self._directory / "replicas"
        try:
            is_empty = not directory.exists() or not any(directory.iterdir())
            if not is_empty and not is_recorded(self._directory / "kind0.json"):
                accepted = "give a new directory, or one of an earlier `xgpt autoscale`"
                raise InputError("state", str(directory), accepted)
            self._states.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MachineError(f"cannot write {self._directory}: {error.strerror}") from None
        for number, kind in enumerate(fleet.kinds):
            OutputFile(self._directory / f"kind{number}.json", "state", force=True).write(dump_json(kind.plan))
        self._known: list[_Process] = []
        self._children: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def open(self) -> None:
        """Start the front unless it runs.

        Raises:
            MachineError: it does not start.
        """
        if any(process.name == FRONT and process.port == self._port for process in self._processes()):
            return
        self._spawn(FRONT, 0, self._port, ["-m", "xrunner.front", str(self._states), "--port", str(self._port)])
        deadline_s = time.monotonic() + FRONT_STARTS_S
        while time.monotonic() < deadline_s:
            with suppress(httpx.HTTPError):
                _get(f"{self.url}/health")
                return
            time.sleep(0.1)
        raise MachineError(f"the front does not listen on port {self._port} after {FRONT_STARTS_S:g} s")

    def replicas(self, now_s: float) -> list[ReplicaState]:
        """See `World`. Register ready replicas with the front, and end drained ones."""
        self._known = [process for process in self._processes() if process.name != FRONT]
        outstanding = self._outstanding()
        for path in self._states.glob("*.json"):
            if path.stem not in {process.name for process in self._known}:
                path.unlink(missing_ok=True)  # its process has ended
        found = []
        for process in self._known:
            state = self._state(process)
            if state == "draining" and outstanding is not None and not outstanding.get(process.name):
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)  # it finishes requests that arrived meanwhile, then ends
            if state == "ready":
                self._show(process, takes=True)
            found.append(ReplicaState(process.name, process.kind, state, process.since_s - self._began_s))
        return found

    def counts(self) -> dict[str, Counts]:
        """See `World`."""
        found = {}
        for process in self._known:
            with suppress(httpx.HTTPError):
                answer = _get(f"http://127.0.0.1:{process.port}/metrics")
                counts = read_counts(answer.text) if answer.is_success else None
                if counts is not None:
                    found[process.name] = counts
        return found

    def start(self, kind: int, number: int) -> None:
        """See `World`."""
        for _ in range(number):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            name = f"kind{kind}-{port}-{time.time_ns() // 10**6 % 10**7}"
            plan = self._directory / f"kind{kind}.json"
            words = ["-m", "xgpt", "serve", str(plan), "--port", str(port), "--no-replan", "--log-level", "error"]
            self._spawn(name, kind, port, words)

    def drain(self, names: Sequence[str]) -> None:
        """See `World`. A draining replica's file says that it takes no requests."""
        for process in self._known:
            if process.name in names:
                self._show(process, takes=False)

    def close(self) -> None:
        """End the front once its requests are answered, and then all replicas."""
        processes = self._processes()
        for of_front in (True, False):
            ending = [process for process in processes if (process.name == FRONT) == of_front]
            for process in ending:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
            deadline_s = time.monotonic() + ENDS_S
            while time.monotonic() < deadline_s and any(_is_there(process.pid) for process in ending):
                time.sleep(0.1)
        self._children = [child for child in self._children if child.poll() is None]

    def _spawn(self, name: str, kind: int, port: int, words: Sequence[str]) -> None:
        """Start a process in a session of its own, so that it outlives the controller."""
        environment = {**os.environ, MARK: f"{self._directory} {name} {kind} {port}"}
        try:
            with (self._directory / f"{name}.log").open("ab") as log:
                child = subprocess.Popen(
                    [sys.executable, *words],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self._children.append(child)
        except OSError as error:
            raise MachineError(f"cannot start {name}: {error.strerror}") from None

    def _processes(self) -> list[_Process]:
        """Return the fleet's processes, found by their environment, without replicas' own children."""
        self._children = [child for child in self._children if child.poll() is None]
        found: dict[str, _Process] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            with suppress(OSError, ValueError):
                words = _mark(entry / "environ")
                if words is None or words[0] != str(self._directory):
                    continue
                pid, (_, name, kind, port) = int(entry.name), words
                if not _is_there(pid) or int(kind) >= len(self._fleet.kinds):
                    continue
                if name not in found or pid < found[name].pid:
                    since_s = entry.stat().st_mtime
                    found[name] = _Process(pid, name, int(kind), int(port), since_s)
        return list(found.values())

    def _state(self, process: _Process) -> State:
        path = self._states / f"{process.name}.json"
        with suppress(OSError, msgspec.MsgspecError):
            if not msgspec.json.decode(path.read_bytes())["takes"]:
                return "draining"
        with suppress(httpx.HTTPError):
            if _get(f"http://127.0.0.1:{process.port}/ready").is_success:
                return "ready"
        return "starting"

    def _show(self, process: _Process, *, takes: bool) -> None:
        rate = max(self._fleet.kinds[process.kind].rates_per_s)
        shown = {"name": process.name, "port": process.port, "rate_per_s": rate, "takes": takes}
        path, text = self._states / f"{process.name}.json", msgspec.json.encode(shown).decode()
        with suppress(OSError):
            if path.read_text() == text:
                return
        write_atomic(path, text)

    def _outstanding(self) -> dict[str, int] | None:
        """Return the outstanding requests of each replica, from the front; None: it does not answer."""
        with suppress(httpx.HTTPError, ValueError, KeyError):
            found: dict[str, int] = _get(f"{self.url}/fleet").json()["outstanding"]
            return found
        return None


def _mark(path: Path) -> tuple[str, ...] | None:
    """Return the words of a process's `MARK`; None: it has none."""
    for variable in path.read_bytes().split(b"\0"):
        name, _, value = variable.decode(errors="replace").partition("=")
        if name == MARK:
            directory, replica, kind, port = value.rsplit(" ", 3)
            return directory, replica, kind, port
    return None


def _is_there(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")


def _get(url: str) -> httpx.Response:
    """Send a GET request to a server on this machine.

    Raises:
        httpx.HTTPError: it does not answer.
    """
    return httpx.get(url, timeout=TIMEOUT_S, trust_env=False)
