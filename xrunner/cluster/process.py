"""What a worker runs: it hands on control messages in one thread, and executes them in another."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch
import torch.distributed as dist
import zmq

from xgpt.errors import XgptError
from xgpt.policies import Chunk, Step
from xrunner.cluster import messages as m
from xrunner.cluster.deployment import Deployment
from xrunner.cluster.movers import Mover, Order
from xrunner.cluster.sockets import Secret, Sockets
from xrunner.cluster.tensors import RankPipe, Traffic, stage_groups
from xrunner.transfer import Moving
from xrunner.weights import DTYPES
from xrunner.worker import Worker, build_worker, warm_up

ALIVE_S = 0.5
"""How often a worker says that it is alive."""

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Settings:
    """What a worker is started with.

    Attributes:
        engine: the endpoint at which the engine's process listens to its workers.
        secret: the private key that all share.
        host: address of the interface to listen on.
        first_device: number of the first device on this machine that the replica has.
        farewell: a file that is made once the first machine has said that it ends in good order.
    """

    engine: str
    secret: bytes
    host: str
    first_device: int
    farewell: Path


def main(settings: Settings) -> None:
    """Run until the launcher, torch's elastic one, ends this process; it also sets the environment."""
    die_with_parent()
    worker = int(os.environ["RANK"])
    traffic = Traffic()
    orders: SimpleQueue[m.ToWorker] = SimpleQueue()
    ControlPlane(settings, worker, orders, traffic).start()
    try:
        Executing(settings, worker, orders, traffic).run()
    except Exception as error:
        # The launcher reports that we died; why, only we know.
        print(f"worker {worker} has failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if os.environ.get("XGPT_DEBUG"):
            raise
        os._exit(1)


def _connect(epoch: int) -> None:
    """Join the group of all workers.

    Keys of the epoch before are still in the launcher's store, and lead to processes that are no more; how often it
    has restarted workers may differ from machine to machine. So the engine says what number to take.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(f"xgpt/{epoch}", dist.TCPStore(address, port, world, is_master))
    dist.init_process_group(_backend(), store=store, rank=rank, world_size=world)


def _backend() -> str:
    """Gloo alone where several workers share a GPU, which NCCL does not do."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "cpu:gloo,cuda:nccl" if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo"


def die_with_parent() -> None:
    """Have the kernel end this process when the one that started it ends, where that is Linux."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class ControlPlane(threading.Thread):
    """Receives control messages, hands them on, and only then queues them for the device. Says that we are alive."""

    def __init__(self, settings: Settings, worker: int, orders: SimpleQueue[m.ToWorker], traffic: Traffic) -> None:
        super().__init__(name="control", daemon=True)
        self._settings = settings
        self._worker = worker
        self._incarnation = time.time_ns()
        self._orders = orders
        self._traffic = traffic

    def run(self) -> None:
        sockets = Sockets(Secret.of(self._settings.secret), self._settings.host)
        engine = sockets.connect(zmq.DEALER, self._settings.engine, str(self._worker).encode())
        inbox, endpoint = sockets.bind(zmq.PULL)
        peers: list[zmq.Socket[bytes]] = []
        engine.send(m.encode(m.Hello(self._worker, self._incarnation, socket.gethostname(), os.getpid(), endpoint)))
        poller = zmq.Poller()
        poller.register(engine, zmq.POLLIN)
        poller.register(inbox, zmq.POLLIN)
        next_alive = 0.0
        while True:
            if (now := time.monotonic()) >= next_alive:
                sent = self._traffic
                counts = sent.control_bytes, sent.tensor_bytes, sent.busy_s
                engine.send(m.encode(m.Alive(self._worker, self._incarnation, *counts)))
                next_alive = now + ALIVE_S
            ready = dict(poller.poll(max(1, round(1000 * (next_alive - now)))))
            if inbox in ready:
                order = inbox.recv()
                for peer in peers:
                    peer.send(order)
                self._traffic.control_bytes += len(order) * len(peers)
                self._orders.put(m.decode_to_worker(order))
            if engine in ready:
                message = m.decode_to_worker(engine.recv())
                if isinstance(message, m.Deploy):
                    for peer in peers:
                        peer.close()
                    peers = [sockets.connect(zmq.PUSH, endpoint) for endpoint in message.hands_on_to]
                if isinstance(message, m.Stop):
                    self._settings.farewell.touch()
                    engine.send(m.encode(m.Goodbye(self._worker)))
                else:
                    self._orders.put(message)


class Executing:
    """Executes orders one after the other, in the order in which all workers of a lane get them."""

    def __init__(self, settings: Settings, worker: int, orders: SimpleQueue[m.ToWorker], traffic: Traffic) -> None:
        self._number = worker
        self._orders = orders
        self._traffic = traffic
        self._device_index = settings.first_device + int(os.environ["LOCAL_RANK"])
        sockets = Sockets(Secret.of(settings.secret), settings.host)
        self._sockets = sockets
        self._engine = sockets.connect(zmq.DEALER, settings.engine)
        self._answers: zmq.Socket[bytes] | None = None
        self._worker: Worker | None = None
        self._is_answering = False
        self._lane = "both"
        self._mover: Mover | None = None

    def run(self) -> None:
        while True:
            match self._orders.get():
                case m.Work() as work:
                    self._execute(work)
                case m.Read() as read:
                    self._read(read)
                case m.Transfer() as transfer:
                    self._transfer(transfer)
                case m.Deploy() as order:
                    self._deploy(order)

    def _deploy(self, order: m.Deploy) -> None:
        started = time.perf_counter()
        try:
            self._build(Deployment.model_validate_json(order.deployment), order.answers_to, order.epoch)
        except XgptError as error:
            self._engine.send(m.encode(m.Loaded(self._number, 0.0, str(error), error.exit_code)))
            return
        self._engine.send(m.encode(m.Loaded(self._number, time.perf_counter() - started)))

    def _build(self, deployment: Deployment, answers_to: str, epoch: int) -> None:
        self._clear()
        if not dist.is_initialized():
            _connect(epoch)
        group = stage_groups(deployment, self._number, self._traffic)
        transfers = dist.new_group(backend="gloo") if deployment.lane("decode") else None
        if self._number >= deployment.num_workers:
            return  # nothing to do this time
        seat = deployment.seat(self._number)
        device: str = deployment.device
        if device == "cuda" and torch.cuda.is_available():
            device = f"cuda:{self._device_index % torch.cuda.device_count()}"
            torch.cuda.set_device(device)
        pipe = RankPipe(seat, deployment.model.hidden_size, DTYPES[deployment.dtype], device, self._traffic)
        self._worker = build_worker(
            deployment.model,
            deployment.dtype,
            checkpoint=None if deployment.checkpoint is None else Path(deployment.checkpoint),
            seed=deployment.seed,
            num_blocks=seat.kv_blocks,
            block_size=deployment.block_size,
            backend=deployment.backend,
            device=device,
            threads=deployment.threads or 1,
            part=seat.part,
            group=group,
            pipe=pipe,
        )
        self._answers = self._sockets.connect(zmq.PUSH, answers_to)
        self._is_answering = seat.answers
        self._lane = deployment.stages[seat.number].lane
        if transfers is not None:
            moved = self._tell_moved(answers_to) if self._lane == "decode" else lambda number: None
            cargo = self._worker.cargo(seat.part)
            self._mover = Mover(cargo, deployment, self._number, transfers, self._traffic, moved)
            self._mover.start()
        warm_up(self._worker, encode=self._lane != "decode", decode=self._lane != "encode")
        self._traffic.busy_s = 0.0  # only waits have been counted so far

    def _clear(self) -> None:
        """Give up what was deployed before: its memory is needed."""
        if self._mover is not None:
            self._mover.stop()
            self._mover.join()
        if self._answers is not None:
            self._answers.close()
        self._mover = self._answers = self._worker = None

    def _tell_moved(self, answers_to: str) -> Callable[[int], None]:
        """A socket of the transfer thread's own."""
        answers = self._sockets.connect(zmq.PUSH, answers_to)
        return lambda number: answers.send(m.encode(m.Moved(number, self._number)))

    def _read(self, read: m.Read) -> None:
        """The first pass of a step whose prompts pass a pipeline twice."""
        worker = self._worker_of(read.release, read.begin)
        started = time.perf_counter()
        worker.read(Step(tuple(Chunk(*chunk) for chunk in read.encode), ()))
        self._traffic.busy_s += time.perf_counter() - started
        if self._is_answering:
            self._answer(m.encode(m.HasRead(read.number)))

    def _execute(self, work: m.Work) -> None:
        worker = self._worker_of(work.release, work.begin)
        worker.tell(work.decode, work.tokens)
        step = Step(tuple(Chunk(*chunk) for chunk in work.encode), tuple(work.decode))
        started = time.perf_counter()
        tokens = worker.execute(step, has_read=work.has_read)
        self._traffic.busy_s += time.perf_counter() - started
        if self._is_answering:
            done = m.Done(work.number, list(tokens), list(tokens.values()), worker.logprobs)
            self._answer(m.encode(done))

    def _worker_of(self, release: list[int], begin: list[m.Beginning]) -> Worker:
        """The worker, with these requests gone and those begun."""
        worker = self._worker
        assert worker is not None
        worker.release(release)
        for beginning in begin:
            worker.start(beginning.generation())
        return worker

    def _transfer(self, transfer: m.Transfer) -> None:
        worker, mover = self._worker, self._mover
        assert worker is not None and mover is not None
        worker.release(transfer.release)
        if self._lane == "decode":
            for beginning in transfer.begin:
                worker.adopt(beginning.generation(), beginning.cached)
        requests = [
            Moving(beginning.id, worker.cache.blocks_of(beginning.id), beginning.cached) for beginning in transfer.begin
        ]
        mover.move(Order(transfer.number, requests))

    def _answer(self, answer: bytes) -> None:
        assert self._answers is not None
        self._traffic.control_bytes += len(answer)
        self._answers.send(answer)
