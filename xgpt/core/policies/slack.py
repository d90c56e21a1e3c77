"""Limit the prompt tokens of a step, by a token budget or by the time until running requests' next tokens are due."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple, Protocol

from xgpt.core.policies.request import MicroBatch, Request
from xgpt.core.schema import SlackBudget, StepTimes


class StepClock:
    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self._tokens, self._tokens_s = times.tokens, times.tokens_s
        self._prompts, self._prompts_s = times.prompts, times.prompts_s
        self._decode_s, self._context_s = times.decode_s, times.context_s

    def tokens(self, count: int) -> float:
        return _at(self._tokens, self._tokens_s, count)

    def most_tokens(self, seconds: float) -> int:
        """Return the largest number of tokens, up to the largest in `step_times`, for which a step takes at most
        `seconds`, not counting the time of attention.
        """
        counts, times = self._tokens, self._tokens_s
        i = min(bisect_right(times, seconds), len(times) - 1) - 1
        if i < 0:
            return 0
        share = min((seconds - times[i]) / (times[i + 1] - times[i]), 1.0) if times[i + 1] > times[i] else 1.0
        return int(counts[i] + share * (counts[i + 1] - counts[i]))

    def decodes(self, count: int, context: int) -> float:
        return self._decode_s * count + self._context_s * context

    def piece(self, start: int, end: int) -> float:
        return _at(self._prompts, self._prompts_s, end) - _at(self._prompts, self._prompts_s, start)

    def prompt_ns(self, length: int) -> int:
        return round(1e9 * (self.tokens(length) + self.piece(0, length)))


def _at(points: Sequence[int], values: Sequence[float], x: int) -> float:
    i = min(bisect_right(points, x), len(points) - 1) - 1
    return values[i] + (x - points[i]) * (values[i + 1] - values[i]) / (points[i + 1] - points[i])


class Slack(NamedTuple):
    budget: SlackBudget
    clock: StepClock
    tpot_ns: int
    num_stages: int = 1
    num_microbatches: int = 1

    def due_ns(self, first_ns: int, generated: int, own_ns: int | None = None) -> int:
        """Return the time at which the next token of a request is due. The request had its first token at `first_ns`
        and has `generated` tokens.

        Args:
            own_ns: the account's own bound on the nanoseconds per token. None means the plan's bound.
        """
        return first_ns + self.token_ns(own_ns) * (generated + self.budget.behind_tokens)

    def token_ns(self, own_ns: int | None = None) -> int:
        return self.tpot_ns if own_ns is None else round(self.budget.share * own_ns)

    def of_microbatch(self, count: int) -> Slack:
        least, most = (max(1, n // count) for n in (self.budget.least_tokens, self.budget.most_tokens))
        budget = self.budget.but(least_tokens=least, most_tokens=most)
        return self._replace(budget=budget, num_microbatches=count)

    @property
    def equal_ns(self) -> float:
        return self.tpot_ns * self.num_stages / max(self.num_stages, self.num_microbatches)

    def step_s(self, own_ns: float, others_ns: Sequence[float]) -> float:
        """Return the seconds that a step may take through all stages so that no token is late.

        Micro-batches take turns, and all other steps are assumed to take `equal_ns`. The next micro-batch's step begins
        once this step has left the first stage, and ends after this step.

        Args:
            own_ns: nanoseconds from when the first stage is free until the earliest next token of this micro-batch is
                due. Infinite if no request decodes.
            others_ns: the same for each other micro-batch, in the order of their turns.
        """
        stages, equal_ns = self.num_stages, self.equal_ns
        left_ns = own_ns
        for place, until_ns in enumerate(others_ns):
            turn_ns = until_ns - place * equal_ns / stages
            left_ns = min(left_ns, stages * (turn_ns - equal_ns), turn_ns - equal_ns / stages)
        return left_ns / 1e9

    def even_tokens(self, to_encode: Iterable[int]) -> int:
        """Return the largest number of prompt tokens that a step may take if every micro-batch gets an equal number."""
        count, most = self.num_microbatches, self.budget.most_tokens
        if count == 1:
            return most
        total = 0
        for tokens in to_encode:
            total += tokens
            if total >= count * most:
                return most
        return -(-total // count)


class LaneForecast:
    """Predicts when running steps leave the first stage of a lane, and when tokens are due.

    All stages are assumed to take equal times.
    """

    def __init__(self) -> None:
        self._begun: deque[tuple[int, int]] = deque()
        self._due: defaultdict[MicroBatch, dict[int, list[tuple[int, int, Request]]]] = defaultdict(dict)
        """By micro-batch and bound on the time per token: a heap of the due times of requests' next tokens, without the
        part that grows with the micro-batch's iterations. A request that has left is removed once it is at the top.
        """

    def first_due_ns(self, batch: MicroBatch, now_ns: int, slack: Slack) -> float:
        """Return the earliest due time of a micro-batch's tokens, except tokens that a running step computes. Return
        infinity if no request decodes.
        """
        coming = batch.steps_under_way if batch.assumed is None else 0
        further = batch.iterations + coming + slack.budget.behind_tokens
        first_ns = inf
        for tpot_ns, heap in self._due[batch].items():
            while heap and not batch.counts(heap[0][2], heap[0][1]):
                heappop(heap)
            if heap and (due_ns := heap[0][0] + tpot_ns * further) < first_ns:
                first_ns = due_ns
        for request in batch.joined:
            if batch.counts(request, request.place):
                since_ns = now_ns if request.first_ns is None else request.first_ns
                due_ns = slack.due_ns(since_ns, request.generated + coming, request.account.tpot_ns)
                first_ns = min(first_ns, due_ns)
        return first_ns

    def begin_decode(self, batch: MicroBatch, now_ns: int, slack: Slack) -> None:
        """Requests that have joined since the last decode step count as if they got their first token now."""
        for request in batch.joined:
            if request.first_ns is None:
                request.first_ns = now_ns
            tpot_ns = slack.token_ns(request.account.tpot_ns)
            entry = request.first_ns + tpot_ns * request.base, request.place, request
            heappush(self._due[batch].setdefault(tpot_ns, []), entry)
        batch.joined.clear()

    def restart(self, batch: MicroBatch) -> None:
        self._due.pop(batch, None)
        batch.joined[:] = batch.decoding.values()

    def free_ns(self, now_ns: int, num_under_way: int) -> int:
        while len(self._begun) > num_under_way:
            self._begun.popleft()
        free_ns = 0
        for begun_ns, stage_ns in self._begun:
            free_ns = max(begun_ns, free_ns) + stage_ns
        return max(now_ns, free_ns)

    def begin(self, now_ns: int, seconds: float, num_stages: int) -> None:
        self._begun.append((now_ns, round(1e9 * seconds / num_stages)))


class PromptRoom(Protocol):
    @property
    def is_open(self) -> bool:
        """Whether another prompt token can be added."""

    def holds(self, length: int) -> bool:
        """Return whether a whole prompt of `length` tokens can be added."""

    def take(self, start: int, end: int) -> int:
        """Add tokens [start, end) of a prompt to the step, or as many of the first ones as fit. Return the number of
        added tokens. Call this only if `is_open`, so that at least one token fits.
        """


class TokenRoom:
    def __init__(self, left: int | None) -> None:
        self._left = left

    @property
    def is_open(self) -> bool:
        return self._left is None or self._left > 0

    def holds(self, length: int) -> bool:
        return self._left is None or length <= self._left

    def take(self, start: int, end: int) -> int:
        if self._left is None:
            return end - start
        length = max(0, min(end - start, self._left))
        self._left -= length
        return length


class TimeRoom:
    """Room by the predicted time of a step, within the slack budget's least and largest numbers of prompt tokens."""

    def __init__(self, slack: Slack, spare_s: float, decodes: int, context: int, even: int) -> None:
        self._clock, budget = slack.clock, slack.budget
        self._least, self._most, self._even = budget.least_tokens, budget.most_tokens, even
        self._decodes, self._used = decodes, 0
        self._others_s = self._clock.decodes(decodes, context)
        self._left_s = spare_s

    @property
    def is_open(self) -> bool:
        used = self._used
        return used < min(self._most, self._even) and (used < self._least or self._is_over_in_time(0, 1))

    def holds(self, length: int) -> bool:
        return self._used + length <= self._most and self._is_over_in_time(0, length)

    def take(self, start: int, end: int) -> int:
        length = min(end - start, self._most - self._used)
        least = min(max(self._least - self._used, 1), length)
        if length > least and not self._is_over_in_time(start, length):
            low, high = least, length  # find the longest piece that is in time
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self._is_over_in_time(start, middle) else (low, middle)
            length = low
        self._used += length
        self._others_s += self._clock.piece(start, start + length)
        return length

    @property
    def seconds(self) -> float:
        return self._clock.tokens(self._decodes + self._used) + self._others_s

    def _is_over_in_time(self, start: int, length: int) -> bool:
        clock = self._clock
        tokens_s = clock.tokens(self._decodes + self._used + length)
        return tokens_s + clock.piece(start, start + length) + self._others_s <= self._left_s
