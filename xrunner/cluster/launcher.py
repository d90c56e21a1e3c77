"""The launcher: a process that forks the workers of one machine and ends them.

The launcher has imported all modules that workers need, so that restarting workers takes less than a second. It reads
orders as lines of JSON from standard input. Standard input closes when the process that started the launcher ends. The
launcher then ends its workers and itself. It opens no port, and ends only its own children.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import traceback
from typing import NoReturn

import msgspec

from xgpt.core.processes import raise_file_limit
from xrunner.cluster.launching import ALIVE_S, Exited, LauncherSettings, StartWorkers, Working
from xrunner.cluster.links import Wires, WorkerWires
from xrunner.cluster.process import ProcessSettings, main

READ_BYTES = 1 << 16


class Launcher:
    """Forks, watches and ends the workers of one machine. The process has only one thread, since it forks."""

    def __init__(self, settings: LauncherSettings, output: int) -> None:
        self._settings = settings
        self._output = output
        self._workers: dict[int, int] = {}
        self._epoch = 0
        self._woken, wake = os.pipe()
        for end in (self._woken, wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def run(self, rest: bytes) -> None:
        try:
            while True:
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    self._start(msgspec.json.decode(line, type=StartWorkers))
                self._report(Working())
                ready, _, _ = select.select([sys.stdin, self._woken], [], [], ALIVE_S)
                if self._woken in ready:
                    os.read(self._woken, READ_BYTES)
                    self._reap()
                if sys.stdin in ready:
                    read = os.read(sys.stdin.fileno(), READ_BYTES)
                    if not read:
                        return
                    rest += read
        finally:
            self._end()

    def _start(self, order: StartWorkers) -> None:
        self._end()
        self._epoch = order.epoch
        wires = Wires(order.first, order.count)
        for local, own in enumerate(wires.of_workers):
            process = os.fork()
            if not process:
                wires.keep(own)
                self._run_worker(own.worker, local, order, own)
            self._workers[process] = own.worker
        wires.keep(None)

    def _run_worker(self, worker: int, local: int, order: StartWorkers, wires: WorkerWires) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), 0)
            os.close(self._output)
            main(ProcessSettings(self._settings, worker, local, order, wires), os.getppid())
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)

    def _reap(self) -> None:
        while self._workers:
            process, _ = os.waitpid(-1, os.WNOHANG)
            if not process:
                return
            worker = self._workers.pop(process, None)
            if worker is not None:
                self._report(Exited(self._epoch, worker))

    def _end(self) -> None:
        for process in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for process in self._workers:
            os.waitpid(process, 0)
        self._workers.clear()

    def _report(self, what: Exited | Working) -> None:
        with contextlib.suppress(BlockingIOError):  # nobody has read the pipe for minutes
            os.write(self._output, msgspec.json.encode(what) + b"\n")


def run() -> None:
    raise_file_limit()  # Ray may have started this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started the launcher decides when the launcher ends
    output = os.dup(1)
    os.dup2(2, 1)  # keeps output of libraries out of the protocol
    os.set_blocking(output, False)
    line, rest = b"", b""
    while b"\n" not in line:
        read = os.read(0, READ_BYTES)
        if not read:
            return
        line += read
    line, _, rest = line.partition(b"\n")
    with contextlib.suppress(BrokenPipeError):
        Launcher(msgspec.json.decode(line, type=LauncherSettings), output).run(rest)


if __name__ == "__main__":
    run()
