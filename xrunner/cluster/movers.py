"""Send and receive what moves from WAA's encode lane to its decode lane, in threads apart from computing."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

import torch.distributed as dist

from xrunner.cluster.deployment import Deployment
from xrunner.cluster.tensors import Traffic
from xrunner.transfer import Cargo, Moving, Piece, pieces, reading_pieces


class Move(NamedTuple):
    """Move these requests."""

    number: int
    requests: list[Moving]


class Mover(threading.Thread):
    """Moves what it is told to, one transfer after the other.

    Args:
        group: all workers of the replica, used for nothing else: it must not wait for what stages send each other.
        moved: to be called, in this thread, when a transfer has come to an end here.
    """

    def __init__(
        self,
        cargo: Cargo,
        deployment: Deployment,
        worker: int,
        group: dist.ProcessGroup,
        traffic: Traffic,
        moved: Callable[[int], None],
    ) -> None:
        super().__init__(name="K/V transfer", daemon=True)
        self._worker = worker
        self._cargo = cargo
        self._group = group
        self._traffic = traffic
        self._moved = moved
        self._orders: SimpleQueue[Move | None] = SimpleQueue()
        lanes = (
            {device: deployment.seat(device).part for stage in deployment.lane(lane) for device in stage.devices}
            for lane in ("encode", "decode")
        )
        all_pieces = (reading_pieces if deployment.model.is_encoder_decoder else pieces)(*lanes)
        self._pieces = [piece for piece in all_pieces if worker in (piece.sender, piece.receiver)]

    def move(self, order: Move) -> None:
        """Move this behind all else; returns at once."""
        self._orders.put(order)

    def stop(self) -> None:
        """End once all that was ordered is done."""
        self._orders.put(None)

    def run(self) -> None:
        try:
            while (order := self._orders.get()) is not None:
                for piece in self._pieces:
                    (self._send if piece.sender == self._worker else self._receive)(piece, order.requests)
                self._moved(order.number)
        except Exception as error:
            # A thread's end would go unnoticed, a process's does not.
            print(f"worker {self._worker} cannot transfer: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    def _send(self, piece: Piece, requests: list[Moving]) -> None:
        contents = self._cargo.read(piece, requests)
        self._traffic.count(contents)
        dist.send(contents, piece.receiver, group=self._group)

    def _receive(self, piece: Piece, requests: list[Moving]) -> None:
        contents = self._cargo.empty(piece, requests)
        dist.recv(contents, piece.sender, group=self._group)
        self._cargo.write(piece, requests, contents)
