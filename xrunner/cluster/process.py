"""Run a worker process. One thread receives and forwards control messages, another executes them."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import SimpleQueue

import torch
import zmq

from xgpt.core.errors import MachineError, XgptError
from xgpt.core.policies import BlockTable, Chunk, Step
from xgpt.core.processes import end_with_parent
from xrunner.build import build_worker, warm_up
from xrunner.cluster import messages as m
from xrunner.cluster.deployment import Deployment
from xrunner.cluster.launching import LauncherSettings, StartWorkers
from xrunner.cluster.links import Links, WorkerWires
from xrunner.cluster.meeting import Meeting
from xrunner.cluster.sockets import Secret, Sockets
from xrunner.cluster.store import EngineStore
from xrunner.cluster.tensors import Fabric, Move, Mover, Nccl, RankPipe, Traffic, stage_group
from xrunner.cores import take_cores
from xrunner.transfer import Cargo, Moving
from xrunner.weights import state_dtype
from xrunner.worker import Worker

ALIVE_S = 0.5


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    launcher: LauncherSettings
    worker: int
    local: int
    started: StartWorkers
    wires: WorkerWires

    @property
    def secret(self) -> Secret:
        return Secret.of(self.launcher.secret)


def main(settings: ProcessSettings, parent: int) -> None:
    end_with_parent(parent)
    worker = settings.worker
    traffic = Traffic()
    launcher, started = settings.launcher, settings.started
    meeting = None
    if started.total > started.count:
        meeting = Meeting(launcher.secret, launcher.host, started.epoch, worker)
    orders: SimpleQueue[m.ToWorker] = SimpleQueue()
    executing = Executing(settings, orders, traffic, meeting)
    compiling = Compiling(settings, executing.prepare)
    compiling.start()
    address = "" if meeting is None else meeting.address
    ControlPlane(settings, orders, compiling.orders, traffic, executing.move, address).start()
    try:
        executing.run()
    except Exception as error:
        # The launcher can report only that this worker has ended, not why.
        print(f"worker {worker} has failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if os.environ.get("XGPT_DEBUG"):
            raise
        os._exit(1)


class ControlPlane(threading.Thread):
    """Receives control messages, forwards them and queues them for `Executing`. Reports regularly that the worker is
    running.

    Args:
        move: begins a transfer, without waiting for steps that were queued earlier.
    """

    def __init__(
        self,
        settings: ProcessSettings,
        orders: SimpleQueue[m.ToWorker],
        compiling: SimpleQueue[m.Prepare | m.Forget],
        traffic: Traffic,
        move: Callable[[m.Transfer], None],
        address: str = "",
    ) -> None:
        super().__init__(name="control", daemon=True)
        self._address = address
        self._move = move
        self._settings = settings
        self._orders = orders
        self._compiling = compiling
        self._traffic = traffic

    def run(self) -> None:
        settings, worker, epoch = self._settings, self._settings.worker, self._settings.started.epoch
        sockets = Sockets(settings.secret, settings.launcher.host)
        engine = sockets.connect(zmq.DEALER, settings.launcher.engine, f"worker {epoch}.{worker}".encode())
        inbox, endpoint = sockets.bind(zmq.PULL)
        peers: list[zmq.Socket[bytes]] = []
        engine.send(m.encode(m.Hello(worker, epoch, os.getpid(), endpoint, self._address)))
        poller = zmq.Poller()
        poller.register(engine, zmq.POLLIN)
        poller.register(inbox, zmq.POLLIN)
        next_alive = 0.0
        while True:
            if (now := time.monotonic()) >= next_alive:
                sent = self._traffic
                counts = sent.control_bytes, sent.tensor_bytes, sent.busy_s
                engine.send(m.encode(m.WorkerAlive(worker, epoch, *counts)))
                next_alive = now + ALIVE_S
            ready = dict(poller.poll(max(1, round(1000 * (next_alive - now)))))
            if inbox in ready:
                content = inbox.recv()
                for peer in peers:
                    peer.send(content)
                self._traffic.control_bytes += len(content) * len(peers)
                order = m.decode_to_worker(content)
                if isinstance(order, m.Transfer):
                    self._move(order)
                self._orders.put(order)
            if engine in ready:
                message = m.decode_to_worker(engine.recv())
                if isinstance(message, m.Prepare | m.Forget):
                    self._compiling.put(message)
                    continue
                if isinstance(message, m.Deploy):
                    for peer in peers:
                        peer.close()
                    peers = [sockets.connect(zmq.PUSH, endpoint) for endpoint in message.forwards_to]
                self._orders.put(message)


class Compiling(threading.Thread):
    """A thread that compiles grammars while steps are executed, and keeps them until `Forget`."""

    def __init__(self, settings: ProcessSettings, prepare: Callable[[str], object]) -> None:
        super().__init__(name="grammars", daemon=True)
        self.orders: SimpleQueue[m.Prepare | m.Forget] = SimpleQueue()
        self._settings = settings
        self._prepare = prepare

    def run(self) -> None:
        order = self.orders.get()
        settings = self._settings
        engine = Sockets(settings.secret, settings.launcher.host).connect(zmq.DEALER, settings.launcher.engine)
        kept: dict[int, object] = {}
        while True:
            match order:
                case m.Prepare(number, grammar):
                    error = ""
                    try:
                        kept[number] = self._prepare(grammar)
                    except Exception as failed:  # this error ends the request, not the worker
                        error = str(failed) or type(failed).__name__
                    engine.send(m.encode(m.Prepared(number, settings.worker, error)))
                case m.Forget(number):
                    kept.pop(number, None)
            order = self.orders.get()


class Executing:
    """Executes orders one after the other. All workers of a lane get them in the same order."""

    def __init__(
        self,
        settings: ProcessSettings,
        orders: SimpleQueue[m.ToWorker],
        traffic: Traffic,
        meeting: Meeting | None = None,
    ) -> None:
        self._settings = settings
        self._number = settings.worker
        self._orders = orders
        self._traffic = traffic
        self._device_index = settings.launcher.first_device + settings.local
        self._sockets = Sockets(settings.secret, settings.launcher.host)
        self._engine = self._sockets.connect(zmq.DEALER, settings.launcher.engine)
        self._meeting = meeting
        self._links: Links | None = None
        self._nccl: Nccl | None = None
        self._answers: zmq.Socket[bytes] | None = None
        self._worker: Worker | None = None
        self._is_answering = False
        self._lane = "both"
        self._mover: Mover | None = None
        self._cargo: Cargo | None = None
        self._num_transfers = 0

    def run(self) -> None:
        while True:
            match self._orders.get():
                case m.Work() as work:
                    self._execute(work)
                case m.RunEncoder() as read:
                    self._run_encoder(read)
                case m.Transfer() as transfer:
                    self._transfer(transfer)
                case m.Deploy() as order:
                    self._deploy(order)

    def _deploy(self, order: m.Deploy) -> None:
        started = time.perf_counter()
        try:
            self._build(Deployment.model_validate_json(order.deployment), order.answers_to, order.links)
        except XgptError as error:
            self._engine.send(m.encode(m.Loaded(self._number, 0.0, str(error), error.exit_code)))
            return
        except (RuntimeError, MemoryError, OSError) as error:  # there is too little memory, or a peer is missing
            reason = f"{type(error).__name__}: {error}"
            self._engine.send(m.encode(m.Loaded(self._number, 0.0, reason, MachineError.exit_code)))
            return
        self._engine.send(m.encode(m.Loaded(self._number, time.perf_counter() - started)))

    def _build(self, deployment: Deployment, answers_to: str, addresses: list[str]) -> None:
        self._clear()
        links = self._links = self._links or self._connected(addresses)
        fabric = self._fabric(links, deployment.settings.device)
        group = stage_group(fabric, deployment, self._number, self._traffic)
        if self._number >= deployment.num_workers:
            return  # nothing to do this time
        role = deployment.role(self._number)
        settings = deployment.settings
        device = settings.device
        if device == "cuda" and torch.cuda.is_available():
            device = f"cuda:{self._device_index % torch.cuda.device_count()}"
            torch.cuda.set_device(device)
        pipe = RankPipe(
            fabric, role, settings.spec.hidden_size, state_dtype(settings.dtype, device), device, self._traffic
        )
        self._worker = build_worker(
            replace(settings, num_blocks=role.kv_blocks, device=device, threads=settings.threads or 1),
            part=role.part,
            group=group,
            pipe=pipe,
        )
        if device == "cpu":
            take_cores(self._device_index % deployment.devices_per_node, deployment.devices_per_node)
        self._answers = self._sockets.connect(zmq.PUSH, answers_to)
        self._is_answering = role.reports
        self._lane = deployment.stages[role.number].lane
        if deployment.lane("decode"):
            moved = self._tell_moved(answers_to) if self._lane == "decode" else lambda number: None
            self._cargo = self._worker.cargo(role.part)
            self._num_transfers = 0
            self._mover = Mover(self._cargo, deployment, self._number, links, self._traffic, moved)
            self._mover.start()
        warm_up(self._worker, encode=self._lane != "decode", decode=self._lane != "encode")
        self._traffic.busy_s = 0.0  # so far, only waiting was counted

    def _connected(self, addresses: list[str]) -> Links:
        wires = self._settings.wires
        links = Links.of_machine(wires)
        if self._meeting is not None:
            here = range(wires.first, wires.first + wires.count)
            away = {worker: address for worker, address in enumerate(addresses) if worker not in here}
            for worker, ends in self._meeting.join(away).items():
                links.add(worker, ends)
        return links

    def _fabric(self, links: Links, device: str) -> Fabric:
        gpus = torch.cuda.device_count() if device == "cuda" and torch.cuda.is_available() else 0
        if gpus < self._settings.started.count:
            return links
        if self._nccl is None:
            address, started = self._settings.launcher, self._settings.started
            store = EngineStore(self._settings.secret, address.host, address.engine, started.epoch)
            self._nccl = Nccl(store, self._number, started.total)
        return self._nccl

    def _clear(self) -> None:
        if self._mover is not None:
            self._mover.stop()
            self._mover.join()
        if self._answers is not None:
            self._answers.close()
        self._mover = self._cargo = self._answers = self._worker = None

    def _tell_moved(self, answers_to: str) -> Callable[[int], None]:
        """Return a function that reports the end of a transfer. It has its own socket, since the `Mover` thread calls
        it.
        """
        answers = self._sockets.connect(zmq.PUSH, answers_to)
        return lambda number: answers.send(m.encode(m.Moved(number, self._number)))

    def _run_encoder(self, read: m.RunEncoder) -> None:
        worker = self._worker_of(read.release, read.begin)
        started = time.perf_counter()
        encode = tuple(Chunk(*chunk) for chunk in read.encode)
        worker.run_encoder(Step(encode, tuple(read.decode), grown=tuple(read.grown)))
        self._traffic.busy_s += time.perf_counter() - started
        if self._is_answering:
            self._answer(m.encode(m.EncoderRan(read.number)))

    def _execute(self, work: m.Work) -> None:
        worker = self._worker_of(work.release, work.begin)
        if self._cargo is not None:
            self._cargo.take_in(self._num_transfers)
        worker.set_last_tokens(work.decode, work.tokens)
        step = Step(tuple(Chunk(*chunk) for chunk in work.encode), tuple(work.decode), grown=tuple(work.grown))
        started = time.perf_counter()
        tokens = worker.execute(step, encoder_ran=work.encoder_ran)
        self._traffic.busy_s += time.perf_counter() - started
        if self._is_answering:
            done = m.Done(work.number, list(tokens), list(tokens.values()), worker.logprobs, worker.failed)
            self._answer(m.encode(done))

    def _worker_of(self, release: list[int], begin: list[m.Beginning]) -> Worker:
        worker = self._worker
        assert worker is not None
        worker.release(release)
        for beginning in begin:
            worker.start(beginning.generation, BlockTable(list(beginning.blocks)))
        return worker

    def prepare(self, grammar: str) -> object:
        """Any thread may call this."""
        worker = self._worker
        return None if worker is None else worker.prepare(grammar)

    def move(self, transfer: m.Transfer) -> None:
        """Begin a transfer in the `Mover` thread, while earlier steps are still executed.

        Earlier steps do not use the transfer's blocks: the engine has already received the results of all steps that
        did.
        """
        assert self._mover is not None
        requests = [
            Moving(beginning.generation.id, list(beginning.moving), beginning.cached) for beginning in transfer.begin
        ]
        self._mover.move(Move(transfer.number, requests))

    def _transfer(self, transfer: m.Transfer) -> None:
        worker = self._worker
        assert worker is not None
        worker.release(transfer.release)
        if self._lane == "decode":
            for beginning in transfer.begin:
                worker.adopt(beginning.generation, BlockTable(list(beginning.blocks)), beginning.cached)
        self._num_transfers += 1

    def _answer(self, answer: bytes) -> None:
        assert self._answers is not None
        self._traffic.control_bytes += len(answer)
        self._answers.send(answer)
