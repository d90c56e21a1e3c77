"""Estimate when one more request would be answered, from waiting requests and the engine's pace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from math import ceil, exp, inf
from typing import NamedTuple

from xgpt.schema import ANYONE, Account, Plan

ENOUGH = 0.25
"""Share of its memory that must be filled before the rate is told."""
LATE = 0.005
"""Share of the answers that may come later than was promised."""
PER_ANSWER = 0.1
"""By how much one answer that comes too late changes what is reckoned with."""
FORGOTTEN = 2.0
"""Memories without news after which nothing is told any more: refused requests bring none."""


class Backlog:
    """The waiting requests, and the rate at which they begin while the engine has more of them than it lets in.

    Such a time lies between two steps that let some in and left others that had been there when the step began. Where
    a step let in all that it could have, it says nothing of how many more it would have taken; and a request that
    arrives while it runs has not been left by it. What is counted are prompt tokens: a phase takes a planned number of
    them, and as many requests as that comes to. Times are in seconds, of any clock that does not go back.

    Args:
        memory_s: seconds of such times after which what was seen before counts a third.
    """

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._waiting: dict[int, _Queued] = {}
        """In the order of their coming."""
        self._accounts: dict[str, Account] = {}
        self._counts: Counter[str] = Counter()
        """How many of each account wait."""
        self._begun = self._seconds = 0.0
        self._since_s: float | None = None
        """End of the last step that let some in and left others; None: all have been let in since."""
        self._told_s = 0.0
        self._phase = _Phase(-inf, 0)
        """The last one that is known to have begun."""
        self._before = 0, inf
        """Prompt tokens of the one before it, and how long that lasted."""
        self._ended_s = -inf
        """End of the last step."""
        self.caution = 1.0
        """What to multiply `answer_s` with before it is promised (`note_answer`)."""

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._waiting)

    def join(self, id_: int, num_tokens: int, now_s: float, account: Account = ANYONE) -> None:
        """Add a waiting request of `num_tokens` prompt tokens; requests are added in the order of their arrival."""
        self._waiting[id_] = _Queued(num_tokens, now_s, account)
        self._accounts[account.name] = account
        self._counts[account.name] += 1

    def has_room(self, account: Account, num_outputs: int, most: int) -> bool:
        """Whether `num_outputs` more of an account may wait, where `most` may in all: always its share of them."""
        if len(self) + num_outputs <= most:
            return True
        shares = sum(one.share for name, one in self._accounts.items() if self._counts[name] and name != account.name)
        return self._counts[account.name] + num_outputs <= most * account.share / (shares + account.share)

    def leave(self, id_: int) -> None:
        """Take a request out, if it waits."""
        self._take(id_)

    def clear(self) -> None:
        """Forget all waiting requests."""
        self._waiting.clear()
        self._counts.clear()

    def begin(self, ids: Iterable[int], start_s: float, end_s: float) -> None:
        """Account for a step that has ended: its requests wait no longer.

        Args:
            start_s: at which the engine knew of all that had arrived before.
        """
        self._ended_s = end_s
        begun = [one for id_ in ids if (one := self._take(id_)) is not None]
        if begun:
            self._before = self._phase.num_tokens, start_s - self._phase.start_s
            self._phase = _Phase(start_s, sum(one.num_tokens for one in begun))
        if next((one.since_s for one in self._waiting.values()), start_s) >= start_s:
            self._since_s = None
        elif begun:
            if self._since_s is not None:
                span_s = end_s - self._since_s
                kept = exp(-span_s / self._memory_s)
                self._begun = self._begun * kept + sum(one.num_tokens for one in begun)
                self._seconds = self._seconds * kept + span_s
                self._told_s = end_s
            self._since_s = end_s

    def _take(self, id_: int) -> _Queued | None:
        one = self._waiting.pop(id_, None)
        if one is not None:
            self._counts[one.account.name] -= 1
        return one

    def rate_per_s(self, now_s: float) -> float | None:
        """Prompt tokens of the requests that begin in a second; None: too little, or too long ago, tells it."""
        is_told = self._seconds >= ENOUGH * self._memory_s and now_s < self._told_s + FORGOTTEN * self._memory_s
        return self._begun / self._seconds if is_told else None

    def answer_s(
        self,
        now_s: float,
        account: Account,
        num_outputs: int,
        plan: Plan,
        slowness: float,
        entered: Container[int] = (),
    ) -> float | None:
        """Seconds until `num_outputs` more of this account would be complete; None: the plan predicts nothing.

        The last of them begins in the first phase that has room for it; their prompts count as of the planned mean, or
        a long one would never get in. A full phase lasts as long as the plan says, at the recent pace, and one with
        less takes less; replicas have phases of their own, so there the present one counts as full and just
        begun. From then on it takes what the plan says. Assumes that the first of an account to come enters first, and
        that accounts are served as `xgpt.policies.admission` says.

        Args:
            slowness: measured over predicted time of the steps.
            entered: contains those that the step under way begins with.
        """
        estimate = plan.estimate
        if not estimate.predicts_rate:
            return None
        mean = estimate.encode_tokens / estimate.encode_batch
        room = plan.replicas * estimate.encode_tokens
        cycle_s = room / (self.rate_per_s(now_s) or mean * estimate.throughput_rps / slowness)
        still = [one for id_, one in self._waiting.items() if id_ not in entered]
        phase, before = self._phase, self._before
        if len(still) < len(self._waiting):
            before = phase.num_tokens, self._ended_s - phase.start_s
            phase = _Phase(self._ended_s, sum(one.num_tokens for one in self._waiting.values()) - _tokens(still))
        if plan.replicas > 1:
            phase = _Phase(now_s, ceil(room))
        left_s = max(0.0, phase.start_s + phase.length_s(room, cycle_s, before) - now_s)
        num_phases = ceil(_before_last(account, num_outputs * mean, still) / room)
        wait_s = left_s + (num_phases - 1) * cycle_s
        return wait_s + (1 + plan.constraint.headroom) * slowness * estimate.latency_s

    def note_answer(self, expected_s: float, promised_s: float, took_s: float) -> None:
        """Learn from a complete answer whose time `answer_s` had estimated.

        No machine keeps its pace, and no phase its length. Each answer that comes too late makes the next ones be
        reckoned with more cautiously, each that comes in time a little less, so that the share which is late settles at
        `LATE` whatever they depend on.

        Source: Gibbs and Candes, Adaptive conformal inference under distribution shift, NeurIPS 2021.
        """
        if took_s > promised_s:
            self.caution = max(self.caution, min((1 + PER_ANSWER * (1 - LATE)) * self.caution, took_s / expected_s))
        else:
            self.caution = max(1.0, (1 - PER_ANSWER * LATE) * self.caution)


class _Queued(NamedTuple):
    num_tokens: int
    since_s: float
    account: Account


def _tokens(waiting: Iterable[_Queued]) -> int:
    return sum(one.num_tokens for one in waiting)


def _before_last(account: Account, num_tokens: float, waiting: list[_Queued]) -> float:
    """Prompt tokens that have begun once `num_tokens` of an account have: these, with what others get meanwhile."""
    first = _tokens(one for one in waiting if one.account.priority > account.priority)
    equals = [one for one in waiting if one.account.priority == account.priority]
    own = num_tokens + _tokens(one for one in equals if one.account.name == account.name)
    shares = {one.account.name: one.account.share for one in equals} | {account.name: account.share}
    return first + min(own * sum(shares.values()) / account.share, num_tokens + _tokens(equals))


class _Phase(NamedTuple):
    """A step that lets some in, and all until the next one that does.

    Attributes:
        num_tokens: of their prompts.
    """

    start_s: float
    num_tokens: int

    def length_s(self, room: float, cycle_s: float, before: tuple[int, float]) -> float:
        """How long it lasts, if one of `room` tokens takes `cycle_s`.

        Args:
            before: tokens and length of another: between the two it is interpolated, and below them the same.
        """
        tokens, seconds = before
        if seconds >= cycle_s:
            return cycle_s
        share = (self.num_tokens - tokens) / (room - tokens) if room > tokens else 1.0
        return seconds + min(1.0, max(0.0, share)) * (cycle_s - seconds)
