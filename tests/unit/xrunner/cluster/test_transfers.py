"""Transfers begin while a worker executes steps, and what they bring is taken in between two."""

from __future__ import annotations

from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
import zmq

from xrunner.cluster import messages as m
from xrunner.cluster.process import ControlPlane
from xrunner.cluster.sockets import Secret, Sockets
from xrunner.cluster.tensors import Traffic
from xrunner.transfer import EncoderOutputs, Moving, Piece

PIECE = Piece(0, 1)


def received(request: int, value: float) -> tuple[Piece, list[Moving], torch.Tensor]:
    return PIECE, [Moving(request, [], 2)], torch.full((2, 4), value)


def test_a_transfer_does_not_wait_for_the_orders_before_it() -> None:
    """Once it was carried out behind the step under way, and requests waited most of a step more on each hand-over."""
    secret, epoch = Secret.new(), 0
    sockets = Sockets(secret, "127.0.0.1")
    engine, endpoint = sockets.bind(zmq.ROUTER)
    launcher = SimpleNamespace(secret=secret.private, host="127.0.0.1", engine=endpoint)
    settings: Any = SimpleNamespace(launcher=launcher, worker=0, started=SimpleNamespace(epoch=epoch), secret=secret)
    orders: SimpleQueue[m.ToWorker] = SimpleQueue()  # nothing takes them: the worker is executing a step
    begun: SimpleQueue[m.Transfer] = SimpleQueue()
    ControlPlane(settings, orders, SimpleQueue(), Traffic(), begun.put).start()
    try:
        hello = m.decode_to_engine(engine.recv_multipart()[-1])
        assert isinstance(hello, m.Hello)
        inbox = sockets.connect(zmq.PUSH, hello.inbox)
        inbox.send(m.encode(m.Work(1, [], [], [], [7], [3], [])))
        inbox.send(m.encode(m.Transfer(2, [], [])))
        assert begun.get(timeout=10).number == 2
        assert [type(orders.get(timeout=10)) for _ in range(2)] == [m.Work, m.Transfer]
    finally:
        sockets.close()


def test_what_is_received_waits_for_the_order_that_makes_its_request_known() -> None:
    """A preempted request is forgotten in a step behind which it may have been transferred anew."""
    known = {5: torch.zeros(3, 4)}
    cargo = EncoderOutputs(known, 4, torch.float32)
    cargo.write(*received(5, 1.0))
    cargo.take_in(0)
    assert len(known[5]) == 3
    known.pop(5)  # the step that forgets it, then the order to transfer
    cargo.take_in(1)
    assert torch.equal(known[5], torch.ones(2, 4))


def test_what_comes_later_is_taken_in_later() -> None:
    known: dict[int, torch.Tensor] = {}
    cargo = EncoderOutputs(known, 4, torch.float32)
    cargo.take_in(2)
    cargo.write(*received(1, 1.0))
    cargo.write(*received(2, 2.0))
    cargo.write(*received(3, 3.0))
    cargo.take_in(2)
    assert set(known) == {1, 2}
    cargo.take_in(3)
    assert set(known) == {1, 2, 3} and torch.equal(known[3], torch.full((2, 4), 3.0))
