"""Who enters next: the requests that wait, in the order of their admission.

Five orders: first come first served (fcfs), shortest prompt first (sjf), longest output first (lpt), earliest deadline
first (edf), and TCB's deadline-aware scheduling (das). All keep requests sorted as they come, so that a step pays for
those that enter, not for those that wait.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice

from xgpt.policies.request import Request
from xgpt.schema import AdmissionOrder

Entry = tuple[float, int, Request]
"""(key, number in the order of arrival, request): numbers differ, so requests are never compared."""


def utility(request: Request) -> float:
    """What serving a request in time is worth. Source: TCB sec. 5.1."""
    return 1 / request.input_length


def deadline(request: Request) -> float:
    """Nanoseconds; infinite where the request has none."""
    return math.inf if request.deadline_ns is None else request.deadline_ns


class Queue(ABC):
    """Requests that wait. Those that have been inside and lost their K/V come before all others.

    Looking (`head`, `ahead`) changes nothing: how often an engine looks depends on its clock.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        """By id, in the order of arrival; without those in front."""
        self._numbers: dict[int, int] = {}
        """In that order, too."""
        self._front: deque[Request] = deque()
        self._deadlines: list[Entry] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._front) + len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """Those in front, then all others in the order of arrival."""
        yield from self._front
        yield from self._waiting.values()

    def push(self, request: Request) -> None:
        self._number += 1
        self._waiting[request.id] = request
        self._numbers[request.id] = self._number
        if request.deadline_ns is not None:
            heappush(self._deadlines, (request.deadline_ns, self._number, request))
            _prune(self._deadlines, self._waiting, len(self._waiting))
        self._add(request, self._number)

    def push_front(self, request: Request) -> None:
        """Let a request that has been inside wait before all others; it expires no more."""
        self._front.appendleft(request)

    def head(self) -> Request | None:
        """Who enters next; None where nobody waits."""
        if self._front:
            return self._front[0]
        return self._first() if self._waiting else None

    def pop(self) -> Request:
        """Take the head out: it enters."""
        if self._front:
            return self._front.popleft()
        request = self._first()
        self._forget(request)
        return request

    def ahead(self, count: int) -> list[Request]:
        """The next so many (or all), in the order in which they would enter if nobody else came."""
        row = self._row()
        taken: list[tuple[bool, int, Request]] = []
        while len(taken) < count and len(self):
            from_front = bool(self._front)
            number = 0 if from_front else self._numbers[self._first().id]
            taken.append((from_front, number, self.pop()))
        for from_front, number, request in reversed(taken):
            if from_front:
                self._front.appendleft(request)
            else:
                self._waiting[request.id] = request
                self._numbers[request.id] = number
                self._add(request, number)
        self._set_row(row)
        return [request for _, _, request in taken]

    def remove(self, id_: int) -> bool:
        """Take a request out wherever it waits; False where it does not wait."""
        if id_ in self._waiting:
            self._forget(self._waiting[id_])
            return True
        for returned in self._front:
            if returned.id == id_:
                self._front.remove(returned)
                return True
        return False

    def expire(self, now_ns: int) -> list[Request]:
        """Take out all whose deadline has passed. Source: TCB sec. 5.1, a request fails if not scheduled by then."""
        expired = []
        while self._deadlines and self._deadlines[0][0] < now_ns:
            request = heappop(self._deadlines)[2]
            if self._waiting.get(request.id) is request:
                self._forget(request)
                expired.append(request)
        return expired

    def fill_row(self, row_tokens: int) -> list[Request]:
        """Take out the next requests that fit a row of that many prompt tokens together, in their order."""
        row: list[Request] = []
        while (request := self.head()) is not None and request.input_length <= row_tokens:
            row.append(self.pop())
            row_tokens -= request.input_length
        return row

    def _forget(self, request: Request) -> None:
        del self._waiting[request.id], self._numbers[request.id]
        self._drop(request)

    def _row(self) -> tuple[float, ...]:
        """What an order remembers of those who have entered."""
        return ()

    def _set_row(self, row: tuple[float, ...]) -> None:
        """Remember this instead."""
        assert not row

    @abstractmethod
    def _first(self) -> Request:
        """Who of those behind the front enters next; there are some."""

    @abstractmethod
    def _add(self, request: Request, number: int) -> None:
        """Sort a new request in."""

    @abstractmethod
    def _drop(self, request: Request) -> None:
        """Forget a request that has just been taken out of `_waiting`."""


class FirstComeQueue(Queue):
    """In the order of arrival."""

    def ahead(self, count: int) -> list[Request]:
        return list(islice(self, count))

    def _first(self) -> Request:
        return next(iter(self._waiting.values()))

    def _add(self, request: Request, number: int) -> None:
        pass

    def _drop(self, request: Request) -> None:
        pass


class SortedQueue(Queue):
    """The smallest key enters next; of equal keys who came first."""

    def __init__(self, key: Callable[[Request], float]) -> None:
        super().__init__()
        self._key = key
        self._heap: list[Entry] = []

    def _add(self, request: Request, number: int) -> None:
        heappush(self._heap, (self._key(request), number, request))

    def _first(self) -> Request:
        return self._heap[0][2]

    def _drop(self, request: Request) -> None:
        _prune(self._heap, self._waiting, len(self._waiting))


class DasQueue(Queue):
    """Deadline-aware scheduling: TCB Algorithm 1, and the same while requests go on arriving.

    A row holds `row_tokens` prompt tokens. With s the number of the shortest requests that would fill it, the first
    ceil(eta s) that enter are the shortest; then, of those worth at least q = 1 - eta of these on average, the one with
    the earliest deadline; then again the shortest. Who does not fit what is left of the row is passed over; where
    nobody fits, the next row begins. Over a fixed set of requests this reaches eta q / (eta q + 1) of the best
    schedule's utility (Theorem 5.1).

    A request longer than a whole row fits none: it enters once nobody else waits.
    """

    def __init__(self, row_tokens: int, eta: float = 0.5) -> None:
        super().__init__()
        assert row_tokens > 0 and 0 < eta < 1
        self.row_tokens = row_tokens
        self._eta = eta
        self._heaps: dict[int, list[Entry]] = {}
        """By length, each by deadline."""
        self._count: dict[int, int] = {}
        """How many wait, by length; heaps hold those, too, that have left."""
        self._lengths: list[int] = []
        """Those that somebody has, rising."""
        self._earliest = EarliestUpTo()
        self._changed: set[int] = set()
        """Lengths whose earliest deadline is to be noted before the next look."""
        self._room = 0
        """Tokens left in the row."""
        self._dominant = 0
        """How many more of its requests are to be chosen by utility alone."""
        self.num_dominant = 0
        """How many of them were: its first."""
        self._worth = 0.0
        """Their utility."""

    def pop(self) -> Request:
        if self._front:
            return super().pop()
        if self._lengths[0] > self._room:
            self._open_row(self.row_tokens)
        request = super().pop()
        self._room = max(0, self._room - request.input_length)
        if self._dominant:
            self._dominant -= 1
            self.num_dominant += 1
            self._worth += utility(request)
        if not self._waiting:
            self._room = 0  # who comes next begins a row: what is worth choosing shows only in a crowd
        return request

    def fill_row(self, row_tokens: int) -> list[Request]:
        self._open_row(row_tokens)
        row: list[Request] = []
        while self._lengths and self._lengths[0] <= self._room:
            row.append(self.pop())
        return row

    def _open_row(self, row_tokens: int) -> None:
        """Begin a row, whatever room the last one has left."""
        self._room = row_tokens
        self._dominant = math.ceil(self._eta * self._num_shortest(row_tokens))
        self.num_dominant, self._worth = 0, 0.0

    def _num_shortest(self, room: int) -> int:
        """How many of the shortest fit."""
        total = 0
        for length in self._lengths:
            fitting = min(self._count[length], room // length)
            if not fitting:
                break
            total += fitting
            room -= fitting * length
        return total

    def _row(self) -> tuple[float, ...]:
        return self._room, self._dominant, self.num_dominant, self._worth

    def _set_row(self, row: tuple[float, ...]) -> None:
        self._room, self._dominant, self.num_dominant = (int(number) for number in row[:3])
        self._worth = row[3]

    def _first(self) -> Request:
        length = self._lengths[0]  # the first of a row, too
        if length <= self._room and not self._dominant and self.num_dominant:
            # Worth at least q times their mean; the tolerance keeps 1 / (1 / n) from becoming less than n.
            longest = math.floor((1 + 1e-9) * self.num_dominant / ((1 - self._eta) * self._worth))
            length = self._most_urgent(min(longest, self._room)) or length
        return self._heaps[length][0][2]

    def _most_urgent(self, longest: int) -> int | None:
        """The length with the earliest deadline of those up to a longest."""
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
            _prune(heap, self._waiting, self._count[length])
        self._changed.add(length)


def make_queue(order: AdmissionOrder, row_tokens: int | None = None) -> Queue:
    """An empty queue; `row_tokens`: prompt tokens that das looks at together."""
    match order:
        case "fcfs":
            return FirstComeQueue()
        case "sjf":
            return SortedQueue(lambda request: request.input_length)
        case "lpt":
            return SortedQueue(lambda request: -request.max_output)
        case "edf":
            return SortedQueue(deadline)
        case "das":
            assert row_tokens is not None
            return DasQueue(row_tokens)


class EarliestUpTo:
    """The length with the earliest deadline among all lengths up to a limit: a tree of minima.

    Node i has the children 2i and 2i + 1; the leaves, one a length, are the last half.
    """

    def __init__(self) -> None:
        self._tree: list[tuple[float, int, int] | None] = [None] * 2

    def put(self, length: int, earliest: tuple[float, int] | None) -> None:
        """Set a length's earliest (deadline, number); None: nobody has this length any more."""
        while length >= len(self._tree) // 2:
            self._grow()
        tree = self._tree
        node = length + len(tree) // 2
        tree[node] = None if earliest is None else (*earliest, length)
        while node > 1:
            node //= 2
            tree[node] = _least(tree[2 * node], tree[2 * node + 1])

    def up_to(self, limit: int) -> int | None:
        """The length; None where nobody is so short."""
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
        """Twice the lengths: each level becomes the left half of the next."""
        tree, size = [None, self._tree[1]], 1
        while size < len(self._tree):
            tree += self._tree[size : 2 * size] + [None] * size
            size *= 2
        self._tree = tree


def _least(a: tuple[float, int, int] | None, b: tuple[float, int, int] | None) -> tuple[float, int, int] | None:
    return b if a is None or (b is not None and b < a) else a


def _prune(heap: list[Entry], waiting: dict[int, Request], num_waiting: int) -> None:
    """Let the heap begin with somebody who waits: who left from its middle is forgotten when he comes up, or when
    such are the most.
    """
    if len(heap) > 2 * num_waiting + 16:
        heap[:] = [entry for entry in heap if waiting.get(entry[2].id) is entry[2]]
        heapify(heap)
    while heap and waiting.get(heap[0][2].id) is not heap[0][2]:
        heappop(heap)
