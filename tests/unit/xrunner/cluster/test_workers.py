"""Workers and launchers that start, end and come back, as the engine's process sees them."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
import zmq

from tests.fakes import eventually
from tests.rings import few
from xgpt.core.errors import MachineError
from xrunner.cluster import messages as m
from xrunner.cluster import workers as workers_module
from xrunner.cluster.launching import Exited, LauncherProcess, LauncherSettings, MachineGroup, StartWorkers
from xrunner.cluster.sockets import Secret, Sockets
from xrunner.cluster.store import EngineStore, EpochKeys
from xrunner.cluster.workers import Workers
from xrunner.executor import WorkerLost

HOST = "127.0.0.1"


def pids(workers: Workers) -> list[int]:
    """Of its workers, once all are there."""
    return [member.hello.pid for _, member in sorted(workers._await_all().items())]


def parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


def is_running(pid: int) -> bool:
    """A zombie, which process 1 has not reaped yet, is not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_lost(workers: Workers) -> bool:
    try:
        workers.check()
    except WorkerLost:
        return True
    return False


def comes_back(workers: Workers, *before: int) -> None:
    assert eventually(lambda: is_lost(workers))
    workers.restart()
    assert not set(pids(workers)) & set(before)
    assert not any(is_running(pid) for pid in before)


@pytest.fixture(scope="module")
def alone() -> Iterator[Workers]:
    with Workers(2) as workers:
        yield workers


@pytest.mark.long
@pytest.mark.parametrize("how", few([signal.SIGKILL, signal.SIGTERM]))
def test_a_launcher_that_dies_is_noticed_and_started_anew(alone: Workers, how: signal.Signals) -> None:
    alone._budget._restarts.clear()
    before = pids(alone)
    (launcher,) = {parent(pid) for pid in before}
    os.kill(launcher, how)
    comes_back(alone, *before)
    assert {parent(pid) for pid in pids(alone)} != {launcher}


def test_a_worker_that_dies_is_noticed_at_once(alone: Workers) -> None:
    alone._budget._restarts.clear()
    before = pids(alone)
    started_s = time.monotonic()
    os.kill(before[1], signal.SIGKILL)
    assert eventually(lambda: is_lost(alone))
    assert time.monotonic() - started_s < 1
    comes_back(alone, *before)


def test_a_worker_that_is_seen_to_work_may_be_silent(alone: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short of processors, or while it compiled, it was called silent after 4 s, and a good plan was refused."""
    alone._budget._restarts.clear()
    before = pids(alone)
    monkeypatch.setattr(workers_module, "SILENCE_S", 0.8)
    with monkeypatch.context() as seen:
        seen.setattr(workers_module, "is_at_work", lambda pid: pid == before[0])
        os.kill(before[0], signal.SIGSTOP)
        time.sleep(1.6)
        assert not is_lost(alone)
    comes_back(alone, *before)


def test_a_launcher_is_at_work_while_its_workers_start() -> None:
    """On an overloaded machine, a worker imports torch for longer than `START_S`, while its launcher only waits."""
    launcher = LauncherProcess.__new__(LauncherProcess)
    shell = subprocess.Popen(["sh", "-c", "while :; do :; done & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    assert shell.stdout is not None
    child, launcher._process = int(shell.stdout.readline()), shell
    try:
        assert eventually(launcher.is_at_work)
        os.kill(child, signal.SIGSTOP)
        assert eventually(lambda: not launcher.is_at_work())
    finally:
        os.kill(child, signal.SIGKILL)
        shell.communicate()


def test_nothing_is_killed_but_children_of_the_launcher(alone: Workers) -> None:
    """A worker that claimed the number of another process had it killed, as did one of a machine of the same name."""
    alone._budget._restarts.clear()
    before = pids(alone)
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        sockets = Sockets(alone.secret, HOST)
        liar = sockets.connect(zmq.DEALER, alone._settings.engine)
        liar.send(m.encode(m.Hello(0, alone._shared.epoch, bystander.pid, "")))
        assert eventually(lambda: bystander.pid in pids(alone))
        os.kill(before[1], signal.SIGKILL)
        comes_back(alone, *before)
        assert bystander.poll() is None
        sockets.close()
    finally:
        bystander.kill()
        bystander.wait()


class AwayMachine:
    """The launcher of another machine: it starts nothing, and reports what the test says."""

    sees_workers = False

    def __init__(self) -> None:
        self.orders: list[StartWorkers] = []
        self.ended: list[Exited] = []
        self.is_lost = False

    def start(self, order: StartWorkers) -> None:
        self.orders.append(order)

    def exited(self) -> list[Exited]:
        if self.is_lost:
            raise MachineError("the machine is gone")
        ended, self.ended = self.ended, []
        return ended

    def is_at_work(self) -> bool:
        return False

    def excuse_silence(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def away() -> Iterator[tuple[Workers, list[AwayMachine]]]:
    """Two workers, each on a machine of its own, and the launchers started so far, the last one that of the second."""
    launchers: list[AwayMachine] = []

    def launch(_: LauncherSettings) -> AwayMachine:
        launchers.append(AwayMachine())
        return launchers[-1]

    with Workers(2, machines=MachineGroup([launch, launch])) as workers:
        yield workers, launchers


def lose_worker(workers: Workers, machine: AwayMachine) -> None:
    machine.ended.append(Exited(workers._shared.epoch, 1))
    assert eventually(lambda: is_lost(workers))
    workers.restart()


def lose_machine(workers: Workers, launchers: list[AwayMachine]) -> None:
    before = len(launchers)
    launchers[-1].is_lost = True
    assert eventually(lambda: is_lost(workers))
    workers.restart()
    assert eventually(lambda: len(launchers) > before and launchers[-1].orders != [])


def test_a_lost_machine_counts_once_though_its_worker_is_missed_first(away: tuple[Workers, list[AwayMachine]]) -> None:
    """Two machine losses within a minute were counted as four, and ended the server with all its requests."""
    workers, launchers = away
    for _ in range(3):
        lose_worker(workers, launchers[-1])
        lose_machine(workers, launchers)
    with pytest.raises(MachineError, match="died 4 times within 60 s"):
        lose_worker(workers, launchers[-1])


@pytest.mark.long
def test_a_launcher_that_is_always_lost_ends_the_server(away: tuple[Workers, list[AwayMachine]]) -> None:
    workers, launchers = away
    with pytest.raises(MachineError, match="died 4 times within 60 s, the last time: the machine is gone"):
        for _ in range(10):
            lose_machine(workers, launchers)


# The store -------------------------------------------------------------------------------------------------------


@pytest.fixture
def stores() -> Iterator[Callable[[], EngineStore]]:
    """Makes stores over the keys that a thread serves."""
    secret, stop = Secret.new(), threading.Event()
    sockets = Sockets(secret, HOST)
    served, endpoint = sockets.bind(zmq.ROUTER)
    keys = EpochKeys(lambda caller, answer: served.send_multipart([caller, m.encode(answer)]))
    keys.begin(1)

    def serve() -> None:
        while not stop.is_set():
            if served.poll(20):
                caller, content = served.recv_multipart()
                call = m.decode_to_engine(content)
                assert isinstance(call, m.StoreCall)
                keys.call(caller, call)
        sockets.close()

    thread = threading.Thread(target=serve)
    thread.start()
    built: list[EngineStore] = []

    def make() -> EngineStore:
        built.append(EngineStore(secret, HOST, endpoint, 1))
        return built[-1]

    yield make
    for store in built:
        store.close()
    stop.set()
    thread.join()


@pytest.mark.long
def test_a_store_does_what_torch_expects_of_one(stores: Callable[[], EngineStore]) -> None:
    one, other = stores(), stores()
    prefixed = dist.PrefixStore("p", one)
    prefixed.set("a", "x")
    assert other.get("p/a") == b"x" and prefixed.get("a") == b"x"
    assert [one.add("n", 2), other.add("n", 3), one.add("n", -5)] == [2, 5, 0]
    assert one.check(["p/a"]) and not one.check(["p/a", "b"])
    assert one.compare_set("c", "", "1") == b"1"
    assert one.compare_set("c", "2", "3") == b"1"
    assert one.compare_set("c", "1", "3") == other.get("c") == b"3"
    assert one.compare_set("d", "1", "3") == b"1" and not one.check(["d"])
    assert one.delete_key("c") and not one.delete_key("c")
    late = threading.Timer(0.1, lambda: other.set("late", b"\0\xff"))
    late.start()
    assert one.get("late") == b"\0\xff"
    late.join()  # whose own answer may come after it; a store is closed when no thread uses it
