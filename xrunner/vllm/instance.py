"""The vLLM processes of an endpoint: started and ended together, with the channel to them."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from xgpt.core.errors import MachineError
from xgpt.core.processes import children_of, is_at_work
from xrunner.channel.remote import FrontConnection
from xrunner.vllm.channel import Lanes
from xrunner.vllm.command import Launch
from xrunner.vllm.machines import Followers
from xrunner.vllm.process import Reader, package_path, preload, python, started

MAX_PATH = 107 - len("/00000000-0000-0000-0000-000000000000")
"""Largest length of the directory's path in characters: vLLM names sockets after it, and the path of a Unix socket is
limited."""
PREFIX, LOCK = "xgpt-run-", "in-use"
"""Prefix of a run's directory, and the file in it that the run locks."""


@contextmanager
def in_use(directory: Path) -> Iterator[None]:
    """Lock a run's directory until this process ends, for whatever reason."""
    with (directory / LOCK).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove_left_over() -> None:
    """Remove the directories of this user's earlier runs that were killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if directory.lstat().st_uid != os.geteuid():
                continue
            with (directory / LOCK).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises an error if the run still continues
                shutil.rmtree(directory)


class Instances:
    """The vLLM processes of a plan, one for each lane, from their start until `end`; see
    `xrunner.channel.remote.FarEnd`.

    Args:
        launches: returns the start of each process, given the directory of this run, which no other user can enter.
        connect: builds the front's end of the channel, given the directory and a function that tells whether a vLLM has
            ended.
        followers: the other machines of a single vLLM, all of which must connect before it starts, or None.
    """

    def __init__(
        self,
        launches: Callable[[Path], Sequence[Launch]],
        connect: Callable[[str, Callable[[], bool]], Lanes],
        followers: Followers | None = None,
    ) -> None:
        self._at_end = ExitStack()
        self._followers = followers
        self._readers: list[Reader] = []
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
        if self._followers is not None:
            self._followers.start()
        remove_left_over()
        directory = Path(self._at_end.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX)))
        self._at_end.enter_context(in_use(directory))
        if len(str(directory)) > MAX_PATH:
            raise MachineError(f"{directory} is too long a path for sockets; set TMPDIR to a shorter one")
        packages = self._at_end.enter_context(package_path(directory))
        self.front: FrontConnection = connect(str(directory), lambda: self.why_ended() is not None)
        vllm_python = python()
        # Other users of this machine must also not read the messages between vLLM's processes.
        environment = {"VLLM_RPC_BASE_PATH": str(directory), "VLLM_HOST_IP": "127.0.0.1"}
        for launch in launches(directory):
            variables = environment | launch.variables | preload(vllm_python)
            command = launch.command(vllm_python, str(directory))
            self._readers.append(Reader(self._at_end.enter_context(started(command, packages, variables))))

    def why_ended(self) -> str | None:
        """Return the reason why a process has ended, or None if all processes run."""
        for reader in self._readers:
            if reader.process.poll() is not None:
                return f"vLLM has ended with exit code {reader.process.returncode}: {reader.last_error()}"
        return None if self._followers is None else self._followers.why_ended()

    def is_at_work(self) -> bool:
        """Return whether the kernel shows that a host runs or waits for a processor."""
        return any(is_at_work(child) for reader in self._readers for child in children_of(reader.process.pid))

    def end(self, within_s: float) -> None:
        """End all processes; kill those that do not end by themselves."""
        if self._followers is not None:
            self._followers.close(for_good=within_s > 0)
        self._at_end.close()
