"""Estimate when a further request would be complete, from the waiting requests and the engine's pace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from math import ceil, exp, inf
from typing import NamedTuple

from xgpt.core.schema import ANYONE, Account, Plan

ENOUGH = 0.25
"""Share of `memory_s` that observations must cover before a rate is returned."""
LATE = 0.005
"""Target for the share of answers that are later than promised."""
PER_ANSWER = 0.1
"""Relative amount by which one late answer changes the caution."""
FORGOTTEN = 2.0
"""Multiple of `memory_s` without observations after which no rate is returned. Otherwise an old rate could refuse all
requests, and refused requests add no observations."""


class Backlog:
    """The waiting requests, and the rate at which they start while more of them wait than the engine can admit.

    The rate is measured between two steps that each admitted some requests but not all that had arrived before the
    step. A step that admitted all waiting requests does not show how many more it could have admitted. The rate counts
    prompt tokens, because a phase takes a planned number of prompt tokens, not of requests. Times are seconds of any
    monotonic clock.

    Args:
        memory_s: age in seconds at which an observation has a third of its weight."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._waiting: dict[int, _Queued] = {}
        self._accounts: dict[str, Account] = {}
        self._counts: Counter[str] = Counter()
        self._begun = self._seconds = 0.0
        self._since_s: float | None = None
        """End of the last step that admitted some requests but not all. None if a later step has admitted all."""
        self._told_s = 0.0
        self._phase = _Phase(-inf, 0)
        """The last phase that is known to have begun."""
        self._before = 0, inf
        """Prompt tokens of the previous phase, and its length in seconds."""
        self._ended_s = -inf
        self.caution = 1.0
        """Factor by which `answer_s` is multiplied before it is promised (see `note_answer`)."""

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, id_: int, num_tokens: int, now_s: float, account: Account = ANYONE) -> None:
        """Add a waiting request with `num_tokens` prompt tokens. Requests must be added in the order of arrival."""
        self._waiting[id_] = _Queued(num_tokens, now_s, account)
        self._accounts[account.name] = account
        self._counts[account.name] += 1

    def has_room(self, account: Account, num_outputs: int, most: int) -> bool:
        """Return whether an account may add `num_outputs` if at most `most` outputs may wait in total. An account may
        always use its share."""
        if len(self) + num_outputs <= most:
            return True
        shares = sum(one.share for name, one in self._accounts.items() if self._counts[name] and name != account.name)
        return self._counts[account.name] + num_outputs <= most * account.share / (shares + account.share)

    def leave(self, id_: int) -> None:
        self._take(id_)

    def clear(self) -> None:
        self._waiting.clear()
        self._counts.clear()

    def begin(self, ids: Iterable[int], start_s: float, end_s: float) -> None:
        """Note a step that has ended. Its requests no longer wait. `start_s`: the step's start. The engine knew all
        requests that had arrived before this time."""
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
        """Return how many prompt tokens start per second, or None if there are too few recent observations."""
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
        """Return the estimated seconds until `num_outputs` further outputs of an account are complete, or None if the
        plan has no prediction.

        The estimate is the time until the first phase that can admit the last output, plus the planned latency. Prompts
        count with the planned mean length, because a long prompt would otherwise never be accepted. A full phase takes
        the planned time at the recent pace. Several replicas have separate phases, so the present phase then counts as
        full and as just begun. Accounts are assumed to enter as in `xgpt.core.policies.admission`, and each account's
        requests in the order of arrival.

        Args:
            slowness: measured time of steps divided by predicted time."""
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
        """Adjust the factor `caution` after a complete answer whose time `answer_s` had estimated.

        Each late answer raises the caution, and each timely answer lowers it a little, so that in the long run the
        share of late answers is `LATE`.

        Source: Gibbs and Candes, Adaptive conformal inference under distribution shift, NeurIPS 2021."""
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
    """Return how many prompt tokens of all accounts start until `num_tokens` of this account have started."""
    first = _tokens(one for one in waiting if one.account.priority > account.priority)
    equals = [one for one in waiting if one.account.priority == account.priority]
    own_tokens = num_tokens + _tokens(one for one in equals if one.account.name == account.name)
    shares = {one.account.name: one.account.share for one in equals} | {account.name: account.share}
    return first + min(own_tokens * sum(shares.values()) / account.share, num_tokens + _tokens(equals))


class _Phase(NamedTuple):
    """A phase: a step that admits requests, and the following steps that admit none."""

    start_s: float
    num_tokens: int

    def length_s(self, room: float, cycle_s: float, before: tuple[int, float]) -> float:
        """Return the phase's length in seconds, interpolated between a smaller phase and a full one.

        Args:
            room, cycle_s: tokens and seconds of a full phase.
            before: tokens and seconds of a smaller phase. The result is between the seconds of the two phases."""
        tokens, seconds = before
        if seconds >= cycle_s:
            return cycle_s
        share = (self.num_tokens - tokens) / (room - tokens) if room > tokens else 1.0
        return seconds + min(1.0, max(0.0, share)) * (cycle_s - seconds)
