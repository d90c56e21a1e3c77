"""Ranks as threads of one process: what tensor parallelism and pipelines compute, without what carries it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import torch

WAIT_S = 60.0


class Exchange:
    """The tensors of all ranks of a group, laid side by side once all have come."""

    def __init__(self, degree):
        self.barrier = threading.Barrier(degree, timeout=WAIT_S)
        self.slots = [None] * degree

    def all(self, rank, x):
        self.slots[rank] = x.clone()
        self.barrier.wait()
        together = list(self.slots)
        self.barrier.wait()
        return together


class ThreadGroup:
    """`parallel.Group` over threads; counts what is exchanged."""

    def __init__(self, exchange, rank, degree):
        self.exchange, self.rank, self.degree = exchange, rank, degree

    def add_up(self, x):
        return x.copy_(torch.stack(self.exchange.all(self.rank, x)).sum(0))

    def gather(self, x):
        return self.exchange.all(self.rank, x)


class ThreadPipe:
    """`stage.Pipe` over queues: one for each rank, one more for what an encoder has read."""

    def __init__(self, before, behind, memory_in, memory_out):
        self.before, self.behind, self.memory_in, self.memory_out = before, behind, memory_in, memory_out

    def receive(self, num_rows):
        return self._checked(self.before.get(timeout=WAIT_S), num_rows)

    def send(self, hidden):
        for queue in self.behind:
            queue.put(hidden.clone())

    def send_to_all(self, memory):
        for queue in self.memory_out:
            queue.put(memory.clone())

    def receive_from_last(self, num_rows):
        return self._checked(self.memory_in.get(timeout=WAIT_S), num_rows)

    @staticmethod
    def _checked(hidden, num_rows):
        assert len(hidden) == num_rows
        return hidden


def groups_of(degrees):
    """One list of groups for each stage."""
    return [
        [ThreadGroup(exchange, rank, degree) for rank in range(degree)]
        for degree, exchange in ((degree, Exchange(degree)) for degree in degrees)
    ]


def pipes_of(degrees):
    """One list of pipes for each stage, whose ranks take what the rank of the same number, or the last, sends."""
    inboxes = [[SimpleQueue() for _ in range(degree)] for degree in degrees]
    memories = [[SimpleQueue() for _ in range(degree)] for degree in degrees]
    senders = [[[] for _ in range(degree)] for degree in degrees]
    for stage in range(1, len(degrees)):
        for rank, inbox in enumerate(inboxes[stage]):
            senders[stage - 1][rank % degrees[stage - 1]].append(inbox)
    pipes = []
    for stage, degree in enumerate(degrees):
        everyone = [queue for queues in memories[:-1] for queue in queues] if stage == len(degrees) - 1 else []
        pipes.append(
            [
                ThreadPipe(inboxes[stage][r], senders[stage][r], memories[stage][r], everyone if r == 0 else [])
                for r in range(degree)
            ]
        )
    return pipes


def in_parallel(*calls):
    """Run them at once, each in a thread; returns their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(WAIT_S) for future in [pool.submit(call) for call in calls]]
