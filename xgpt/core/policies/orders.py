"""Implement the admission orders: which of an account's waiting requests enters next.

This file has first come, first served (fcfs), almost so (shuffled), shortest prompt first (sjf), longest output first
(lpt), earliest deadline first (edf), and TCB's deadline-aware scheduling (das). `in_time` has order in-time. All orders
sort requests on arrival, so the cost of a step depends on how many requests enter, not on how many wait.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from random import Random
from typing import Any

from xgpt.core.policies.request import Request

Entry = tuple[float, int, Request]
"""(key, number in order of arrival, request). No two numbers are equal, so sorting never compares requests."""


def utility(request: Request) -> float:
    return 1 / request.input_length


def deadline(request: Request) -> float:
    return math.inf if request.deadline_ns is None else request.deadline_ns


WINDOW = 64
"""Number of consecutive requests that shuffled mixes: more than a batch admits, few enough that none waits long."""


def shuffled(request: Request) -> float:
    """Return a key that sorts requests by their window of ids, and at random within it, the same way each time.

    Source: ExeGPT sec. 6, which randomises inputs across batches where input and output lengths correlate.
    """
    return request.id // WINDOW + Random(request.id).random()


class Order(ABC):
    """A queue of requests that have never run.

    Attributes:
        num_dominant: number of requests in the current row that were chosen only by utility (das).
    """

    is_fifo = False
    num_dominant = 0

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    def add(self, request: Request, number: int) -> None:
        self.numbers[request.id] = number
        self._add(request, number)

    def drop(self, request: Request) -> None:
        del self.numbers[request.id]
        self._drop(request)

    def take(self) -> Request:
        request = self.first()
        self.drop(request)
        return request

    def open_row(self, row_tokens: int) -> None:
        """Begin a batch row of `row_tokens` prompt tokens, even if the previous row is not full."""
        return

    def fits_row(self, request: Request) -> bool:
        return True

    def at(self, now_ns: int) -> None:
        return

    def state(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        assert state is None

    @abstractmethod
    def first(self) -> Request:
        """Return the request that enters next, without removing it. The order must not be empty."""

    @abstractmethod
    def _add(self, request: Request, number: int) -> None: ...

    @abstractmethod
    def _drop(self, request: Request) -> None:
        """Forget a request that has just been removed from `numbers`."""


class SortedOrder(Order):
    """An order by key, the smallest first. Among equal keys, the first to arrive enters."""

    def __init__(self, key: Callable[[Request], float] | None = None) -> None:
        super().__init__()
        self.is_fifo = key is None
        self._key = key or (lambda request: 0.0)
        self._heap: list[Entry] = []

    def first(self) -> Request:
        return self._heap[0][2]

    def _add(self, request: Request, number: int) -> None:
        heappush(self._heap, (self._key(request), number, request))

    def _drop(self, request: Request) -> None:
        prune(self._heap, self.numbers, len(self.numbers))


ETA = 0.5


class DasOrder(Order):
    """Deadline-aware scheduling: TCB Algorithm 1, extended to requests that keep arriving.

    A row holds `row_tokens` prompt tokens. Let q = 1 - eta, and let s be the number of shortest requests that fit in
    the row. First, the ceil(eta s) shortest requests enter. Second come requests whose utility is at least q times the
    mean utility of the first group, earliest deadline first. Third come the others, shortest first. A request that does
    not fit in the rest of the row is skipped. If no request fits, the next row begins. For a fixed set of requests, das
    reaches eta q / (eta q + 1) of the best schedule's utility (Theorem 5.1).

    A request that is longer than a row enters once no other request waits.
    """

    def __init__(self, row_tokens: int, eta: float = ETA) -> None:
        super().__init__()
        assert row_tokens > 0 and 0 < eta < 1
        self.row_tokens = row_tokens
        self._eta = eta
        self._heaps: dict[int, list[Entry]] = {}
        self._count: dict[int, int] = {}
        """By length: the number of waiting requests. The heaps also hold requests that have left."""
        self._lengths: list[int] = []
        self._earliest = EarliestUpTo()
        self._changed: set[int] = set()
        self._room = 0
        self._dominant = 0
        self.num_dominant = 0
        self._worth = 0.0

    def take(self) -> Request:
        if self._lengths[0] > self._room:
            self.open_row(self.row_tokens)
        request = super().take()
        self._room = max(0, self._room - request.input_length)
        if self._dominant:
            self._dominant -= 1
            self.num_dominant += 1
            self._worth += utility(request)
        if not self.numbers:
            self._room = 0  # the next request begins a row
        return request

    def open_row(self, row_tokens: int) -> None:
        self._room = row_tokens
        self._dominant = math.ceil(self._eta * self._num_shortest(row_tokens))
        self.num_dominant, self._worth = 0, 0.0

    def fits_row(self, request: Request) -> bool:
        return request.input_length <= self._room

    def _num_shortest(self, room: int) -> int:
        total = 0
        for length in self._lengths:
            fitting = min(self._count[length], room // length)
            if not fitting:
                break
            total += fitting
            room -= fitting * length
        return total

    def state(self) -> tuple[Any, ...]:
        return self._room, self._dominant, self.num_dominant, self._worth

    def restore(self, state: tuple[Any, ...]) -> None:
        self._room, self._dominant, self.num_dominant, self._worth = state

    def first(self) -> Request:
        length = self._lengths[0]  # this is also correct for the first request of a row
        if length <= self._room and not self._dominant and self.num_dominant:
            # The longest prompt with a utility of at least q times the mean; the tolerance offsets the rounding of 1 /
            # (1 / n).
            longest = math.floor((1 + 1e-9) * self.num_dominant / ((1 - self._eta) * self._worth))
            length = self._most_urgent(min(longest, self._room)) or length
        return self._heaps[length][0][2]

    def _most_urgent(self, longest: int) -> int | None:
        for length in self._changed:
            heap = self._heaps.get(length)
            self._earliest.put(length, None if heap is None else heap[0][:2])
        self._changed.clear()
        return self._earliest.up_to(longest)

    def _add(self, request: Request, number: int) -> None:
        length = request.input_length
        if length not in self._count:
            self._heaps[length] = []
            self._count[length] = 0
            insort(self._lengths, length)
        self._count[length] += 1
        heappush(self._heaps[length], (deadline(request), number, request))
        self._changed.add(length)

    def _drop(self, request: Request) -> None:
        length = request.input_length
        self._count[length] -= 1
        heap = self._heaps[length]
        if not self._count[length]:
            del self._count[length], self._heaps[length]
            del self._lengths[bisect_left(self._lengths, length)]
        else:
            prune(heap, self.numbers, self._count[length])
        self._changed.add(length)


class EarliestUpTo:
    """A segment tree of minima, which finds the length with the earliest deadline among all lengths up to a limit.

    Node i has the children 2i and 2i + 1. The last half of the nodes are the leaves, one for each length.
    """

    def __init__(self) -> None:
        self._tree: list[tuple[float, int, int] | None] = [None] * 2

    def put(self, length: int, earliest: tuple[float, int] | None) -> None:
        while length >= len(self._tree) // 2:
            self._grow()
        tree = self._tree
        node = length + len(tree) // 2
        tree[node] = None if earliest is None else (*earliest, length)
        while node > 1:
            node //= 2
            tree[node] = _least(tree[2 * node], tree[2 * node + 1])

    def up_to(self, limit: int) -> int | None:
        """Return the length, at most `limit`, with the earliest deadline. Return None if no waiting request is that
        short.
        """
        size = len(self._tree) // 2
        if limit >= size - 1:
            best = self._tree[1]
        else:
            best, node = None, size + limit + 1
            while node > 1:
                if node % 2:
                    best = _least(best, self._tree[node - 1])
                node //= 2
        return None if best is None else best[2]

    def _grow(self) -> None:
        tree, size = [None, self._tree[1]], 1
        while size < len(self._tree):
            tree += self._tree[size : 2 * size] + [None] * size
            size *= 2
        self._tree = tree


def _least(a: tuple[float, int, int] | None, b: tuple[float, int, int] | None) -> tuple[float, int, int] | None:
    return b if a is None or (b is not None and b < a) else a


def prune(heap: list[Entry], numbers: Mapping[int, int], num_waiting: int) -> None:
    if len(heap) > 2 * num_waiting + 16:
        heap[:] = [entry for entry in heap if numbers.get(entry[2].id) == entry[1]]
        heapify(heap)
    while heap and numbers.get(heap[0][2].id) != heap[0][1]:
        heappop(heap)
