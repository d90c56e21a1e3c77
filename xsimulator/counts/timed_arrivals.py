"""Requests that arrive one by one, by counts, under rules that go by the clock: budgets from slack, entering in time.

In Python, step by step, for the lanes whose steps both encode and decode; `one_lane_arrivals` has all rules that do not
go by the clock, compiled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

import numpy as np

from xgpt.core.policies.in_time import InTimeOrder
from xgpt.core.policies.lane_settings import LaneSettings
from xgpt.core.policies.request import Request
from xgpt.core.policies.slack import LaneForecast, Room, Slack, TimeRoom, TokenRoom
from xsimulator.clock import Clock
from xsimulator.costs.step_cost import LaneCost
from xsimulator.costs.step_counts import StepCounts
from xsimulator.counts.arrivals import Kv, Limits, Stream

Pieces = list[tuple[int, int, int]]
"""Of prompts: (request, start, length)."""


class _Batch:
    """A micro-batch by its counts.

    Attributes:
        settings: the micro-batch's share of the lane's.
        encoding: requests whose prompt is not encoded yet -> tokens of it that are.
        decoding: requests in decode.
        context, inputs: tokens of prompts and outputs, and of prompts alone, of those in decode.
        iteration: decode steps so far.
        ends: requests that end in each iteration to come.
        steps: under way.
        joined: requests in decode since the last step, with the iteration in which they joined.
        due: when requests are due their next token, less what the iterations so far have added; those that have ended
            are left out when they come up.
    """

    def __init__(self, settings: LaneSettings) -> None:
        self.settings = settings
        self.encoding: dict[int, int] = {}
        self.decoding = self.context = self.inputs = self.iteration = self.steps = 0
        self.ends: dict[int, list[int]] = {}
        self.joined: list[tuple[int, int]] = []
        self.due: list[tuple[int, int]] = []

    @property
    def num_running(self) -> int:
        return len(self.encoding) + self.decoding


class _Step(NamedTuple):
    encode: Pieces
    decodes: bool
    batch: _Batch


class TimedRun:
    """One run of orca's or chunked's rule over a stream, as `xgpt.core.policies.OneLane`.

    All requests of a micro-batch have a token more with each step that decodes, so which of them is due first changes
    only as requests come and go.

    Args:
        order: the empty order of waiting requests, where that is not of arrival.
        patience_ns: as of a queue.

    Attributes:
        first_ns, end_ns: when each request has its first and its last token; -1: not yet.
    """

    def __init__(
        self,
        settings: LaneSettings,
        cost: LaneCost,
        kv: Kv,
        stream: Stream,
        order: InTimeOrder | None = None,
        patience_ns: int | None = None,
    ) -> None:
        assert settings.mix and isinstance(stream.max_output, int)
        self._inputs, self._outputs, self._arrivals_ns, self._cached = (
            np.asarray(of, int).tolist() for of in (stream.inputs, stream.outputs, stream.arrivals_ns, stream.cached)
        )
        self._max_output, self._kv, self._slack = stream.max_output, kv, settings.slack
        self._order, self._patience_ns = order, patience_ns
        self._batches = [_Batch(settings.of_microbatch(i)) for i in range(settings.microbatches)]
        self._clock, self._forecast = Clock(cost), LaneForecast()
        self._under_way: deque[tuple[int, _Step]] = deque()
        self._turn = self._reserved = self._now_ns = 0
        self._head = self._tail = 0
        """Of the requests that have arrived, [0, tail), as many as `head` have entered: the first, without an order."""
        self.first_ns, self.end_ns = ([-1] * len(self._inputs) for _ in range(2))
        self._limits = Limits((), 0, len(self._inputs))
        self._num_broken: list[int] = []
        self._num_taken_in = 0
        self._giving_way: Collection[int] = ()
        """Requests that are begun and let others go first."""
        self._oldest: deque[int] = deque()
        """Waiting requests, the first to arrive first; those that have entered are left out when they come up."""
        self._is_waiting = [False] * len(self._inputs)
        self._may_be_overdue = True

    def run(self, limits: Limits | None = None) -> bool:
        """Run until all requests that count have ended; False: too many of them broke their limits."""
        self._limits = limits = limits or self._limits
        self._num_left, self._num_broken = limits.last - limits.first, [0] * len(limits.goals)
        arrivals, count = self._arrivals_ns, len(self._inputs)
        while self._num_left and not self._is_given_up:
            while self._tail < count and arrivals[self._tail] <= self._now_ns:
                self._tail += 1
            if self._decode_on():
                continue
            while (step := self._next_step()) is not None:
                step.batch.steps += 1
                self._under_way.append((self._clock.end_ns(self._now_ns, self._counts(step)), step))
            waits = self._batches[self._turn].steps > 0  # whatever arrives
            if self._under_way and (self._tail == count or self._under_way[0][0] <= arrivals[self._tail] or waits):
                self._now_ns, step = self._under_way.popleft()
                self._settle(step)
            elif self._tail < count:
                self._now_ns = arrivals[self._tail]
            else:
                break
        return not self._is_given_up

    @property
    def _is_given_up(self) -> bool:
        return any(n > of.most_broken for n, of in zip(self._num_broken, self._limits.goals, strict=True))

    # Steps ---------------------------------------------------------------------------------------------------

    def _decode_on(self) -> bool:
        """Run the steps at once that do nothing but decode; False: the next step may do something else."""
        batch, cost = self._batches[0], self._clock.cost
        if not batch.decoding or self._under_way:
            return False
        self._note_joined(batch)
        alone = len(self._batches) == 1 and cost.num_stages == 1 and not cost.has_encoder
        if not alone or batch.encoding or self._head < self._tail:
            return False
        next_ns = self._arrivals_ns[self._tail] if self._tail < len(self._arrivals_ns) else inf
        now_ns = self._now_ns
        while now_ns < next_ns:
            now_ns += max(1, round(cost.decode_steps(batch.decoding, batch.context) * 1e9))
            batch.iteration += 1
            batch.context += batch.decoding
            if batch.iteration in batch.ends:
                break
        self._now_ns = self._clock.free_ns[0] = now_ns
        self._finish(batch)
        return True

    def _next_step(self) -> _Step | None:
        count = len(self._batches)
        for number in [(self._turn + i) % count for i in range(count)]:
            batch = self._batches[number]
            if batch.steps:
                return None
            step = self._step_of(batch)
            if step is not None:
                self._turn = (number + 1) % count
                return step
        return None

    def _step_of(self, batch: _Batch) -> _Step | None:
        if self._order is not None:
            self._plan(self._order, batch)
        if not batch.num_running and not self._can_admit():
            return None
        encode = self._fill(batch)
        decodes = bool(batch.decoding and not (encode and batch.settings.prompts_first))
        if not encode and not decodes:
            return None
        if decodes:
            self._note_joined(batch)
        return _Step(encode, decodes, batch)

    def _counts(self, step: _Step) -> StepCounts:
        batch, inputs = step.batch, self._inputs
        ended = [request for request, start, length in step.encode if start + length == inputs[request]]
        decodes, context, prompts = (batch.decoding, batch.context, batch.inputs) if step.decodes else (0, 0, 0)
        sampled, mean_input = decodes + len(ended), 0.0
        if self._clock.cost.has_encoder:  # its decoder attends to outputs alone
            context += decodes - prompts
            mean_input = (prompts + sum(inputs[request] for request in ended)) / max(sampled, 1)
        pieces = [(start, start + length, int(start + length == inputs[r])) for r, start, length in step.encode]
        prompt_tokens = sum(length for _, _, length in step.encode)
        return StepCounts(pieces, decodes, context, sampled, prompt_tokens + decodes, mean_input)

    def _settle(self, step: _Step) -> None:
        batch = step.batch
        batch.steps -= 1
        if step.decodes:
            batch.iteration += 1
            batch.context += batch.decoding
            self._finish(batch)
        for request, start, length in step.encode:
            if start + length < self._inputs[request]:
                batch.encoding[request] = start + length
                continue
            del batch.encoding[request]
            self.first_ns[request] = self._now_ns
            batch.decoding += 1
            batch.context += self._inputs[request] + 1
            batch.inputs += self._inputs[request]
            batch.ends.setdefault(batch.iteration + self._outputs[request] - 1, []).append(request)
            batch.joined.append((request, batch.iteration))
        self._finish(batch)  # those of one token have ended with their prompt

    def _finish(self, batch: _Batch) -> None:
        """Take those out that have their last token now."""
        limits, now_ns = self._limits, self._now_ns
        for request in batch.ends.pop(batch.iteration, ()):
            length, output = self._inputs[request], self._outputs[request]
            batch.decoding -= 1
            batch.context -= length + output
            batch.inputs -= length
            self._reserved -= self._kv.of(length + self._max_output)
            self.end_ns[request] = now_ns
            if not limits.first <= request < limits.last:
                continue
            self._num_left -= 1
            arrival_ns, first_ns = self._arrivals_ns[request], self.first_ns[request]
            for i, goal in enumerate(limits.goals):
                gaps_ns = goal.gap_ns * (output - 1)
                is_late = now_ns - arrival_ns > goal.whole_ns or first_ns - arrival_ns > goal.first_ns
                self._num_broken[i] += is_late or now_ns - first_ns > gaps_ns

    # Prompts of a step ---------------------------------------------------------------------------------------

    def _fill(self, batch: _Batch) -> Pieces:
        settings = batch.settings
        slack = settings.slack
        if slack is None:
            budget, decodes = settings.token_budget, 0 if settings.prompts_first else batch.decoding
            return self._fill_room(TokenRoom(None if budget is None else budget - decodes), batch)
        even = slack.even_tokens(self._to_encode())
        room = TimeRoom(slack, self._step_s(slack, batch), batch.decoding, batch.context, even)
        pieces = self._fill_room(room, batch)
        if pieces or batch.decoding:
            self._forecast.begin(self._now_ns, room.seconds, slack.num_stages)
        return pieces

    def _to_encode(self) -> Iterator[int]:
        """Yield the tokens that are left of each prompt that is begun or waits."""
        for batch in self._batches:
            yield from (self._inputs[request] - encoded for request, encoded in batch.encoding.items())
        waiting = range(self._head, self._tail) if self._order is None else self._order.numbers
        yield from (self._inputs[request] for request in waiting)

    def _fill_room(self, room: Room, batch: _Batch) -> Pieces:
        pieces: Pieces = []
        late = [request for request in batch.encoding if request in self._giving_way]
        begun = dict(batch.encoding)  # without those that enter now
        self._go_on(room, {request: begun[request] for request in begun if request not in late}, pieces)
        self._take_more(room, batch, pieces, in_time=bool(late))
        if late:
            self._go_on(room, {request: begun[request] for request in late}, pieces)
            self._take_more(room, batch, pieces)
        return pieces

    def _go_on(self, room: Room, begun: dict[int, int], pieces: Pieces) -> None:
        for request, encoded in begun.items():
            if not room.is_open:
                return
            pieces.append((request, encoded, room.take(encoded, self._inputs[request])))

    def _take_more(self, room: Room, batch: _Batch, pieces: Pieces, *, in_time: bool = False) -> None:
        most, budget, order = batch.settings.max_batch, batch.settings.token_budget, self._order
        while room.is_open and self._head < self._tail and (most is None or batch.num_running < most):
            first, is_overdue = self._first()
            if in_time and not is_overdue and order is not None and order.gives_way(self._request(first)):
                return
            length = self._inputs[first]
            if batch.settings.whole_prompts and not room.holds(length if budget is None else min(length, budget)):
                return
            if not self._can_admit():
                return
            self._admit(first, is_overdue=is_overdue)
            start = batch.encoding[first] = self._cached[first] if self._cached else 0
            pieces.append((first, start, room.take(start, length)))

    # Slack ---------------------------------------------------------------------------------------------------

    def _note_joined(self, batch: _Batch) -> None:
        """The step that begins now is the first to decode these: they have their first token."""
        if self._slack is not None:
            for request, iteration in batch.joined:
                heappush(batch.due, (self._now_ns - self._slack.tpot_ns * iteration, request))
        batch.joined.clear()

    def _first_due_ns(self, slack: Slack, batch: _Batch) -> float:
        """When the first request of a micro-batch is due its next token, after those under way; infinite where none
        decodes."""
        due = batch.due
        while due and self.end_ns[due[0][1]] >= 0:
            heappop(due)
        iteration = batch.iteration + batch.steps  # their tokens are on the way
        firsts = [due[0][0] + slack.tpot_ns * iteration] if due else []
        joined = [of for request, of in batch.joined if self.end_ns[request] < 0]
        firsts += [self._now_ns + slack.tpot_ns * (iteration - of) for of in joined]
        return slack.due_ns(min(firsts), 1) if firsts else inf

    def _step_s(self, slack: Slack, batch: _Batch) -> float:
        """Return what a step of a micro-batch may take."""
        free_ns, number = self._forecast.free_ns(self._now_ns, len(self._under_way)), self._batches.index(batch)
        in_turn = self._batches[number:] + self._batches[:number]
        own, *others = (self._first_due_ns(slack, each) - free_ns for each in in_turn)
        return slack.step_s(own, others)

    # Order of entering ---------------------------------------------------------------------------------------

    def _plan(self, order: InTimeOrder, batch: _Batch) -> None:
        """Let those wait that have arrived, set the order's clock, and decide which prompts give way."""
        for i in range(self._num_taken_in, self._tail):
            self._is_waiting[i] = True
            self._oldest.append(i)
            order.add(self._request(i), i)
        self._num_taken_in = self._tail
        order.at(self._now_ns)
        first_tokens, settings = order.first_tokens, batch.settings
        encoding = (item for each in self._batches for item in each.encoding.items())
        begun = [first_tokens.job(self._request(request, encoded)) for request, encoded in encoding]
        pace = first_tokens.pace(batch.decoding, batch.context, settings.token_budget, settings.slack)
        self._giving_way = order.plan(begun, pace)

    def _request(self, request: int, encoded: int = 0) -> Request:
        return Request(request, self._inputs[request], self._max_output, self._arrivals_ns[request], encoded=encoded)

    def _first(self) -> tuple[int, bool]:
        """Return the request that enters next, of those that wait, and whether it does because it is overdue."""
        if self._order is None:
            return self._head, False
        oldest = self._oldest
        while not self._is_waiting[oldest[0]]:
            oldest.popleft()
        due_ns = None if self._patience_ns is None else self._now_ns - self._patience_ns
        if self._may_be_overdue and due_ns is not None and self._arrivals_ns[oldest[0]] < due_ns:
            return oldest[0], True
        return self._order.first().id, False

    def _can_admit(self) -> bool:
        if self._head == self._tail:
            return False
        first, _ = self._first()
        return self._reserved + self._kv.of(self._inputs[first] + self._max_output) <= self._kv.blocks

    def _admit(self, request: int, *, is_overdue: bool) -> None:
        if self._order is not None:
            self._may_be_overdue = not is_overdue
            self._order.drop(self._request(request))
            self._is_waiting[request] = False
        self._head += 1
        self._reserved += self._kv.of(self._inputs[request] + self._max_output)
