"""Links between workers: streams of bytes, and memory that the workers of one machine share. They open no port.

The workers of a machine get pairs of Unix sockets and shared memory from the process that starts them (`Wires`).
Workers of several machines meet once over TCP (`xrunner.cluster.meeting`); their port is open only until all have met.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from multiprocessing.reduction import DupFd
from typing import Any, Protocol

import torch
from torch import Tensor

from xgpt.core.errors import MachineError

STEPS, TRANSFERS, GROUPS = range(3)
"""The streams of a pair of workers: hidden states, transfers of K/V, and exchanges within a stage."""
NUM_STREAMS = 3
SLOT_BYTES = 1 << 20


class Sending(Protocol):
    """A send that may not have ended. Its tensor must not change until then."""

    def wait(self) -> Any:
        """Wait for the end."""


class _Sent:
    def wait(self) -> None:
        """Return at once."""


SENT = _Sent()


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class WorkerLink:
    """A stream to another worker. Only one thread may use it."""

    def __init__(self, end: socket.socket, worker: int) -> None:
        self._end = end
        self._worker = worker
        end.setblocking(True)
        self._changed = threading.Condition()
        self._unsent: deque[tuple[memoryview, threading.Event]] = deque()
        self._sending: threading.Thread | None = None

    def send(self, tensor: Tensor) -> Sending:
        rest = _bytes_of(tensor.detach().contiguous().cpu())
        with self._changed:
            if not self._unsent:
                try:
                    rest = rest[self._end.send(rest, socket.MSG_DONTWAIT) :] if rest else rest
                except BlockingIOError:
                    pass
                except OSError:
                    raise self._gone() from None
            if not rest:
                return SENT
            done = threading.Event()
            self._unsent.append((rest, done))
            if self._sending is None:
                self._sending = threading.Thread(target=self._send_all, name="sends", daemon=True)
                self._sending.start()
            self._changed.notify()
        return done

    def receive(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            received = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.receive(received)
            tensor.copy_(received)
            return
        rest = _bytes_of(tensor)
        while rest:
            try:
                count = self._end.recv_into(rest, 0, socket.MSG_WAITALL)
            except OSError:
                count = 0
            if not count:
                raise self._gone()
            rest = rest[count:]

    def tell(self) -> None:
        try:
            self._end.send(b".")
        except OSError:
            raise self._gone() from None

    def await_sign(self) -> None:
        if not self._end.recv(1):
            raise self._gone()

    def close(self) -> None:
        self._end.close()

    def _send_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent)
                rest, done = self._unsent[0]
            try:
                self._end.sendall(rest)
            except OSError:
                return  # whoever waits for this worker is told by its next call, or ended by the launcher
            with self._changed:
                self._unsent.popleft()
            done.set()

    def _gone(self) -> MachineError:
        return MachineError(f"worker {self._worker} has ended")


class SharedMemory:
    def __init__(self, size: int, file: int | None = None) -> None:
        if file is None and hasattr(os, "memfd_create"):
            file = os.memfd_create("xgpt")
        elif file is None:
            with tempfile.TemporaryFile() as opened:
                file = os.dup(opened.fileno())
        self._file, self._size = file, size
        os.ftruncate(file, size)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (DupFd(self._file), self._size)

    def tensor(self) -> Tensor:
        return torch.frombuffer(mmap.mmap(self._file, self._size), dtype=torch.uint8)

    def close(self) -> None:
        os.close(self._file)


def _attached(file: Any, size: int) -> SharedMemory:
    return SharedMemory(size, file.detach())


@dataclass(frozen=True)
class WorkerWires:
    worker: int
    first: int
    count: int
    ends: Mapping[int, Sequence[socket.socket]]
    memory: SharedMemory


class Wires:
    def __init__(self, first: int, count: int) -> None:
        self._memory = SharedMemory(2 * count * SLOT_BYTES)
        ends: dict[int, dict[int, list[socket.socket]]] = {first + i: {} for i in range(count)}
        for a, b in combinations(ends, 2):
            ends[a][b], ends[b][a] = (list(of_one) for of_one in zip(*map(_pair, range(NUM_STREAMS)), strict=True))
        self.of_workers = [WorkerWires(worker, first, count, ends[worker], self._memory) for worker in ends]

    def keep(self, kept: WorkerWires | None) -> None:
        """Close everything in this process but one worker's wires: a worker sees the end of another only if no process
        holds that one's sockets.
        """
        for wires in self.of_workers:
            if wires is not kept:
                for end in (end for streams in wires.ends.values() for end in streams):
                    end.close()
        if kept is None:
            self._memory.close()


def _pair(_: int) -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


class LinkGroup:
    """Exchanges tensors among workers. All must call the same methods in the same order.

    Sums are added in the order of ranks, so that all ranks have the same bits.
    """

    def __init__(self, links: Links, workers: Sequence[int]) -> None:
        self._rank, self._degree = workers.index(links.worker), len(workers)
        self._others = {rank: links.of(worker, GROUPS) for rank, worker in enumerate(workers) if worker != links.worker}
        self._slots = links.slots_of(workers)
        self._turn = 0

    def add_up(self, x: Tensor) -> None:
        flat = x.view(-1)
        for begin, parts in self._pieces(flat):
            piece = flat[begin : begin + len(parts[0])]
            total = torch.add(parts[0], parts[1], out=piece) if piece.device.type == "cpu" else parts[0] + parts[1]
            for part in parts[2:]:
                total.add_(part)
            if total is not piece:
                piece.copy_(total)

    def gather(self, x: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(x) for _ in range(self._degree)]
        for begin, parts in self._pieces(x.view(-1)):
            for part, whole in zip(parts, gathered, strict=True):
                whole.view(-1)[begin : begin + len(part)] = part
        return gathered

    def _pieces(self, flat: Tensor) -> Iterable[tuple[int, Sequence[Tensor]]]:
        """They are valid until the next part."""
        if self._slots is None:
            yield 0, self._sent_around(flat)
            return
        most = SLOT_BYTES // flat.element_size()
        for begin in range(0, len(flat), most):
            count = min(most, len(flat) - begin)
            # A rank has read a turn's slots before it gives the next sign, so two turns are enough.
            self._turn ^= 1
            size = count * flat.element_size()
            parts = [of_rank[self._turn][:size].view(flat.dtype) for of_rank in self._slots]
            parts[self._rank].copy_(flat[begin : begin + count])
            for other in self._others.values():
                other.tell()
            for other in self._others.values():
                other.await_sign()
            yield begin, parts

    def _sent_around(self, flat: Tensor) -> list[Tensor]:
        mine = flat.detach().cpu().clone()
        sends = [other.send(mine) for other in self._others.values()]
        parts = [mine if rank == self._rank else torch.empty_like(mine) for rank in range(self._degree)]
        for rank, other in self._others.items():
            other.receive(parts[rank])
        for sent in sends:
            sent.wait()
        return parts


@dataclass
class Links:
    worker: int
    _links: dict[int, list[WorkerLink]] = field(default_factory=dict)
    _slots: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of_machine(cls, wires: WorkerWires) -> Links:
        links = cls(wires.worker)
        for other, ends in wires.ends.items():
            links.add(other, ends)
        all_slots = wires.memory.tensor().view(wires.count, 2, SLOT_BYTES)
        for local in range(wires.count):
            links._slots[wires.first + local] = all_slots[local, 0], all_slots[local, 1]
        return links

    def add(self, worker: int, ends: Sequence[socket.socket]) -> None:
        self._links[worker] = [WorkerLink(end, worker) for end in ends]

    def close(self) -> None:
        for link in chain.from_iterable(self._links.values()):
            link.close()

    def of(self, worker: int, stream: int) -> WorkerLink:
        return self._links[worker][stream]

    def slots_of(self, workers: Sequence[int]) -> list[tuple[Tensor, Tensor]] | None:
        return [self._slots[worker] for worker in workers] if self._slots.keys() >= set(workers) else None

    # A `tensors.Fabric` --------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, worker: int) -> Sending:
        return self.of(worker, STEPS).send(tensor)

    def receive(self, tensor: Tensor, worker: int) -> None:
        self.of(worker, STEPS).receive(tensor)

    def group(self, workers: Sequence[int]) -> LinkGroup | None:
        return LinkGroup(self, workers) if self.worker in workers else None
