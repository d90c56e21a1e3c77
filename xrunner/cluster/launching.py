"""Start a launcher, send orders to it and read its reports. Modules that only workers need are not imported."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from xgpt.core import processes
from xgpt.core.errors import MachineError
from xgpt.core.network import interface_of
from xgpt.core.processes import run_module

ALIVE_S = 0.5
SILENCE_S, BUSY_S = 15.0, 60.0
"""Seconds without a report after which a launcher counts as hung. The second number applies if the launcher is working.
"""
END_S = 5.0
READ_BYTES = 1 << 16


class LauncherSettings(msgspec.Struct, frozen=True):
    """The settings of a launcher: the first line of its input."""

    engine: str
    secret: bytes
    host: str
    first_device: int = 0


class StartWorkers(msgspec.Struct, frozen=True):
    """An order, on a later line of a launcher's input: end the running workers, and start these.

    Attributes:
        epoch: number that increases whenever the workers are replaced. Only workers of the same epoch connect to each
            other.
    """

    epoch: int
    first: int
    count: int
    total: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    epoch: int
    worker: int


class Working(msgspec.Struct, frozen=True, tag=True):
    """A launcher's regular report that it is running."""


_decode = msgspec.json.Decoder(Exited | Working).decode


class MachineLauncher(Protocol):
    """Starts the workers of one machine and reports which have ended. Only one thread may use it.

    Attributes:
        sees_workers: whether the workers are processes of this machine, so that the operating system shows whether they
            run.
    """

    sees_workers: bool

    def start(self, order: StartWorkers) -> None:
        """Replace the running workers by those of `order`. Return without waiting for this."""

    def exited(self) -> list[Exited]:
        """Return the workers that have ended since the last call.

        Raises:
            MachineError: the launcher has ended or hangs.
        """

    def is_at_work(self) -> bool:
        """Return whether a silent launcher, or a worker of it, is starting, or waits for a processor or a machine."""

    def excuse_silence(self) -> None:
        """Measure the launcher's silence from now on. Called after this process itself was suspended."""

    def close(self) -> None:
        """End the workers and the launcher."""


@dataclass(frozen=True, slots=True)
class MachineGroup:
    launches: Sequence[Callable[[LauncherSettings], MachineLauncher]]
    free: Callable[[], object] = lambda: None


class LauncherProcess:
    """A `MachineLauncher` for this machine. The workers are children of the launcher's process."""

    sees_workers = True

    def __init__(self, settings: LauncherSettings) -> None:
        interface = interface_of(settings.host)
        if interface is None:
            raise MachineError(
                f"no network interface of this machine has the address {settings.host}, to which the workers' sockets "
                "must bind; start Ray here with an address of this machine as --node-ip-address"
            )
        environment = os.environ | {"NCCL_SOCKET_IFNAME": interface}
        if not os.environ.get("XGPT_DEBUG"):
            # NCCL would print a long message for every lost peer.
            environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # The launcher has its own process group, because Ctrl-C in a terminal must reach only the server, which first
        # lets its requests end.
        self._process = subprocess.Popen(
            run_module("xrunner.cluster.launcher"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            process_group=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._rest = b""
        self._heard_s: float | None = None
        self._write(settings)

    def fileno(self) -> int:
        return self._output.fileno()

    def start(self, order: StartWorkers) -> None:
        self._write(order)

    def exited(self) -> list[Exited]:
        now = time.monotonic()
        try:
            read = os.read(self.fileno(), READ_BYTES)
        except BlockingIOError:
            silent_s = 0.0 if self._heard_s is None else now - self._heard_s
            if silent_s > SILENCE_S and (silent_s > BUSY_S or not processes.is_at_work(self._process.pid)):
                raise MachineError(f"the launcher of the workers has been silent for {silent_s:.0f} s") from None
            return []
        if not read:
            raise MachineError("the launcher of the workers has ended")
        self._heard_s = now
        *lines, self._rest = (self._rest + read).split(b"\n")
        heard = map(_decode, lines)
        return [what for what in heard if isinstance(what, Exited)]

    def is_at_work(self) -> bool:
        return any(map(processes.is_at_work, (self._process.pid, *processes.children_of(self._process.pid))))

    def excuse_silence(self) -> None:
        if self._heard_s is not None:
            self._heard_s = time.monotonic()

    def close(self) -> None:
        if self._input.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        processes.end(self._process, END_S)  # if the launcher is killed, the kernel ends its workers
        self._output.close()

    def _write(self, what: msgspec.Struct) -> None:
        with contextlib.suppress(BrokenPipeError):  # `exited` then reports the end
            self._input.write(msgspec.json.encode(what) + b"\n")
            self._input.flush()


THIS_MACHINE = MachineGroup([LauncherProcess])
