"""Threads that compute steps do not share a core where there is one for each."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.lib.served_plans import PLANS, one_lane, plan, served
from xgpt.core.schema import Plan
from xrunner.cores import own_cores, take_cores

HERE = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = pytest.mark.skipif(len(HERE) < 2, reason="there is one core, or the system does not say which")


def kept_to(process: int) -> list[int]:
    """The cores on which threads of a process must stay, one for each of these threads."""
    threads = [int(task.name) for task in Path(f"/proc/{process}/task").iterdir()]
    return sorted(core for thread in threads if len(cores := os.sched_getaffinity(thread)) == 1 for core in cores)


def in_a_thread(num_threads: int, cores: list[int], compute: Callable[[], None]) -> None:
    """Run a function in a thread that computes with this many threads, and may use these cores."""

    def run() -> None:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(num_threads)
        compute()

    thread = threading.Thread(target=run)
    before = torch.get_num_threads()
    thread.start()
    thread.join()
    torch.set_num_threads(before)


def test_each_thread_of_a_team_has_a_core_for_as_long_as_it_takes_them() -> None:
    found: list[list[int]] = []

    def compute() -> None:
        with own_cores():
            torch.ones(1000, 1000).exp_()
            found.append(kept_to(os.getpid()))
        found.append(kept_to(os.getpid()))

    in_a_thread(2, HERE[:2], compute)
    assert found == [HERE[:2], []]


def test_threads_that_leave_cores_free_move_as_they_did() -> None:
    taken: list[bool] = []
    in_a_thread(1, HERE[:2], lambda: taken.append(take_cores()))
    in_a_thread(2, HERE[:2], lambda: taken.append(take_cores(1, 2)))
    in_a_thread(1, HERE[:1], lambda: taken.append(take_cores()))
    assert not any(taken)


@pytest.mark.parametrize("part", [0, 1])
def test_teams_of_several_processes_have_each_their_part(part: int) -> None:
    found: list[list[int]] = []

    def compute() -> None:
        assert take_cores(part, 2)
        found.append(kept_to(os.getpid()))

    in_a_thread(1, HERE[:2], compute)
    assert found == [[HERE[part]]]


def on_all_cores() -> Plan:
    subject = plan(one_lane([1]))
    return subject.model_copy(update={"profile": subject.profile.model_copy(update={"num_threads": len(HERE)})})


@pytest.mark.long
def test_a_server_of_one_device_has_a_core_for_each_thread(tmp_path: Path) -> None:
    with served(on_all_cores(), tmp_path) as server:
        assert server.engine is not None and kept_to(server.engine) == HERE
        assert kept_to(server.process.pid) == []


@pytest.mark.skipif(len(HERE) != 2, reason="two workers of a thread each do not fill the cores")
@pytest.mark.long
@pytest.mark.parametrize("name", PLANS)
def test_a_server_of_two_devices_has_a_core_for_each_worker(name: str, tmp_path: Path) -> None:
    with served(PLANS[name](), tmp_path) as server:
        assert [kept_to(worker)[:1] for worker in server.pids] == [[core] for core in HERE]
        assert kept_to(server.process.pid) == []
