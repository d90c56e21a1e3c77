"""How long a step waited for a core."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from xgpt.core.schema import StepRecord
from xrunner import cores
from xrunner.cores import CoreWaitMeter

STEP = StepRecord(0, 10**12, (), (1,), (), (), ())


def in_a_thread(run: Callable[[], None]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.mark.skipif(not cores.waited_ns(), reason="this kernel does not count what threads wait for a core")
def test_another_process_on_the_core_is_waited_for() -> None:
    seen: list[StepRecord] = []

    def compute() -> None:
        core = min(os.sched_getaffinity(0))
        os.sched_setaffinity(threading.get_native_id(), {core})
        spin = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
        with subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            log = CoreWaitMeter(seen.append)
            cpu_s, start_ns = time.thread_time(), time.perf_counter_ns()
            while time.thread_time() - cpu_s < 0.2:
                pass
            log(STEP._replace(start_ns=start_ns, end_ns=time.perf_counter_ns()))
            other.kill()

    in_a_thread(compute)
    (record,) = seen
    assert record.core_wait_ns is not None
    # Whatever else the machine does: all that the thread did not compute of this time, it waited.
    assert record.core_wait_ns == pytest.approx(record.end_ns - record.start_ns - 0.2e9, rel=0.2)
    assert record.core_wait_ns > 0.02e9


def test_the_thread_that_answers_requests_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "TASKS", tmp_path)
    main, first, second = os.getpid(), 1, 2

    def waited(**ns: int) -> None:
        for task, wait_ns in zip((main, first, second), ns.values(), strict=True):
            (tmp_path / str(task)).mkdir(exist_ok=True)
            (tmp_path / str(task) / "schedstat").write_text(f"7 {wait_ns} 3\n")

    seen: list[StepRecord] = []

    def run() -> None:
        waited(main=10, first=20, second=0)
        log = CoreWaitMeter(seen.append)
        waited(main=5000, first=520, second=300)
        log(STEP)
        log(STEP)
        waited(main=5000, first=520, second=900)
        log(STEP._replace(end_ns=400))

    in_a_thread(run)
    assert [record.core_wait_ns for record in seen] == [500, 0, 400]  # of a step, at most the step


def test_a_thread_that_has_ended_is_forgotten() -> None:
    ended: list[Path] = []

    def look() -> None:
        ended.append(cores.TASKS / str(threading.get_native_id()) / "schedstat")
        assert cores.waited_ns() and ended[-1] in cores._files

    for _ in range(20):
        in_a_thread(look)
    until_s = time.monotonic() + 10  # a thread that was joined is not yet gone from the kernel
    while cores.waited_ns() and cores._files.keys() & set(ended) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not cores._files.keys() & set(ended)


def test_where_the_system_does_not_tell_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "TASKS", tmp_path / "none")
    seen: list[StepRecord] = []
    CoreWaitMeter(seen.append)(STEP)
    assert seen == [STEP]
