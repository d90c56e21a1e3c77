"""How many prompt tokens a step takes: as many as a budget leaves, or as the running requests can spare time for."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import NamedTuple, Protocol

from xgpt.schema import SlackBudget, StepTimes


class StepClock:
    """Predicts steps by a plan's own times."""

    def __init__(self, times: StepTimes) -> None:
        self._tokens, self._tokens_s = times.tokens, times.tokens_s
        self._prompts, self._prompts_s = times.prompts, times.prompts_s
        self._decode_s, self._context_s = times.decode_s, times.context_s

    def tokens(self, count: int) -> float:
        """Return the seconds that this many tokens take, without attention."""
        return _at(self._tokens, self._tokens_s, count)

    def decodes(self, count: int, context: int) -> float:
        """Return the seconds that decodes take beyond their tokens."""
        return self._decode_s * count + self._context_s * context

    def piece(self, start: int, end: int) -> float:
        """Return the seconds of the attention of a piece of a prompt."""
        return _at(self._prompts, self._prompts_s, end) - _at(self._prompts, self._prompts_s, start)

    def prompt_ns(self, length: int) -> int:
        """Return the nanoseconds of a step that encodes one whole prompt and nothing else."""
        return round(1e9 * (self.tokens(length) + self.piece(0, length)))


def _at(points: Sequence[int], values: Sequence[float], x: int) -> float:
    i = min(bisect_right(points, x), len(points) - 1) - 1
    return values[i] + (x - points[i]) * (values[i + 1] - values[i]) / (points[i + 1] - points[i])


class Slack(NamedTuple):
    """A slack budget with what it is decided by.

    Attributes:
        tpot_ns: time between a request's tokens by which it is due the next.
        num_stages: of the lane.
        num_microbatches: of the lane, in strict turns.
    """

    budget: SlackBudget
    clock: StepClock
    tpot_ns: int
    num_stages: int = 1
    num_microbatches: int = 1

    def due_ns(self, first_ns: int, generated: int) -> int:
        """When the next token is due of a request whose first token came then, and which has this many."""
        return first_ns + self.tpot_ns * (generated + self.budget.behind_tokens)

    def of_microbatch(self, count: int) -> Slack:
        """One micro-batch's share."""
        least, most = (max(1, n // count) for n in (self.budget.least_tokens, self.budget.most_tokens))
        budget = self.budget.model_copy(update={"least_tokens": least, "most_tokens": most})
        return self._replace(budget=budget, num_microbatches=count)

    def step_s(self, spare_ns: int) -> float:
        """Return the seconds that a step may take where the first request is due its next token after so long.

        Micro-batches take turns: while one's requests wait for a token, each of the others runs a step. So a step has
        the part of a token's time that makes all of them equal, and an equal part of what there is beyond: were one to
        take all, the others' steps would be late behind it, and stages idle in their turns.
        """
        count, stages = self.num_microbatches, self.num_stages
        if count == 1:
            return spare_ns / 1e9
        equal_ns = self.tpot_ns * stages / max(stages, count)
        return (equal_ns + (spare_ns - self.tpot_ns) / count) / 1e9


class LaneForecast:
    """When the steps under way in a lane will have passed its first stage, all stages taken for equal."""

    def __init__(self) -> None:
        self._begun: deque[tuple[int, int]] = deque()
        """When steps were scheduled, and nanoseconds of each on a stage."""

    def until_ns(self, due_ns: int, now_ns: int, num_under_way: int) -> int:
        """Return what a step that is scheduled now has until then, once the first stage is free.

        Args:
            num_under_way: of the steps that have begun, how many have not ended.
        """
        while len(self._begun) > num_under_way:
            self._begun.popleft()
        free_ns = 0
        for begun_ns, stage_ns in self._begun:
            free_ns = max(begun_ns, free_ns) + stage_ns
        return due_ns - max(now_ns, free_ns)

    def begin(self, now_ns: int, seconds: float, num_stages: int) -> None:
        """Note a step that is scheduled now."""
        self._begun.append((now_ns, round(1e9 * seconds / num_stages)))


class Room(Protocol):
    """What a step has left for prompts."""

    @property
    def is_open(self) -> bool:
        """Whether there is room for a further token."""

    def holds(self, length: int) -> bool:
        """Whether there is room for a whole prompt of that length."""

    def take(self, start: int, end: int) -> int:
        """Return how many tokens of a prompt from `start` on, up to `end`, the step takes, at least one: they are taken
        from the room, which must be open.
        """


class TokenRoom:
    """A number of tokens; None: any number."""

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
    """As many tokens as the step can take and be over in time, within the budget's limits.

    Args:
        spare_s: until the first running request is due its next token; None: none runs.
        decodes, context: requests that the step decodes, and tokens that they attend to.
    """

    def __init__(self, slack: Slack, spare_s: float | None, decodes: int, context: int) -> None:
        self._clock, self._budget = slack.clock, slack.budget
        self._decodes, self._used = decodes, 0
        self._others_s = self._clock.decodes(decodes, context)
        self._left_s = inf if spare_s is None else spare_s

    @property
    def is_open(self) -> bool:
        used, budget = self._used, self._budget
        return used < budget.most_tokens and (used < budget.least_tokens or self._is_over_in_time(0, 1))

    def holds(self, length: int) -> bool:
        return self._used + length <= self._budget.most_tokens and self._is_over_in_time(0, length)

    def take(self, start: int, end: int) -> int:
        budget, used = self._budget, self._used
        length = min(end - start, budget.most_tokens - used)
        least = min(max(budget.least_tokens - used, 1), length)
        if length > least and not self._is_over_in_time(start, length):
            low, high = least, length  # the longest piece with which it is
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self._is_over_in_time(start, middle) else (low, middle)
            length = low
        self._used += length
        self._others_s += self._clock.piece(start, start + length)
        return length

    @property
    def seconds(self) -> float:
        """What the step takes with all that it has taken."""
        return self._clock.tokens(self._decodes + self._used) + self._others_s

    def _is_over_in_time(self, start: int, length: int) -> bool:
        clock = self._clock
        tokens_s = clock.tokens(self._decodes + self._used + length)
        return tokens_s + clock.piece(start, start + length) + self._others_s <= self._left_s
