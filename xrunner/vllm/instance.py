"""The vLLMs behind an endpoint: start, watch and end them together, with the channel to them."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from subprocess import Popen

from xgpt.core.errors import MachineError
from xgpt.core.schema import LaneName, Plan, StepRecord
from xrunner.channel import EngineLost
from xrunner.channel.messages import Cancel
from xrunner.vllm.channel import WARM_UP, FrontSide, Up, VllmAlive, VllmReady, VllmStepped, VllmSubmit
from xrunner.vllm.command import Launch
from xrunner.vllm.process import last_error, package_path, preload, python, started

POLL_S = 0.2
"""Between two looks, while they start, at whether all live."""
MAX_PATH = 107 - len("/00000000-0000-0000-0000-000000000000")
"""Characters of the directory: vLLM names its sockets so, and a Unix socket's path has no more."""
SILENCE_S = 120.0
"""A vLLM that has requests and reports no step for this long hangs; no step of a model that serves takes as long."""
ALIVE_S = 30.0
"""A vLLM whose host has reported nothing for this long hangs, busy or not; it reports each second."""
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
    """One vLLM a lane, from when all take requests until `close`.

    Args:
        launches: how to start them, given the directory of this run, which no other user can enter.
        num_cores: engine cores that follow a plan.

    Raises:
        MachineError: one ends before it takes requests.
    """

    def __init__(self, launches: Callable[[Path], Sequence[Launch]], num_cores: int = 0) -> None:
        self._at_end = ExitStack()
        self._readers: list[_Reader] = []
        self._skipped: Counter[int] = Counter()
        """Steps of warming up, by engine core."""
        self._heard_s = time.monotonic()
        """When something has last come, or has begun to be expected."""
        self._was_busy = False
        self._alive_s: dict[LaneName, float] = {}
        """When the host of each lane has last reported that it runs."""
        self._looked_s = time.monotonic()
        try:
            self._start(launches, num_cores)
        except BaseException:
            self.close()
            raise

    def _start(self, launches: Callable[[Path], Sequence[Launch]], num_cores: int) -> None:
        remove_left_over()
        self.directory = directory = Path(self._at_end.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX)))
        self._at_end.enter_context(in_use(directory))
        if len(str(directory)) > MAX_PATH:
            raise MachineError(f"{directory} is too long a path for sockets; set TMPDIR to a shorter one")
        packages = self._at_end.enter_context(package_path(directory))
        self.launches = tuple(launches(directory))
        self._channel = FrontSide(str(directory))
        self._at_end.callback(self._channel.close)
        vllm_python = python()
        # What vLLM's processes tell each other is not for others on this machine, either.
        environment = {"VLLM_RPC_BASE_PATH": str(directory), "VLLM_HOST_IP": "127.0.0.1"}
        for launch in self.launches:
            variables = environment | launch.variables | preload(vllm_python)
            command = launch.command(vllm_python, str(directory))
            self._readers.append(_Reader(self._at_end.enter_context(started(command, packages, variables))))
        missing = {launch.lane for launch in self.launches}
        while missing or not self._channel.reaches([launch.lane for launch in self.launches], num_cores):
            match self.receive():
                case VllmReady() as ready:
                    missing.discard(ready.lane)
                case _:
                    self.wait(POLL_S if missing else 0.01)

    def submit(self, lane: LaneName, request: VllmSubmit) -> None:
        self._channel.send(lane, request)

    def cancel(self, lane: LaneName, id_: int) -> None:
        self._channel.send(lane, Cancel(id_))

    def change_plan(self, plan: Plan) -> None:
        self._channel.send_plan(plan)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` has something to do."""
        return self._channel.fileno()

    def wait(self, timeout_s: float) -> None:
        """Return when something has come, or when the time is over."""
        self._channel.wait(timeout_s)

    def receive(self, *, is_busy: bool = False) -> Up | None:
        """The next that has come; None: nothing has.

        Args:
            is_busy: vLLM has requests, so that steps are due.

        Raises:
            EngineLost: a vLLM has ended, or is busy and has been silent for `SILENCE_S`.
        """
        message = self._channel.receive()
        now_s = time.monotonic()
        if not isinstance(message, VllmAlive | None) or not (is_busy and self._was_busy):
            self._heard_s = now_s
        elif now_s - self._heard_s > SILENCE_S:
            raise EngineLost(f"vLLM has requests and has executed no step for {SILENCE_S:g} s: it hangs")
        self._was_busy = is_busy
        self._note_alive(message, now_s)
        if message is None:
            for reader in self._readers:
                if reader.process.poll() is not None:
                    says = f"vLLM has ended with exit code {reader.process.returncode}: {reader.last_error()}"
                    raise EngineLost(says)
        if isinstance(message, VllmStepped):
            message.records = self._without_warm_up(message)
        return message

    def _note_alive(self, message: Up | None, now_s: float) -> None:
        """Note a report of a host; raise MachineError if one has been silent for `ALIVE_S`."""
        if isinstance(message, VllmAlive):
            self._alive_s[message.lane] = now_s
        if now_s - self._looked_s > ALIVE_S / 4:  # this process did not run, or waited to be asked: reports are queued
            self._alive_s = dict.fromkeys(self._alive_s, now_s)
        self._looked_s = now_s
        for lane, heard_s in self._alive_s.items():
            if message is None and now_s - heard_s > ALIVE_S:
                raise EngineLost(f"vLLM ({lane}) has reported nothing for {ALIVE_S:g} s: it hangs")

    def _without_warm_up(self, stepped: VllmStepped) -> list[StepRecord]:
        """A core's steps, counted from the first that a request of ours is in."""
        ours = [record for record in stepped.records if not _is_warm_up(record)]
        self._skipped[stepped.core] += len(stepped.records) - len(ours)
        skipped = self._skipped[stepped.core]
        return [record._replace(number=record.number - skipped, settled=record.settled - skipped) for record in ours]

    def close(self) -> None:
        """End all; nothing of them is left."""
        self._at_end.close()


def _is_warm_up(record: StepRecord) -> bool:
    """Whether a host has had this step before it took requests; no request runs then."""
    return WARM_UP in record.decode or any(id_ == WARM_UP for id_, _, _ in record.encode)


class _Reader:
    """Reads what a vLLM says: errors go on to our own standard error, the last lines are kept."""

    def __init__(self, process: Popen[str]) -> None:
        self.process = process
        self._tail: deque[str] = deque(maxlen=TAIL)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def last_error(self) -> str:
        """Why it has ended."""
        self._thread.join(POLL_S)  # its last lines may still be on their way
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
