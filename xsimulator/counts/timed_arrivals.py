"""Requests that arrive one by one, by counts, under rules that go by the clock: slack, thresholds, entering in time."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from heapq import heappop, heappush
from math import inf

from xgpt.policies.in_time import InTimeOrder
from xgpt.policies.request import Request
from xgpt.policies.rule import LaneSettings, are_met
from xgpt.policies.slack import LaneForecast, Room, Slack, TimeRoom, TokenRoom
from xsimulator.costs.step_cost import LaneCost
from xsimulator.counts.arrivals import Kv, Stream
from xsimulator.counts.stepped_arrivals import Batch, Step
from xsimulator.counts.stepped_lane import SteppedRun


class TimedRun(SteppedRun):
    """As `SteppedRun`, where times decide.

    All requests of a micro-batch have a token more with each step that decodes, so which of them is due first changes
    only as requests come and go.

    Args:
        order: the empty order of waiting requests, where that is not of arrival (only where steps mix).
        patience_ns: as of a queue.
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
        super().__init__(settings, cost, kv, stream)
        self._order, self._patience_ns = order, patience_ns
        self._num_taken_in = 0
        self._giving_way: Collection[int] = ()
        """Requests that are begun and let others go first."""
        self._oldest: list[int] = []
        """Waiting requests, the first to arrive first; those that have entered are left out when they come up."""
        self._is_waiting = [False] * len(self.inputs)
        self._may_be_overdue = True
        self._forecast = LaneForecast()
        self._joined: dict[Batch, list[tuple[int, int]]] = {batch: [] for batch in self._batches}
        """Requests in decode since the last step, with the iteration in which they joined."""
        self._due: dict[Batch, list[tuple[int, int]]] = {batch: [] for batch in self._batches}
        """When requests are due their next token, less what the iterations so far have added; those that have ended
        are left out when they come up."""

    # Slack ---------------------------------------------------------------------------------------------------

    def join(self, request: int, batch: Batch, generated: int) -> None:
        super().join(request, batch, generated)
        if self._settings.slack is not None:
            self._joined[batch].append((request, batch.iteration))

    def _step_of(self, number: int, batch: Batch) -> Step | None:
        if self._order is not None:
            self._plan(self._of_batch[number], batch)
        step = super()._step_of(number, batch)
        if step is not None and step.decodes and self._settings.slack is not None:
            self._note_joined(batch)
        return step

    def _decode_on(self) -> bool:
        if self._settings.thresholds is not None and self.head < self.tail:
            return False
        batch = self._batches[0]
        if self._settings.slack is not None and batch.decoding and not self._under_way:
            self._note_joined(batch)
        return super()._decode_on()

    def _note_joined(self, batch: Batch) -> None:
        """The step that begins now is the first to decode these: they have their first token."""
        slack = self._settings.slack
        assert slack is not None
        for request, iteration in self._joined[batch]:
            heappush(self._due[batch], (self.now_ns - slack.tpot_ns * iteration, request))
        self._joined[batch].clear()

    def _first_due_ns(self, slack: Slack, batch: Batch) -> float:
        """When the first request of a micro-batch is due its next token, after those under way; infinite where none
        decodes."""
        due = self._due[batch]
        while due and self.end_ns[due[0][1]] >= 0:
            heappop(due)
        iteration = batch.iteration + batch.steps  # their tokens are on the way
        firsts = [due[0][0] + slack.tpot_ns * iteration] if due else []
        joined = [of for request, of in self._joined[batch] if self.end_ns[request] < 0]
        firsts += [self.now_ns + slack.tpot_ns * (iteration - of) for of in joined]
        return slack.due_ns(min(firsts), 1) if firsts else inf

    def _step_s(self, slack: Slack, batch: Batch) -> float:
        """Return what a step of a micro-batch may take."""
        free_ns, number = self._forecast.free_ns(self.now_ns, len(self._under_way)), self._batches.index(batch)
        in_turn = self._batches[number:] + self._batches[:number]
        own, *others = (self._first_due_ns(slack, each) - free_ns for each in in_turn)
        return slack.step_s(own, others)

    def _fill(self, settings: LaneSettings, batch: Batch) -> list[tuple[int, int, int]]:
        if settings.slack is None:
            if self._order is None:
                return super()._fill(settings, batch)
            decodes = 0 if settings.prompts_first else batch.decoding
            budget = settings.token_budget
            return self._fill_room(TokenRoom(None if budget is None else budget - decodes), settings, batch)
        even = settings.slack.even_tokens(self._to_encode())
        room = TimeRoom(settings.slack, self._step_s(settings.slack, batch), batch.decoding, batch.context, even)
        chunks = self._fill_room(room, settings, batch)
        if chunks or batch.decoding:
            self._forecast.begin(self.now_ns, room.seconds, settings.slack.num_stages)
        return chunks

    def _to_encode(self) -> Iterator[int]:
        """Yield the tokens that are left of each prompt that is begun or waits."""
        for batch in self._batches:
            yield from (self.inputs[request] - encoded for request, encoded in batch.encoding.items())
        waiting = range(self.head, self.tail) if self._order is None else self._order.numbers
        yield from (self.inputs[request] for request in waiting)

    def _fill_room(self, room: Room, settings: LaneSettings, batch: Batch) -> list[tuple[int, int, int]]:
        chunks: list[tuple[int, int, int]] = []
        begun, giving_way = list(batch.encoding.items()), self._giving_way
        self._go_on(room, [of for of in begun if of[0] not in giving_way], chunks)
        late = [of for of in begun if of[0] in giving_way]
        self._take_more(room, settings, batch, chunks, in_time=bool(late))
        if late:
            self._go_on(room, late, chunks)
            self._take_more(room, settings, batch, chunks)
        return chunks

    def _go_on(self, room: Room, begun: list[tuple[int, int]], chunks: list[tuple[int, int, int]]) -> None:
        for request, encoded in begun:
            if not room.is_open:
                return
            chunks.append((request, encoded, room.take(encoded, self.inputs[request])))

    def _take_more(
        self,
        room: Room,
        settings: LaneSettings,
        batch: Batch,
        chunks: list[tuple[int, int, int]],
        *,
        in_time: bool = False,
    ) -> None:
        most = settings.max_batch
        while room.is_open and self.head < self.tail and (most is None or batch.num_running < most):
            if in_time and self._head_gives_way():
                return
            if settings.whole_prompts and not self._holds_next(room, settings):
                return
            admitted = self.admit()
            if admitted is None:
                return
            start = batch.encoding[admitted] = self.found(admitted)
            chunks.append((admitted, start, room.take(start, self.inputs[admitted])))

    def _holds_next(self, room: Room, settings: LaneSettings) -> bool:
        length = self.inputs[self.head if self._order is None else self._first()[0]]
        return room.holds(length if settings.token_budget is None else min(length, settings.token_budget))

    # Thresholds ----------------------------------------------------------------------------------------------

    def _is_phase_over(self, number: int) -> bool:
        thresholds, batch = self._settings.thresholds, self._batches[number]
        if not super()._is_phase_over(number) or thresholds is None or not batch.num_running:
            return super()._is_phase_over(number)
        waited_ns = self.now_ns - self._arrivals_ns[self.head] if self.head < self.tail else 0
        return are_met(thresholds, self.tail - self.head, waited_ns)

    # In time -------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Let those wait that have arrived, and set the order's clock."""
        assert self._order is not None
        for i in range(self._num_taken_in, self.tail):
            self._is_waiting[i] = True
            self._oldest.append(i)
            self._order.add(self._request(i), i)
        self._num_taken_in = self.tail
        self._order.at(self.now_ns)

    def _plan(self, settings: LaneSettings, batch: Batch) -> None:
        """Decide which prompts give way."""
        assert self._order is not None
        self._take_in()
        of = self._order.first_tokens
        begun = [
            of.job(self._request(request, encoded))
            for each in self._batches
            for request, encoded in each.encoding.items()
        ]
        pace = of.pace(batch.decoding, batch.context, settings.token_budget, settings.slack)
        self._giving_way = self._order.plan(begun, pace)

    def _request(self, request: int, encoded: int = 0) -> Request:
        return Request(request, self.inputs[request], self.max_output, self._arrivals_ns[request], encoded=encoded)

    def _head_gives_way(self) -> bool:
        assert self._order is not None
        first, is_overdue = self._first()
        return not is_overdue and self._order.gives_way(self._request(first))

    def can_admit(self) -> bool:
        if self._order is None:
            return super().can_admit()
        if self.head == self.tail:
            return False
        first, _ = self._first()
        return self._reserved + self._kv.of(self.inputs[first] + self.max_output) <= self._kv.blocks

    def admit(self) -> int | None:
        if self._order is None:
            return super().admit()
        if not self.can_admit():
            return None
        request, is_overdue = self._first()
        self._may_be_overdue = not is_overdue
        self._order.drop(self._request(request))
        self._is_waiting[request] = False
        self.head += 1
        self._reserved += self._kv.of(self.inputs[request] + self.max_output)
        self.num_inside += 1
        return request

    def _first(self) -> tuple[int, bool]:
        """Return the request that enters next, and whether it does because it is overdue."""
        assert self._order is not None
        oldest = self._oldest
        while not self._is_waiting[oldest[0]]:
            oldest.pop(0)
        due_ns = None if self._patience_ns is None else self.now_ns - self._patience_ns
        if self._may_be_overdue and due_ns is not None and self._arrivals_ns[oldest[0]] < due_ns:
            return oldest[0], True
        return self._order.first().id, False
