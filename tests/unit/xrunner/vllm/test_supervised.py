"""vLLM's processes end when the process that started them does; here in place of vLLM one that starts another."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rings import few
from xrunner.vllm.process import package_path, started

pytestmark = pytest.mark.timeout(60)

FAMILY = """
import fcntl, subprocess, sys, time
from xrunner.vllm.supervised import end_group_on_hangup
end_group_on_hangup()
held = open(sys.argv[1], "w")
fcntl.flock(held, fcntl.LOCK_EX)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[held.fileno()])
print("both are here", flush=True)
{then}
"""
"""It and its child hold a lock together, which is free when both have ended."""
PARENT = """
import signal, sys, time
from pathlib import Path
from xrunner.vllm.process import started
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and all they start, ignore it
with started(sys.argv[2:], Path(sys.argv[1]), {}) as process:
    print(process.stdout.readline(), flush=True)
    time.sleep(600)
"""


def family(lock: Path, then: str = "time.sleep(600)") -> list[str]:
    return [sys.executable, "-c", FAMILY.format(then=then), str(lock)]


def wait_until_all_have_ended(lock: Path) -> None:
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


@contextmanager
def parent(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has started the family."""
    with package_path() as packages:
        command = [sys.executable, "-c", PARENT, str(packages), *family(lock)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                assert process.stdout.readline() == "both are here\n"
                yield process
            finally:
                process.kill()


def test_vllm_stays_in_the_fronts_session() -> None:
    """Linux shares cores among sessions first: beside vLLM in a session of its own, a front that used 2% of a core
    waited for 93% of the time, /health took 8 s, and shares of 3 to 1 came out as 0.9 to 1.
    """
    tells = "import os; print(os.getsid(0), os.getpgid(0) == os.getpid())"
    with package_path() as packages, started([sys.executable, "-c", tells], packages, {}) as process:
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.read() == f"{os.getsid(0)} True\n"


@pytest.mark.parametrize("how", few([signal.SIGKILL, signal.SIGINT]))
def test_no_process_outlives_its_starter(how: signal.Signals, tmp_path: Path) -> None:
    with parent(tmp_path / "lock") as process:
        process.send_signal(how)
        wait_until_all_have_ended(tmp_path / "lock")


def test_no_process_outlives_the_context(tmp_path: Path) -> None:
    with package_path() as packages, started(family(tmp_path / "lock"), packages, {}) as process:
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline() == "both are here\n"
    wait_until_all_have_ended(tmp_path / "lock")
    assert process.returncode == 128 + signal.SIGTERM


WORKS = """
import subprocess, sys
work = "import time\\nwhile time.process_time() < 1: pass\\nprint('done', flush=True)\\ntime.sleep(600)"
subprocess.Popen([sys.executable, "-c", work]).wait()
"""
"""Its child works for a second."""


def children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.long
def test_the_processor_time_of_all_processes_counts_as_the_starters(tmp_path: Path) -> None:
    """Killed before anyone waited for it, vLLM's worker counted as another process, and plans left room for it."""
    before_s = children_s()
    with package_path() as packages, started([sys.executable, "-c", WORKS], packages, {}) as process:
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline() == "done\n"
    assert children_s() - before_s > 1


def test_no_process_outlives_the_first_and_its_exit_code_is_told(tmp_path: Path) -> None:
    with package_path() as packages, started(family(tmp_path / "lock", "sys.exit(3)"), packages, {}) as process:
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.read() == "both are here\n"
        wait_until_all_have_ended(tmp_path / "lock")
        assert process.wait() == 3


def test_no_process_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    with package_path() as packages, started(family(tmp_path / "lock"), packages, {}) as process:
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline() == "both are here\n"
            process.kill()
            wait_until_all_have_ended(tmp_path / "lock")
