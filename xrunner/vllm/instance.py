"""The vLLMs behind an endpoint: start and end them together, with the channel to them."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from subprocess import Popen

from xgpt.core.errors import MachineError
from xgpt.core.processes import children_of, is_at_work
from xrunner.channel.remote import FrontConnection
from xrunner.vllm.channel import Lanes
from xrunner.vllm.command import Launch
from xrunner.vllm.process import last_error, package_path, preload, python, started

LAST_WORDS_S = 0.2
"""Time in which the last lines of a vLLM that has ended come."""
MAX_PATH = 107 - len("/00000000-0000-0000-0000-000000000000")
"""Characters of the directory: vLLM names its sockets so, and a Unix socket's path has no more."""
TAIL = 200
"""Lines of what a vLLM says that are kept, to tell why it ended."""


PREFIX, LOCK = "xgpt-run-", "in-use"
"""How the directory of a run begins, and the file in it that the run holds a lock on."""


@contextmanager
def in_use(directory: Path) -> Iterator[None]:
    """Hold a lock on a run's directory; the system ends it with this process, however that comes about."""
    with (directory / LOCK).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove_left_over() -> None:
    """Remove the directories of this user's runs that were killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if directory.lstat().st_uid != os.geteuid():
                continue
            with (directory / LOCK).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where the run goes on
                shutil.rmtree(directory)


class Instances:
    """The vLLMs of a plan, one a lane, from their start until `end`; see `xrunner.channel.remote.FarEnd`.

    Args:
        launches: how to start them, given the directory of this run, which no other user can enter.
        connect: makes the front's end of the channel, given that directory and what tells whether a vLLM has ended.
    """

    def __init__(
        self,
        launches: Callable[[Path], Sequence[Launch]],
        connect: Callable[[str, Callable[[], bool]], Lanes],
    ) -> None:
        self._at_end = ExitStack()
        self._readers: list[_Reader] = []
        try:
            self._start(launches, connect)
        except BaseException:
            self.end(0)
            raise

    def _start(
        self,
        launches: Callable[[Path], Sequence[Launch]],
        connect: Callable[[str, Callable[[], bool]], Lanes],
    ) -> None:
        remove_left_over()
        directory = Path(self._at_end.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX)))
        self._at_end.enter_context(in_use(directory))
        if len(str(directory)) > MAX_PATH:
            raise MachineError(f"{directory} is too long a path for sockets; set TMPDIR to a shorter one")
        packages = self._at_end.enter_context(package_path(directory))
        self.front: FrontConnection = connect(str(directory), lambda: self.why_ended() is not None)
        vllm_python = python()
        # What vLLM's processes tell each other is not for others on this machine, either.
        environment = {"VLLM_RPC_BASE_PATH": str(directory), "VLLM_HOST_IP": "127.0.0.1"}
        for launch in launches(directory):
            variables = environment | launch.variables | preload(vllm_python)
            command = launch.command(vllm_python, str(directory))
            self._readers.append(_Reader(self._at_end.enter_context(started(command, packages, variables))))

    def why_ended(self) -> str | None:
        """Return why the first of them that has ended did so; None: all run."""
        for reader in self._readers:
            if reader.process.poll() is not None:
                return f"vLLM has ended with exit code {reader.process.returncode}: {reader.last_error()}"
        return None

    def is_at_work(self) -> bool:
        """Return whether a host is seen to run, or to wait for a processor."""
        return any(is_at_work(child) for reader in self._readers for child in children_of(reader.process.pid))

    def end(self, within_s: float) -> None:
        """End all of them, killing what does not end by itself; nothing of them is left."""
        self._at_end.close()


class _Reader:
    """Reads what a vLLM says: errors go on to our own standard error, the last lines are kept."""

    def __init__(self, process: Popen[str]) -> None:
        self.process = process
        self._tail: deque[str] = deque(maxlen=TAIL)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def last_error(self) -> str:
        """Why it has ended."""
        self._thread.join(LAST_WORDS_S)  # they may still be on their way
        return last_error(list(self._tail))

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self._tail.append(line)
                # What it says once it is to end, its engine gone under it, is no news.
                is_to_end = self.process.stdin is None or self.process.stdin.closed
                if not is_to_end and any(level in line for level in ("ERROR", "CRITICAL")):
                    print(line.rstrip(), file=sys.stderr, flush=True)
