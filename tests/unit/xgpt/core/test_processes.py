"""What is seen of another process from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import eventually
from tests.rings import few
from xgpt.core.processes import children_of, is_at_work, run_module
from xrunner.channel.remote import EngineProcess


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


@pytest.mark.skipif(sys.platform != "linux", reason="children are read from /proc")
def test_an_engine_that_waits_for_a_child_that_works_is_at_work() -> None:
    child = "import time; end = time.monotonic() + 20\nwhile time.monotonic() < end: pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    engine = EngineProcess([sys.executable, "-c", code], b"")
    parent = engine._process.pid
    try:
        assert eventually(lambda: bool(children_of(parent)) and not is_at_work(parent)), "it waits"
        assert eventually(engine.is_at_work)
    finally:
        for each in (*children_of(parent), parent):
            os.kill(each, signal.SIGKILL)
        engine.end(0)
        engine.front.close()


@pytest.mark.parametrize("module", few(["xscheduler.replanning.replanner", "xgpt.serving.engine_process"]))
def test_modules_in_the_current_directory_are_not_run(module: str, tmp_path: Path) -> None:
    """A server that was started within a downloaded checkpoint ran its msgspec.py."""
    for name in ("msgspec", "numpy", "torch", "xgpt"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')\n")
    subprocess.run(run_module(module), cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert not (tmp_path / "ran").exists()
