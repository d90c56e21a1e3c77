"""Exchange tensors between workers: all-reduces within a stage, hidden states between stages, and K/V (or encoder
outputs) from WAA's encode lane to its decode lane.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from xrunner.cluster.deployment import Deployment, Role
from xrunner.cluster.links import TRANSFERS, Links, Sending
from xrunner.transfer import Cargo, Moving, Piece, encoder_output_pieces, pieces

MAX_UNDER_WAY = 8
"""Largest number of unfinished sends of hidden states. Further sends wait. It exceeds a pipeline's number of
micro-batches.
"""
MAX_MEMORIES = 64
"""Largest number of unfinished sends of encoder outputs per receiver. A step's second pass receives one for each
slice.
"""


@dataclass
class Traffic:
    """Bytes that this worker has sent since its start, and seconds that it has spent on steps since its last
    deployment, excluding waits for other stages.
    """

    tensor_bytes: int = 0
    control_bytes: int = 0
    busy_s: float = 0.0

    def count(self, tensor: Tensor, copies: int = 1) -> None:
        self.tensor_bytes += copies * tensor.numel() * tensor.element_size()


class RawGroup(Protocol):
    """Exchanges tensors among workers. All must call the same methods in the same order."""

    def add_up(self, x: Tensor) -> None:
        """Replace `x` by the sum over all ranks."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's tensor, by rank."""


class Fabric(Protocol):
    def send(self, tensor: Tensor, worker: int) -> Sending:
        """Send a contiguous tensor without waiting. It must not change until the sending has ended."""

    def receive(self, tensor: Tensor, worker: int) -> None:
        """Wait for a tensor of this shape, and write it into `tensor`."""

    def group(self, workers: Sequence[int]) -> RawGroup | None:
        """Return a group of these workers, or None if this worker is not one of them. All workers must call this at the
        same time.
        """


class Nccl:
    def __init__(self, store: dist.Store, rank: int, total: int) -> None:
        self._store = store  # torch's C++ wrapper does not keep it alive
        dist.init_process_group("nccl", store=store, rank=rank, world_size=total)

    def send(self, tensor: Tensor, worker: int) -> Sending:
        work = dist.isend(tensor, worker)
        assert work is not None
        return work

    def receive(self, tensor: Tensor, worker: int) -> None:
        dist.recv(tensor, worker)

    def group(self, workers: Sequence[int]) -> _NcclGroup | None:
        group = dist.new_group(list(workers))
        return _NcclGroup(group, len(workers)) if dist.get_rank() in workers else None


@dataclass
class _NcclGroup:
    group: dist.ProcessGroup
    degree: int

    def add_up(self, x: Tensor) -> None:
        dist.all_reduce(x, group=self.group)

    def gather(self, x: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(x) for _ in range(self.degree)]
        dist.all_gather(gathered, x, group=self.group)
        return gathered


@dataclass
class RankGroup:
    raw: RawGroup
    rank: int
    degree: int
    traffic: Traffic

    def add_up(self, x: Tensor) -> Tensor:
        self.traffic.count(x)
        if x.is_contiguous():
            self.raw.add_up(x)
        else:
            whole = x.contiguous()
            self.raw.add_up(whole)
            x.copy_(whole)
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        self.traffic.count(x)
        return self.raw.gather(x.contiguous())


@dataclass
class RankPipe:
    fabric: Fabric
    role: Role
    hidden_size: int
    dtype: torch.dtype
    device: str
    traffic: Traffic
    _under_way: deque[tuple[Sending, Tensor]] = field(default_factory=deque)
    """Unfinished sends and their tensors, which must not change until they have been received."""
    _memories: deque[tuple[Sending, Tensor]] = field(default_factory=deque)

    def receive(self, num_rows: int) -> Tensor:
        assert self.role.receives_from is not None
        return self._receive(self.role.receives_from, num_rows)

    def send(self, hidden: Tensor) -> None:
        self._send(hidden, self.role.sends_to, self._under_way, MAX_UNDER_WAY)

    def send_to_all(self, memory: Tensor) -> None:
        if self.role.part.rank == 0:
            workers = self.role.encoder_output_to
            self._send(memory, workers, self._memories, MAX_MEMORIES * len(workers))

    def receive_from_last(self, num_rows: int) -> Tensor:
        return self._receive(self.role.last, num_rows)

    def _receive(self, worker: int, num_rows: int) -> Tensor:
        received = torch.empty(num_rows, self.hidden_size, dtype=self.dtype, device=self.device)
        started = time.perf_counter()
        self.fabric.receive(received, worker)
        self.traffic.busy_s -= time.perf_counter() - started
        return received

    def _send(
        self, tensor: Tensor, workers: tuple[int, ...], under_way: deque[tuple[Sending, Tensor]], most: int
    ) -> None:
        tensor = tensor.contiguous()
        self.traffic.count(tensor, len(workers))
        for worker in workers:
            under_way.append((self.fabric.send(tensor, worker), tensor))
        while len(under_way) > most:
            under_way.popleft()[0].wait()


def stage_group(fabric: Fabric, deployment: Deployment, worker: int, traffic: Traffic) -> RankGroup | None:
    """Return the group of this worker's stage, or None if the stage has no other worker. All workers must call this at
    the same time.
    """
    own_group = None
    for stage in deployment.stages:
        if stage.tp > 1 and (raw := fabric.group(stage.devices)) is not None:
            own_group = RankGroup(raw, stage.devices.index(worker), stage.tp, traffic)
    return own_group


class Move(NamedTuple):
    number: int
    requests: list[Moving]


class Mover(threading.Thread):
    """A thread that carries out transfers, one after the other.

    Args:
        links: transfers have streams of their own, so that they never wait for hidden states.
        moved: called in this thread with a transfer's number, once this worker's part of the transfer is done.
    """

    def __init__(
        self,
        cargo: Cargo,
        deployment: Deployment,
        worker: int,
        links: Links,
        traffic: Traffic,
        moved: Callable[[int], None],
    ) -> None:
        super().__init__(name="K/V transfer", daemon=True)
        self._worker = worker
        self._cargo = cargo
        self._links = links
        self._traffic = traffic
        self._moved = moved
        self._orders: SimpleQueue[Move | None] = SimpleQueue()
        lanes = (
            {device: deployment.role(device).part for stage in deployment.lane(lane) for device in stage.devices}
            for lane in ("encode", "decode")
        )
        all_pieces = (encoder_output_pieces if deployment.settings.spec.is_encoder_decoder else pieces)(*lanes)
        self._pieces = [piece for piece in all_pieces if worker in (piece.sender, piece.receiver)]

    def move(self, order: Move) -> None:
        self._orders.put(order)

    def stop(self) -> None:
        self._orders.put(None)

    def run(self) -> None:
        try:
            while (order := self._orders.get()) is not None:
                for piece in self._pieces:
                    (self._send if piece.sender == self._worker else self._receive)(piece, order.requests)
                self._moved(order.number)
        except Exception as error:
            # If only this thread ended, the engine would not notice, so the process ends.
            print(f"worker {self._worker} cannot transfer: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    def _send(self, piece: Piece, requests: list[Moving]) -> None:
        contents = self._cargo.read(piece, requests)
        self._traffic.count(contents)
        self._links.of(piece.receiver, TRANSFERS).send(contents).wait()

    def _receive(self, piece: Piece, requests: list[Moving]) -> None:
        contents = self._cargo.empty(piece, requests)
        self._links.of(piece.sender, TRANSFERS).receive(contents)
        self._cargo.write(piece, requests, contents)
