"""Workers, launchers and machines that start, end and come back, as the engine's process sees them."""

from __future__ import annotations

import os
import signal
import socket
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
from xrunner.cluster import nodes
from xrunner.cluster import workers as workers_module
from xrunner.cluster.launching import LauncherSettings
from xrunner.cluster.nodes import Node
from xrunner.cluster.sockets import Secret, Sockets
from xrunner.cluster.store import EngineStore, EpochKeys
from xrunner.cluster.workers import Workers
from xrunner.executor import WorkerLost

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((HOST, 0)) as opened:
        port: int = opened.getsockname()[1]
    return port


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


@pytest.mark.parametrize("how", few([signal.SIGKILL, signal.SIGTERM]))
def test_a_launcher_that_dies_is_noticed_and_started_anew(alone: Workers, how: signal.Signals) -> None:
    alone._restarts.clear()
    before = pids(alone)
    (launcher,) = {parent(pid) for pid in before}
    os.kill(launcher, how)
    comes_back(alone, *before)
    assert {parent(pid) for pid in pids(alone)} != {launcher}


def test_a_worker_that_dies_is_noticed_at_once(alone: Workers) -> None:
    alone._restarts.clear()
    before = pids(alone)
    started_s = time.monotonic()
    os.kill(before[1], signal.SIGKILL)
    assert eventually(lambda: is_lost(alone))
    assert time.monotonic() - started_s < 1
    comes_back(alone, *before)


def test_a_worker_that_is_seen_to_work_may_be_silent(alone: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short of processors, or while it compiled, it was called silent after 4 s, and a good plan was refused."""
    alone._restarts.clear()
    before = pids(alone)
    monkeypatch.setattr(workers_module, "SILENCE_S", 0.8)
    with monkeypatch.context() as seen:
        seen.setattr(workers_module, "is_at_work", lambda pid: pid == before[0])
        os.kill(before[0], signal.SIGSTOP)
        time.sleep(1.6)
        assert not is_lost(alone)
    comes_back(alone, *before)


def test_nothing_is_killed_but_children_of_the_launcher(alone: Workers) -> None:
    """A worker that claimed the number of another process had it killed, as did one of a machine of the same name."""
    alone._restarts.clear()
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


class Joined:
    """Another machine, which is this one: host names are the same, too."""

    def __init__(self, port: int, secret: Secret) -> None:
        self.node = Node(1, LauncherSettings(f"tcp://{HOST}:{port}", secret.private, HOST))
        self.error: MachineError | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.node.run()
        except MachineError as error:
            self.error = error

    def end(self) -> None:
        self.node.end()
        self.thread.join(20)


@pytest.mark.long
def test_machines_of_one_name_are_told_apart() -> None:
    secret, port = Secret.from_passphrase("a" * 16), free_port()
    with Workers(2, num_nodes=2, port=port, secret=secret) as workers:
        other = Joined(port, secret)
        before = pids(workers)
        assert parent(before[0]) != parent(before[1])
        for worker in (1, 0):
            old = pids(workers)
            os.kill(old[worker], signal.SIGKILL)
            comes_back(workers, *old)
        os.kill(parent(pids(workers)[1]), signal.SIGKILL)  # the other machine's launcher
        comes_back(workers)
        workers._restarts.clear()
        old = pids(workers)
        other.end()  # the machine goes, and another comes in its place
        assert not is_running(old[1])
        other = Joined(port, secret)
        comes_back(workers, *old)
    other.thread.join(20)
    assert not other.thread.is_alive() and other.error is None


@pytest.mark.long
def test_one_machine_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "MEET_S", 2.0)
    secret, port = Secret.from_passphrase("b" * 16), free_port()
    with Workers(2, num_nodes=2, port=port, secret=secret) as workers:
        first = Joined(port, secret)
        pids(workers)
        second = Joined(port, secret)
        second.thread.join(20)
        assert "node rank 1 is taken" in str(second.error)
        assert not is_lost(workers)
    first.thread.join(20)
    assert first.error is None


@pytest.mark.parametrize("passphrase", few(["c" * 16, "d" * 16]))
def test_an_engine_that_is_not_there_or_has_another_secret(passphrase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "MEET_S", 1.0)
    sockets = Sockets(Secret.from_passphrase("d" * 15 + "e"), HOST)
    port = free_port()
    sockets.bind(zmq.ROUTER, port)
    alone = Joined(port, Secret.from_passphrase(passphrase))
    alone.thread.join(20)
    assert "cannot be reached" in str(alone.error)
    sockets.close()


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
