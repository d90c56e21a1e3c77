"""What carries tensors between workers: streams and shared memory on one machine, and a meeting over TCP on several."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from xgpt.core.errors import MachineError
from xrunner.cluster import meeting
from xrunner.cluster.links import NUM_STREAMS, SLOT_BYTES, STEPS, Links, Wires
from xrunner.cluster.meeting import Meeting

WAIT_S = 30.0


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [done.result(WAIT_S) for done in [pool.submit(call) for call in calls]]


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the streams of all links of a test."""
    all_links: list[Links] = []
    add = Links.add

    def noted(self: Links, worker: int, ends: Sequence[socket.socket]) -> None:
        all_links.append(self)
        add(self, worker, ends)

    monkeypatch.setattr(Links, "add", noted)
    yield
    for links in all_links:
        links.close()


def on_one_machine(count: int) -> list[Links]:
    return [Links.of_machine(wires) for wires in Wires(0, count).of_workers]


def on_machines(count: int) -> list[Links]:
    """Links of workers that are each alone on a machine, without shared memory."""
    links = [Links(worker) for worker in range(count)]
    for a in range(count):
        for b in range(a):
            ends = [socket.socketpair() for _ in range(NUM_STREAMS)]
            links[a].add(b, [end for end, _ in ends])
            links[b].add(a, [end for _, end in ends])
    return links


@pytest.mark.parametrize("made", [on_one_machine, on_machines])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 3 * SLOT_BYTES // 4 + 5])
def test_all_ranks_have_the_same_sum_and_every_tensor(made: Any, dtype: torch.dtype, size: int) -> None:
    links = made(3)
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(3)]
    expected = tensors[0] + tensors[1] + tensors[2]

    def run(rank: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        group = links[rank].group([0, 1, 2])
        for _ in range(3):
            x = tensors[rank].clone()
            group.add_up(x)
        return x, group.gather(tensors[rank])

    for summed, gathered in at_once(*(lambda rank=rank: run(rank) for rank in range(3))):
        assert torch.equal(summed, expected)
        assert all(map(torch.equal, gathered, tensors))


def test_sends_do_not_wait_for_their_receiver_and_keep_their_order() -> None:
    one, other = on_one_machine(2)
    sent = [torch.full((n, 1000), n, dtype=torch.float32) for n in (1, 900, 0, 2, 1500)]
    sending = [one.send(tensor, 1) for tensor in sent]
    for tensor in sent:
        received = torch.empty_like(tensor)
        other.receive(received, 0)
        assert torch.equal(received, tensor)
    for each in sending:
        each.wait()


def test_the_end_of_a_worker_ends_the_waits_of_the_others() -> None:
    wires = Wires(0, 2)
    one = Links.of_machine(wires.of_workers[0])
    wires.keep(wires.of_workers[0])
    with pytest.raises(MachineError, match="worker 1 has ended"):
        one.receive(torch.empty(3), 1)
    with pytest.raises(MachineError, match="worker 1 has ended"):
        one.group([0, 1]).add_up(torch.ones(3))  # type: ignore[union-attr]


def meetings(secrets: list[bytes]) -> list[Meeting]:
    return [Meeting(secret, "127.0.0.1", 1, worker) for worker, secret in enumerate(secrets)]


def met(places: list[Meeting]) -> list[Links]:
    """Let all join, and return their links."""
    addresses = [place.address for place in places]

    def join(place: Meeting) -> Links:
        links = Links(place.worker)
        ends = place.join({w: address for w, address in enumerate(addresses) if w != place.worker})
        for worker, streams in ends.items():
            links.add(worker, streams)
        return links

    return at_once(*(lambda place=place: join(place) for place in places))


def test_workers_of_several_machines_meet_beside_strangers_and_close_their_ports() -> None:
    """1,500 silent connections once ended a worker, and then the server."""
    places = meetings([b"s" * 40] * 3)
    host, _, port = places[0].address.partition(":")
    with ExitStack() as strangers:

        def crowd() -> None:
            for number in range(300):
                try:
                    stranger = strangers.enter_context(socket.create_connection((host, int(port)), 5))
                    stranger.sendall(b"x" * (number % 200))
                except OSError:
                    return

        crowding = threading.Thread(target=crowd)
        crowding.start()
        links = met(places)
        crowding.join()
    links[2].send(torch.arange(5), 0)
    received = torch.empty(5, dtype=torch.int64)
    links[0].receive(received, 2)
    assert torch.equal(received, torch.arange(5))
    for place in places:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(place.address.rpartition(":")[2])), 5)


def test_a_worker_with_another_secret_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MEET_S", 1.0)
    begin_s = time.monotonic()
    with pytest.raises(MachineError, match="within 1 s"):
        met(meetings([b"s" * 40, b"t" * 40]))
    assert time.monotonic() - begin_s < 20


def test_streams_are_apart() -> None:
    one, other = on_one_machine(2)
    for stream in range(NUM_STREAMS):
        one.of(1, stream).send(torch.tensor([stream]))
    for stream in reversed(range(STEPS, NUM_STREAMS)):
        received = torch.empty(1, dtype=torch.int64)
        other.of(0, stream).receive(received)
        assert received.item() == stream
