"""Transfer K/V (or encoder outputs) from WAA's encode lane to its decode lane, in a separate thread."""

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
from xrunner.transfer import Cargo, Moving, Piece, encoder_output_pieces, pieces


class Move(NamedTuple):
    """An order to transfer these requests."""

    number: int
    requests: list[Moving]


class Mover(threading.Thread):
    """A thread that carries out transfers, one after the other.

    Args:
        group: the group of all workers of the replica. It is used only for transfers, so that these never wait for
            hidden states.
        moved: called in this thread with a transfer's number, when this worker's part of the transfer has ended.
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
            {device: deployment.role(device).part for stage in deployment.lane(lane) for device in stage.devices}
            for lane in ("encode", "decode")
        )
        all_pieces = (encoder_output_pieces if deployment.model.is_encoder_decoder else pieces)(*lanes)
        self._pieces = [piece for piece in all_pieces if worker in (piece.sender, piece.receiver)]

    def move(self, order: Move) -> None:
        """Queue a transfer. Do not wait for it."""
        self._orders.put(order)

    def stop(self) -> None:
        """End the thread once all queued transfers are done."""
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
        dist.send(contents, piece.receiver, group=self._group)

    def _receive(self, piece: Piece, requests: list[Moving]) -> None:
        contents = self._cargo.empty(piece, requests)
        dist.recv(contents, piece.sender, group=self._group)
        self._cargo.write(piece, requests, contents)
