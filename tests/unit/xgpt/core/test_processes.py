"""What is seen of another process from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.fakes import eventually
from xgpt.core.processes import is_at_work


@pytest.mark.skipif(sys.platform != "linux", reason="threads are read from /proc")
def test_a_process_is_at_work_unless_it_waits_is_stopped_or_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()\nwhile True: pass"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert eventually(lambda: not is_at_work(process.pid))
        process.stdin.write(b"go\n")
        process.stdin.flush()
        assert eventually(lambda: is_at_work(process.pid))
        os.kill(process.pid, signal.SIGSTOP)
        assert eventually(lambda: not is_at_work(process.pid))
        process.kill()
    assert not is_at_work(process.pid)
