"""The tensor plane: sums within a stage and hidden states between stages, over torch.distributed."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from xrunner.cluster.deployment import Deployment, Role

MAX_UNDER_WAY = 8
"""If more tensors than this are under way, a send waits for the oldest. The number exceeds a pipeline's number of
micro-batches.
"""
MAX_MEMORIES = 64
"""Largest number of encoder outputs under way. A step's second pass receives one for each slice of the step."""


@dataclass
class Traffic:
    """Bytes that this worker has sent, and seconds that it has spent on steps, without waiting for other stages."""

    tensor_bytes: int = 0
    control_bytes: int = 0
    busy_s: float = 0.0

    def count(self, tensor: Tensor, copies: int = 1) -> None:
        self.tensor_bytes += copies * tensor.numel() * tensor.element_size()


@dataclass
class RankGroup:
    """A `parallel.Group` whose ranks are the workers of a torch.distributed process group."""

    group: dist.ProcessGroup
    rank: int
    degree: int
    traffic: Traffic

    def add_up(self, x: Tensor) -> Tensor:
        self.traffic.count(x)
        dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        self.traffic.count(x)
        gathered = [torch.empty_like(x) for _ in range(self.degree)]
        dist.all_gather(gathered, x, group=self.group)
        return gathered


@dataclass
class RankPipe:
    """A `stage.Pipe` that sends hidden states between workers."""

    role: Role
    hidden_size: int
    dtype: torch.dtype
    device: str
    traffic: Traffic
    _under_way: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)
    """Sends under way, with their tensors, which must not change until they have been received."""
    _memories: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)

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
        dist.recv(received, worker)
        self.traffic.busy_s -= time.perf_counter() - started
        return received

    def _send(
        self, tensor: Tensor, workers: tuple[int, ...], under_way: deque[tuple[dist.Work, Tensor]], most: int
    ) -> None:
        tensor = tensor.contiguous()
        self.traffic.count(tensor, len(workers))
        for worker in workers:
            work = dist.isend(tensor, worker)
            assert work is not None
            under_way.append((work, tensor))
        while len(under_way) > most:
            under_way.popleft()[0].wait()


def stage_groups(deployment: Deployment, worker: int, traffic: Traffic) -> RankGroup | None:
    """Return the group of this worker's stage, or None if the stage has no other worker. All workers must call this
    function at the same time.
    """
    own_groups = None
    for stage in deployment.stages:
        if stage.tp > 1:
            group = dist.new_group(list(stage.devices))
            if worker in stage.devices:
                own_groups = RankGroup(group, stage.devices.index(worker), stage.tp, traffic)
    return own_groups
