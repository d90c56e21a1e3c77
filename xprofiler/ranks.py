"""Measure step times on several devices of this machine at once, and the links between them.

A machine's devices share memory bandwidth, and a socket's cores share power. So each device is measured while the
others do the same work.

In a group, ranks wait for each other before every call. Ranks that compute alone wait only once in several calls, since
a process switch on a loaded machine can take longer than a small model's call.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations, repeat
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch
import torch.distributed as dist

from xgpt.core.errors import InputError, MachineError
from xgpt.core.network import interface_of
from xgpt.core.progress import Progress
from xgpt.core.schema import Curve, ModelSpec
from xprofiler.bench import BLOCK_SIZE, Timings, seconds_by_threads
from xprofiler.encoder_decoder import bench_of
from xrunner.build import WorkerSettings, build_worker
from xrunner.cluster.links import TRANSFERS, Links, Wires, WorkerWires
from xrunner.cluster.tensors import Fabric, Nccl, RankGroup, RawGroup, Traffic
from xrunner.cores import take_cores
from xrunner.parallel import Part
from xrunner.transfer import Moving, Piece
from xrunner.weights import state_dtype
from xrunner.worker import Worker

HOST = "127.0.0.1"
HOP_TOKENS = (1, 16, 128, 512, 2048)
TRANSFER_TOKENS = (16, 128, 512, 2048)
REPEATS = 5

Key = TypeVar("Key")
Meet = Callable[[], object]


@dataclass(frozen=True, slots=True)
class RanksTask:
    """The task that every rank gets. Over NCCL, ranks find each other through the file `store`."""

    settings: WorkerSettings
    num_devices: int
    groups: tuple[tuple[int, int], ...]
    store: str
    is_brief: bool = False


@dataclass(frozen=True, slots=True)
class Together:
    threads: int | None
    by_group: dict[tuple[int, int], Timings]
    hop: Curve
    kv_transfer: Curve


def degrees(spec: ModelSpec, num_devices: int) -> tuple[int, ...]:
    """Return the tensor-parallel degrees that the number of devices and the model's sizes allow."""
    found = []
    for degree in range(1, num_devices + 1):
        try:
            Part(spec, (0, 1), (0, 0), degree=degree)
        except InputError:
            continue
        if num_devices % degree == 0 or degree & (degree - 1) == 0:
            found.append(degree)
    return tuple(found)


def groups(spec: ModelSpec, num_devices: int) -> tuple[tuple[int, int], ...]:
    """Return pairs (tensor-parallel degree t, expert-parallel degree). The second is 1 or, if t divides the number of
    experts, also t.
    """
    number = 1 if spec.experts is None else spec.experts.number
    return tuple((t, ep) for t in degrees(spec, num_devices) for ep in dict.fromkeys((1, t)) if number % ep == 0)


def measure(settings: WorkerSettings, num_devices: int, progress: Progress, *, is_brief: bool = False) -> Together:
    """Measure several devices, with one process for each."""
    with TemporaryDirectory(prefix="xgpt-") as directory:  # no other user may open this directory
        store = str(Path(directory) / "store")
        task = RanksTask(settings, num_devices, groups(settings.spec, num_devices), store, is_brief)
        return _measure_together(task, progress)


def _measure_together(task: RanksTask, progress: Progress) -> Together:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    ends: list[list[Connection]] = [[] for _ in range(task.num_devices)]
    for a, b in combinations(range(task.num_devices), 2):
        for rank, end in zip((a, b), context.Pipe(), strict=True):
            ends[rank].append(end)
    wires = Wires(0, task.num_devices)
    ranks = [
        context.Process(target=_run, args=(task, *each), daemon=True)
        for each in zip(wires.of_workers, ends, repeat(sender))
    ]
    for process in ranks:
        process.start()
    wires.keep(None)
    for end in (sender, *chain.from_iterable(ends)):
        end.close()
    try:
        while True:
            message = receiver.recv()
            if isinstance(message, Together):
                return message
            progress(*message)
    except EOFError:
        raise MachineError("a measuring process has died; its own message is above") from None
    finally:
        receiver.close()
        for process in ranks:
            process.join(1)
            process.kill()
            process.join()


def _run(task: RanksTask, wires: WorkerWires, others: Sequence[Connection], sender: Connection) -> None:
    spec, threads, rank = task.settings.spec, task.settings.threads, wires.worker
    meet = partial(_meet, others)
    links = Links.of_machine(wires)
    fabric: Fabric = links
    if task.settings.device != "cpu":
        os.environ["NCCL_SOCKET_IFNAME"] = interface_of(HOST) or ""
        torch.cuda.set_device(rank)
        fabric = Nccl(dist.FileStore(task.store, task.num_devices), rank, task.num_devices)
    mean_of_ranks = partial(_mean_of_ranks, links.group(range(task.num_devices)))
    by_group: dict[tuple[int, int], Timings] = {}
    for number, (degree, ep) in enumerate(task.groups):
        num_groups = task.num_devices // degree
        of_ranks = [fabric.group(range(at * degree, (at + 1) * degree)) for at in range(num_groups)]
        is_grouped = degree > 1 and rank < num_groups * degree
        part, group = Part.whole(spec), None
        if is_grouped:
            part = replace(part, rank=rank % degree, degree=degree, ep=ep)
            raw = of_ranks[rank // degree]
            assert raw is not None
            group = RankGroup(raw, rank % degree, degree, Traffic())
        worker = build_worker(
            replace(task.settings, device=_device(task, rank), threads=threads), part=part, group=group
        )

        def report(done: int, total: int, what: str, number: int = number, degree: int = degree) -> None:
            if rank == 0:
                sender.send((number * total + done, len(task.groups) * total, f"{what}, {degree} devices together"))

        with torch.inference_mode():
            bench = bench_of(worker)(worker, report, meet, in_group=degree > 1, is_brief=task.is_brief)
            if threads is not None and not by_group:
                seconds = mean_of_ranks(seconds_by_threads(bench, rank, task.num_devices))
                threads = min(seconds, key=seconds.__getitem__)
                torch.set_num_threads(threads)
                take_cores(rank, task.num_devices)
            by_group[degree, ep] = mean_of_ranks(bench.measure(), counts=is_grouped or degree == 1)
        if degree == 1:
            hop = _curve(HOP_TOKENS, partial(_hop, task, rank, meet, fabric))
            transfer = _curve(TRANSFER_TOKENS, partial(_transfer, rank, meet, links, worker))
        del worker
    if rank == 0:
        sender.send(Together(threads, by_group, hop, transfer))
    meet()


def _curve(points: tuple[int, ...], seconds: Callable[[int], float]) -> Curve:
    return Curve(points=points, seconds=tuple(seconds(n) for n in points))


def _device(task: RanksTask, rank: int) -> str:
    device = task.settings.device
    return device if device == "cpu" else f"{device}:{rank}"


def _meet(others: Sequence[Connection]) -> None:
    for other in others:
        other.send_bytes(b".")
    for other in others:
        other.recv_bytes()


def _mean_of_ranks(group: RawGroup | None, measured: Mapping[Key, float], *, counts: bool = True) -> dict[Key, float]:
    of_all = torch.tensor([*measured.values(), 1.0], dtype=torch.float64) * counts
    assert group is not None
    group.add_up(of_all)
    *times, number = of_all.tolist()
    return {key: time / number for key, time in zip(measured, times, strict=True)}


def _hop(task: RanksTask, rank: int, meet: Meet, fabric: Fabric, num_tokens: int) -> float:
    settings = task.settings
    dtype = state_dtype(settings.dtype, settings.device)
    hidden = torch.zeros(num_tokens, settings.spec.hidden_size, dtype=dtype, device=_device(task, rank))

    def send() -> None:
        fabric.send(hidden, 1 - rank).wait()

    receive = partial(fabric.receive, hidden, 1 - rank)
    return _there_and_back(rank, meet, send, receive) / 2


def _transfer(rank: int, meet: Meet, links: Links, worker: Worker, num_tokens: int) -> float:
    """Return the seconds to transfer the K/V of `num_tokens` tokens, in all layers, to another worker.

    It is half of a round trip through host memory. For an encoder-decoder, encoder outputs with as many elements are
    transferred instead.
    """
    spec = worker.model.spec
    cargo = worker.cargo(Part.whole(spec))
    if spec.is_encoder_decoder:
        num_tokens = round(num_tokens * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim / spec.hidden_size)
        worker.encoder_outputs[0] = torch.zeros(num_tokens, spec.hidden_size, dtype=worker.dtype)
    piece = Piece(0, 1, (0, spec.num_layers), (0, spec.num_kv_heads if spec.latent is None else 1))
    prompt = [Moving(0, list(range(-(-num_tokens // BLOCK_SIZE))), num_tokens)]
    received = cargo.empty(piece, prompt)

    def send() -> None:
        links.of(1 - rank, TRANSFERS).send(cargo.read(piece, prompt)).wait()

    def receive() -> None:
        links.of(1 - rank, TRANSFERS).receive(received)
        cargo.write(piece, prompt, received)

    return _there_and_back(rank, meet, send, receive) / 2


def _there_and_back(rank: int, meet: Meet, send: Callable[[], object], receive: Callable[[], object]) -> float:
    seconds = []
    for _ in range(1 + REPEATS):
        meet()
        started = time.perf_counter()
        if rank == 0:
            send()
            receive()
        elif rank == 1:
            receive()
            send()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])
