"""Decide which waiting request enters next, with a fair share for each account.

An account is an API key, or one class of a key's requests. Each account's requests wait in the plan's order of
admission (see `orders`). The next request comes from the account with the highest priority. Among accounts of equal
priority, the one with the fewest counted tokens relative to its share comes first. Prompt tokens are counted when a
request enters, output tokens when they are generated. An account cannot save up its share: when it is served after a
pause, its count is raised to that of the account served last. Source: Sheng et al., Fairness in serving large language
models, OSDI 2024 (the virtual token counter), with shares.

No order starves a request. A request that has waited longer than `patience_ns` is overdue. The account of an overdue
request has the highest priority, and every second request that enters from it is its longest-waiting overdue request.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import islice
from typing import Any, Literal, NamedTuple

from xgpt.core.policies.in_time import FirstTokens, InTimeOrder, Job, Pace
from xgpt.core.policies.orders import ETA, DasOrder, Entry, Order, SortedOrder, deadline, prune, shuffled
from xgpt.core.policies.request import Request
from xgpt.core.schema import AdmissionOrder

QueuePlace = Literal["front", "order", "overdue", "back"]
"""The part of an account's queue from which a request enters. "overdue" stands for a request of `order` that enters out
of order.
"""


class Queue:
    """The waiting requests.

    A preempted request waits before all other requests of its account (`push_front`), or after them if it had used more
    memory than it was promised (`push_back`).

    Logs must replay exactly. How often an engine calls `head` and `ahead` depends on its clock, so they do not change
    the queue. Logs do not record the order of arrivals and removals between two admissions. So the queue does not
    depend on it.

    Args:
        patience_ns: nanoseconds of waiting after which a request is overdue. None means that no request becomes
            overdue.
    """

    def __init__(self, make_order: Callable[[], Order], patience_ns: int | None = None) -> None:
        self.patience_ns = patience_ns
        self._make_order = make_order
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._numbers: dict[int, int] = {}
        self._returned: dict[int, Request] = {}
        self._accounts: dict[str, _Account] = {}
        self._level = 0.0
        """Tokens charged to the account of the last admitted request, divided by the account's share."""
        self._deadlines: list[Entry] = []
        self._number = 0
        self._taken: dict[int, int] = {}
        self.longest_by_utility = 0
        """Length of the longest prompt that das chose only by its utility for the row that was filled last. 0 means
        that there is none.
        """
        self.now_ns = 0
        self.has_accounts = False
        self._next: _NextRequest | None = None

    def fresh(self) -> Queue:
        return Queue(self._make_order, self.patience_ns)

    def __len__(self) -> int:
        return len(self._returned) + len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """Yield preempted requests, the last first, then all others in order of arrival."""
        yield from reversed(self._returned.values())
        yield from self._waiting.values()

    def push(self, request: Request) -> None:
        self._number += 1
        self._waiting[request.id] = request
        self._numbers[request.id] = self._number
        if request.deadline_ns is not None:
            heappush(self._deadlines, (request.deadline_ns, self._number, request))
            prune(self._deadlines, self._numbers, len(self._numbers))
        self.has_accounts |= bool(request.account.name)
        account = self._account(request)
        account.priority = request.account.priority
        account.add(request, self._number)

    def plan(self, begun: Sequence[Job], pace: Pace) -> set[int]:
        """Under order in-time, decide which waiting requests are deferred. Return the ids of the requests in `begun`
        that must pause.
        """
        self._next = None
        orders = [account.order for account in self._accounts.values()]
        return set().union(*(order.plan(begun, pace) for order in orders if isinstance(order, InTimeOrder)))

    def head_gives_way(self) -> bool:
        """Return whether the next request is deferred by order in-time. The queue must not be empty."""
        chosen = self._choose()
        order = chosen.account.order
        return chosen.place == "order" and isinstance(order, InTimeOrder) and order.gives_way(chosen.request)

    def push_front(self, request: Request) -> None:
        """A preempted request does not expire."""
        self._returned[request.id] = request
        self._account(request).front.appendleft(request)

    def push_back(self, request: Request) -> None:
        self._returned[request.id] = request
        self._account(request).back.append((self.now_ns, request))

    def head(self) -> Request | None:
        return self._choose().request if len(self) else None

    def pop(self) -> Request:
        chosen = self._choose()
        self._take(chosen)
        self._forget(chosen.request)
        return chosen.request

    def charge(self, requests: Iterable[Request]) -> None:
        """Count one output token of each request towards its account. Accounts without a name are not counted."""
        self._next = None
        for request in requests:
            if request.account.name:
                self._accounts[request.account.name].charge(request, 1)

    def ahead(self, count: int) -> list[Request]:
        """Return the next `count` requests, in the order in which they would enter without new arrivals."""
        accounts = self._accounts
        if len(accounts) == 1 and not self._returned and all(account.order.is_fifo for account in accounts.values()):
            return list(islice(self._waiting.values(), count))
        states, level = [(account, account.state()) for account in accounts.values()], self._level
        taken: list[_NextRequest] = []
        while len(taken) < min(count, len(self)):
            taken.append(self._choose())
            self._take(taken[-1])
        for chosen in reversed(taken):
            chosen.account.put_back(chosen, self._numbers.get(chosen.request.id, 0))
        for account, state in states:
            account.restore(state)
        self._level, self._next = level, None
        return [chosen.request for chosen in taken]

    def remove(self, id_: int) -> bool:
        request = self._waiting.get(id_) or self._returned.get(id_)
        if request is None:
            return False
        self._account(request).remove(request, is_new=id_ in self._waiting)
        self._forget(request)
        return True

    def expire(self, now_ns: int) -> list[Request]:
        """Set the clock. Remove and return the requests that have never run and whose deadline has passed.

        Source: TCB sec. 5.1, where a request fails if it is not scheduled by its deadline.
        """
        if now_ns <= self.now_ns and not self._deadlines:
            return []
        self.now_ns = max(self.now_ns, now_ns)
        self._next = None
        for account in self._accounts.values():
            account.order.at(self.now_ns)
        expired = []
        while self._deadlines and self._deadlines[0][0] < now_ns:
            _, number, request = heappop(self._deadlines)
            if self._numbers.get(request.id) == number:
                self.remove(request.id)
                expired.append(request)
        return expired

    def fill_row(self, row_tokens: int, *, goes_on: bool = False) -> list[Request]:
        """Remove and return the next requests that together fit in a batch row of `row_tokens` prompt tokens.

        Args:
            goes_on: whether the row continues a batch. `put_back` then accepts requests of all its rows.
        """
        if not goes_on:
            self._taken.clear()
        self._next = None  # a row may begin with another request than a batch without rows
        for account in self._accounts.values():
            account.order.open_row(row_tokens)
        row: list[Request] = []
        self.longest_by_utility = 0
        while len(self):
            chosen = self._choose()
            request, order = chosen.request, chosen.account.order
            if request.input_length > row_tokens or not order.fits_row(request):
                break
            before, self._taken[request.id] = order.num_dominant, self._numbers.get(request.id, 0)
            self._take(chosen)
            self._forget(request)
            row.append(request)
            if order.num_dominant > before:
                self.longest_by_utility = max(self.longest_by_utility, request.input_length)
            row_tokens -= request.input_length
        return row

    def put_back(self, requests: Iterable[Request]) -> None:
        for request in requests:
            number = self._taken[request.id]
            self._waiting[request.id], self._numbers[request.id] = request, number
            if request.deadline_ns is not None:
                heappush(self._deadlines, (request.deadline_ns, number, request))
            account = self._account(request)
            account.charge(request, -request.input_length)
            account.add(request, number)
        self._waiting = OrderedDict(sorted(self._waiting.items(), key=lambda item: self._numbers[item[0]]))

    def order_of(self, name: str) -> Order:
        return self._named(name).order

    def _account(self, request: Request) -> _Account:
        """Forget the result of `_choose`, since the caller is about to change the account."""
        self._next = None
        return self._named(request.account.name)

    def _named(self, name: str) -> _Account:
        if name not in self._accounts:
            self._accounts[name] = _Account(self._make_order())
        return self._accounts[name]

    def _choose(self) -> _NextRequest:
        if self._next is None:
            due_ns = None if self.patience_ns is None else self.now_ns - self.patience_ns
            account = self._choose_account(due_ns)
            self._next = _NextRequest(account, *account.choose(due_ns))
        return self._next

    def _choose_account(self, due_ns: int | None) -> _Account:
        if len(self._accounts) == 1:
            return next(iter(self._accounts.values()))
        waiting = [(name, account) for name, account in self._accounts.items() if account.has_any()]
        highest = max(account.priority for _, account in waiting)

        def rank(named: tuple[str, _Account]) -> tuple[int, float, str]:
            name, account = named
            is_overdue = account.priority < highest and account.overdue(due_ns) is not None
            priority = highest if is_overdue else account.priority
            return -priority, max(account.served, self._level), name

        return min(waiting, key=rank)[1]

    def _take(self, chosen: _NextRequest) -> None:
        account = chosen.account
        account.take(chosen)
        account.served = self._level = max(account.served, self._level)
        if chosen.place in ("order", "overdue"):
            account.charge(chosen.request, chosen.request.input_length)
        self._next = None

    def _forget(self, request: Request) -> None:
        if self._returned.pop(request.id, None) is None:
            del self._waiting[request.id], self._numbers[request.id]


class _NextRequest(NamedTuple):
    account: _Account
    request: Request
    place: QueuePlace
    since_ns: int = 0


class _Account:
    """The waiting requests of one account: preempted ones in `front` and `back`, new ones in `order`."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.front: deque[Request] = deque()
        self.back: deque[tuple[int, Request]] = deque()
        self.priority = 0
        self.served = 0.0
        self._arrived: list[Entry] = []
        self._may_be_overdue = True
        """Whether an overdue request may enter next. After each overdue request, one request enters in order."""

    def has_any(self) -> bool:
        return bool(self.order.numbers or self.front or self.back)

    def add(self, request: Request, number: int) -> None:
        self.order.add(request, number)
        if not self.order.is_fifo:
            heappush(self._arrived, (0.0, number, request))

    def remove(self, request: Request, *, is_new: bool) -> None:
        if is_new:
            self._drop(request)
        elif request in self.front:
            self.front.remove(request)
        else:
            self.back = deque(entry for entry in self.back if entry[1] is not request)

    def charge(self, request: Request, num_tokens: int) -> None:
        self.served += num_tokens / request.account.share

    def overdue(self, due_ns: int | None) -> tuple[Request, QueuePlace, int] | None:
        if due_ns is None:
            return None
        oldest: tuple[Request, QueuePlace, int] | None = None
        if self.order.numbers:
            request = self.order.first() if self.order.is_fifo else self._arrived[0][2]
            oldest = request, "overdue", request.arrival_ns
        if self.back and (oldest is None or self.back[0][0] < oldest[2]):
            oldest = self.back[0][1], "back", self.back[0][0]
        return None if oldest is None or oldest[2] >= due_ns else oldest

    def choose(self, due_ns: int | None) -> tuple[Request, QueuePlace, int]:
        """For parts "front" and "order", the time is 0."""
        if self.front:
            return self.front[0], "front", 0
        if self._may_be_overdue and (found := self.overdue(due_ns)) is not None:
            return found
        if self.order.numbers:
            return self.order.first(), "order", 0
        since_ns, request = self.back[0]
        return request, "back", since_ns

    def take(self, chosen: _NextRequest) -> None:
        match chosen.place:
            case "front":
                self.front.popleft()
                return
            case "order":
                self.order.take()
                prune(self._arrived, self.order.numbers, len(self.order))
                self._may_be_overdue = True
                return
            case "back":
                self.back.popleft()
            case "overdue":
                self._drop(chosen.request)
        self._may_be_overdue = False

    def put_back(self, chosen: _NextRequest, number: int) -> None:
        """Undo `take`. To undo several calls, begin with the last one, and call `restore` at the end."""
        match chosen.place:
            case "front":
                self.front.appendleft(chosen.request)
            case "back":
                self.back.appendleft((chosen.since_ns, chosen.request))
            case _:
                self.add(chosen.request, number)

    def state(self) -> tuple[float, bool, Any]:
        return self.served, self._may_be_overdue, self.order.state()

    def restore(self, state: tuple[float, bool, Any]) -> None:
        self.served, self._may_be_overdue, order = state
        self.order.restore(order)

    def _drop(self, request: Request) -> None:
        self.order.drop(request)
        prune(self._arrived, self.order.numbers, len(self.order))


def make_order(
    order: AdmissionOrder, row_tokens: int | None = None, first_tokens: FirstTokens | None = None, eta: float = ETA
) -> Order:
    match order:
        case "fcfs":
            return SortedOrder()
        case "in-time":
            assert first_tokens is not None
            return InTimeOrder(first_tokens)
        case "sjf":
            return SortedOrder(lambda request: request.input_length)
        case "lpt":
            return SortedOrder(lambda request: -request.max_output)
        case "shuffled":
            return SortedOrder(shuffled)
        case "edf":
            return SortedOrder(deadline)
        case "das":
            assert row_tokens is not None
            return DasOrder(row_tokens, eta)


def make_queue(
    order: AdmissionOrder = "fcfs",
    row_tokens: int | None = None,
    patience_ns: int | None = None,
    first_tokens: FirstTokens | None = None,
    eta: float = ETA,
) -> Queue:
    """Return an empty queue.

    Args:
        eta: share of a row's requests that das chooses only by utility (das).
    """
    return Queue(partial(make_order, order, row_tokens, first_tokens, eta), patience_ns)
