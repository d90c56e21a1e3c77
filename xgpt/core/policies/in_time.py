"""Implement admission order in-time: as many requests as possible get their first token within the bound.

If not all waiting prompts can be prefilled in time, as few as possible are deferred, the longest first. This is Moore
and Hodgson's algorithm.

Source: J. M. Moore, Management Science 15(1), 1968, pp. 102-109.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import inf
from operator import attrgetter
from typing import NamedTuple

from xgpt.core.policies.orders import Entry, Order, SortedOrder, prune
from xgpt.core.policies.request import Request
from xgpt.core.policies.slack import Slack, StepClock

UNCUT_TOKENS = 2048
"""If no budget limits a step's prompt tokens, the time per prompt token is computed for a step with this number of
tokens.
"""


class Pace(NamedTuple):
    """The predicted prefill time per prompt token while the present requests decode.

    Attributes:
        at_once: number of prompts that a pipeline's micro-batches prefill concurrently, each at `token_ns` per token.
    """

    token_ns: float
    at_once: int = 1


class Job(NamedTuple):
    """The part of a prompt that is not prefilled yet: `tokens` tokens, whose attention takes `attention_ns`. The first
    output token is due at `due_ns`.
    """

    due_ns: int
    number: int
    id: int
    tokens: int
    attention_ns: float


class FirstTokens(NamedTuple):
    clock: StepClock
    ttft_ns: int
    at_once: int = 1

    def due_ns(self, request: Request) -> int:
        own_ns = request.account.ttft_ns
        return request.arrival_ns + (self.ttft_ns if own_ns is None else own_ns)

    def latest_ns(self, request: Request) -> int:
        """Return the latest time at which a request's prefill can start and be in time, if the engine runs nothing
        else.
        """
        return self.due_ns(request) - self.clock.prompt_ns(request.input_length)

    def job(self, request: Request, number: int = -1) -> Job:
        """`number` is a waiting request's position in order of arrival, and -1 for a request whose prefill has
        begun.
        """
        attention_ns = 1e9 * self.clock.piece(request.encoded, request.context)
        return Job(self.due_ns(request), number, request.id, request.context - request.encoded, attention_ns)

    def pace(self, decodes: int, context: int, budget: int | None, slack: Slack | None) -> Pace:
        """Return the prefill time per prompt token in steps that also decode `decodes` requests.

        Args:
            context: total number of tokens to which the decoding requests attend.
            budget: largest number of tokens of a step. None means any number. Ignored if `slack` is given.
        """
        others_s = self.clock.decodes(decodes, context)
        tokens = (UNCUT_TOKENS + decodes if budget is None else budget) - decodes
        if slack is not None:
            fitting = self.clock.most_tokens(slack.equal_ns / 1e9 - others_s) - decodes
            tokens = min(max(fitting, slack.budget.least_tokens), slack.budget.most_tokens)
        tokens = max(tokens, 1)
        return Pace(1e9 * (self.clock.tokens(decodes + tokens) + others_s) / tokens, self.at_once)


def that_give_way(jobs: Iterable[Job], now_ns: int, pace: Pace) -> set[int]:
    """Return the ids of the requests to defer so that as many others as possible are in time.

    Args:
        jobs: the parts of prompts that are not prefilled yet, sorted by `due_ns`.
    """
    token_ns, at_once = pace
    late: set[int] = set()
    kept: list[tuple[float, int]] = []
    end_ns = float(now_ns)
    for due_ns, _, id_, tokens, attention_ns in jobs:
        alone_ns = tokens * token_ns + attention_ns
        if now_ns + alone_ns > due_ns:
            late.add(id_)
            continue
        took_ns = alone_ns / at_once
        heappush(kept, (-took_ns, id_))
        if end_ns + alone_ns > due_ns:
            longest_ns, longest = heappop(kept)
            late.add(longest)
            end_ns += longest_ns
        end_ns += took_ns
    return late


class InTimeOrder(Order):
    """Admission order in-time: earliest due time first. Deferred requests follow in order of arrival.

    Before each step, `plan` decides which requests are deferred. A request that arrives later is not deferred until the
    next call. A request that could not be in time even if the engine ran nothing else stays deferred.
    """

    def __init__(self, first_tokens: FirstTokens) -> None:
        super().__init__()
        self.first_tokens = first_tokens
        self._now_ns = 0
        self._jobs: list[Job] = []
        self._of: dict[int, tuple[Job, Request]] = {}
        self._late = SortedOrder()
        self._by_latest: list[Entry] = []
        self._giving_way: set[int] = set()

    def at(self, now_ns: int) -> None:
        self._now_ns = now_ns
        while self._by_latest and self._by_latest[0][0] < now_ns:
            _, number, request = heappop(self._by_latest)
            if request.id in self._of and self.numbers.get(request.id) == number:
                self._forget(request)
                self._late.add(request, number)

    def plan(self, begun: Sequence[Job], pace: Pace) -> set[int]:
        """Decide which requests are deferred, and return the ids of the requests in `begun` that must pause. A request
        must pause if it is deferred, or if it is due later than some waiting request that is not deferred.
        """
        jobs = sorted([*begun, *self._jobs]) if begun else self._jobs
        self._giving_way = that_give_way(jobs, self._now_ns, pace)
        if not begun:
            return set()
        first_due_ns = next((job.due_ns for job in self._jobs if job.id not in self._giving_way), inf)
        return {job.id for job in begun if job.id in self._giving_way or job.due_ns > first_due_ns}

    def first(self) -> Request:
        for job in self._jobs:
            if job.id not in self._giving_way:
                return self._of[job.id][1]
        late = [self._late.first()] if self._late.numbers else []
        if self._jobs:
            late.append(self._of[min(self._jobs, key=attrgetter("number")).id][1])
        return min(late, key=lambda request: self.numbers[request.id])

    def gives_way(self, request: Request) -> bool:
        return request.id in self._giving_way or request.id in self._late.numbers

    def _add(self, request: Request, number: int) -> None:
        latest_ns = self.first_tokens.latest_ns(request)
        if latest_ns < self._now_ns:
            self._late.add(request, number)
            return
        job = self.first_tokens.job(request, number)
        insort(self._jobs, job)
        self._of[request.id] = job, request
        heappush(self._by_latest, (latest_ns, number, request))

    def _drop(self, request: Request) -> None:
        if request.id in self._of:
            self._forget(request)
        else:
            self._late.drop(request)
        prune(self._by_latest, self.numbers, len(self._jobs))

    def _forget(self, request: Request) -> None:
        job, _ = self._of.pop(request.id)
        del self._jobs[bisect_left(self._jobs, job)]
