"""Requests that arrive one by one, simulated by counts: the steps of `xsimulator.events`, at a fraction of their time.

All requests that decode in a micro-batch advance together, so a step needs to know how many they are and what they
attend to in all, and each of them the iteration in which it ends. Requests enter in the order of their arrival, with
their maximum set aside ("reserve"); other promises and orders are simulated request by request. Both give the same
times: tests/unit/xsimulator/test_arrivals.py.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from copy import copy
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xgpt.policies.rule import LaneSettings, PromptBudget
from xgpt.policies.waa import TwoLaneSettings
from xsimulator.step_cost import LaneCost, StepCounts
from xsimulator.transfer import Transfer

Array = npt.NDArray[np.float64]


class Stream(NamedTuple):
    """Requests in the order of their arrival.

    Attributes:
        inputs, outputs: tokens.
        max_output: what is set aside for each.
        arrivals_ns: when each arrives.
    """

    inputs: list[int]
    outputs: list[int]
    max_output: int
    arrivals_ns: list[int]


class Limits(NamedTuple):
    """Nanoseconds within which a request keeps its bounds, and how many may break them before a run is given up.

    Attributes:
        whole_ns, first_ns: from arrival to the last token, and to the first.
        gap_ns: mean gap between tokens.
        first, last: the requests that count, [first, last).
        most_broken: more than so many, and the run ends.
    """

    whole_ns: float
    first_ns: float
    gap_ns: float
    first: int
    last: int
    most_broken: int


class Kv(NamedTuple):
    """K/V memory of a lane: blocks of so many tokens."""

    blocks: int
    block_size: int

    def of(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


class _Batch:
    """A micro-batch by its counts.

    Attributes:
        encoding: requests whose prompt is not encoded yet -> tokens of it that are.
        decoding: requests in decode.
        held: requests that have ended but decode on (static).
        context, inputs: tokens of prompts and outputs, and of prompts alone, of those in decode and held.
        iteration: decode steps so far.
        ends: requests that end in each iteration to come.
        steps: under way.
        issued: prompts in a step under way (static's parts).
    """

    __slots__ = (
        "budget",
        "context",
        "decoding",
        "encoding",
        "ends",
        "held",
        "inputs",
        "issued",
        "iteration",
        "phase",
        "since_encode",
        "steps",
    )

    def __init__(self) -> None:
        self.encoding: dict[int, int] = {}
        self.issued: set[int] = set()
        self.decoding = self.held = self.context = self.inputs = self.iteration = self.steps = self.phase = 0
        self.since_encode = 0
        self.ends: dict[int, list[int]] = {}
        self.budget: PromptBudget | None = None

    @property
    def num_running(self) -> int:
        return len(self.encoding) + self.decoding + self.held


class _Step(NamedTuple):
    encode: list[tuple[int, int, int]]
    """(request, start, length)"""
    decodes: bool
    batch: _Batch
    lane: str = "both"
    transfer: tuple[int, ...] = ()


class _Clock:
    """When the steps of a lane end, as `xsimulator.clock.LaneClock`."""

    def __init__(self, cost: LaneCost) -> None:
        self.cost = cost
        self.free_ns = [0] * cost.num_stages

    def end_ns(self, issue_ns: int, counts: StepCounts) -> int:
        cost, free, now = self.cost, self.free_ns, issue_ns
        costs = cost.step_ns(counts)
        if len(free) == 1:
            now = free[0] = max(now, free[0]) + costs[0]
            return now
        for stage, hop in enumerate(cost.hops_ns(counts.num_tokens)):
            now += hop
            if now < free[stage]:
                now = free[stage]
            now += costs[stage]
            free[stage] = now
        return now

    def occupy(self, issue_ns: int, seconds: float) -> None:
        self.free_ns = [max(free_ns, issue_ns) + round(seconds * 1e9) for free_ns in self.free_ns]


class Run(ABC):
    """One run of a schedule over a stream.

    Attributes:
        first_ns, end_ns: when each request has its first and its last token; -1: not yet.
    """

    def __init__(self, stream: Stream, kv: Kv) -> None:
        self.inputs, self.outputs, self.max_output, self._arrivals_ns = stream
        self._kv = kv
        self.head = self.tail = 0
        """Requests [head, tail) wait."""
        self.num_inside = self._reserved = 0
        self.now_ns = 0
        self.first_ns = [-1] * len(self.inputs)
        self.end_ns = [-1] * len(self.inputs)
        self._limits: Limits | None = None
        self.num_broken = 0
        self._num_left = len(self.inputs)

    def run(self, limits: Limits | None = None) -> bool:
        """Run until all requests that count have ended; False: too many of them broke their limits."""
        self._limits = limits
        if limits is not None:
            self._num_left = limits.last - limits.first
        arrivals, count = self._arrivals_ns, len(self.inputs)
        most = np.inf if limits is None else limits.most_broken
        while self._num_left and self.num_broken <= most:
            while self.tail < count and arrivals[self.tail] <= self.now_ns:
                self.tail += 1
            if self._decode_on():
                continue
            self._issue()
            next_ns = self._next_end_ns()
            if next_ns is not None and (
                self.tail == count or next_ns <= arrivals[self.tail] or self._waits_for_an_end()
            ):
                self.now_ns = next_ns
                self._settle_next()
            elif self.tail < count:
                self.now_ns = arrivals[self.tail]
            else:
                break
        return self.num_broken <= most

    def _decode_on(self) -> bool:
        """Run the steps at once that do nothing but decode; False: the next step may do something else."""
        return False

    def _waits_for_an_end(self) -> bool:
        """Whether nothing can be scheduled before a step has ended, whatever arrives."""
        return False

    @abstractmethod
    def _issue(self) -> None:
        """Send every step on its way that can be."""

    @abstractmethod
    def _next_end_ns(self) -> int | None:
        """When the next step ends; None: none is under way."""

    @abstractmethod
    def _settle_next(self) -> None:
        """Settle that step."""

    def can_admit(self) -> bool:
        if self.head == self.tail:
            return False
        return self._reserved + self._kv.of(self.inputs[self.head] + self.max_output) <= self._kv.blocks

    def admit(self) -> int | None:
        if not self.can_admit():
            return None
        request = self.head
        self.head += 1
        self._reserved += self._kv.of(self.inputs[request] + self.max_output)
        self.num_inside += 1
        return request

    def leave(self, request: int) -> None:
        self._reserved -= self._kv.of(self.inputs[request] + self.max_output)
        self.num_inside -= 1

    def ended(self, request: int) -> None:
        """The request has its last token now."""
        now = self.end_ns[request] = self.now_ns
        limits = self._limits
        if limits is None:
            self._num_left -= 1
        elif limits.first <= request < limits.last:
            self._num_left -= 1
            arrived, first = self._arrivals_ns[request], self.first_ns[request]
            self.num_broken += (
                now - arrived > limits.whole_ns
                or first - arrived > limits.first_ns
                or now - first > limits.gap_ns * (self.outputs[request] - 1)
            )

    def advance(self, batch: _Batch) -> list[int]:
        """Account for a decode step of a micro-batch; the requests that ended in it."""
        batch.iteration += 1
        batch.context += batch.decoding + batch.held
        return self._finish(batch)

    def _finish(self, batch: _Batch) -> list[int]:
        """Take those out that have their last token now."""
        finished = batch.ends.pop(batch.iteration, [])
        for request in finished:
            batch.decoding -= 1
            batch.context -= self.inputs[request] + self.outputs[request]
            batch.inputs -= self.inputs[request]
            self.ended(request)
        return finished

    def join(self, request: int, batch: _Batch, generated: int) -> None:
        """A request begins to decode; some of its tokens are more than it has already."""
        batch.decoding += 1
        batch.context += self.inputs[request] + generated
        batch.inputs += self.inputs[request]
        batch.ends.setdefault(batch.iteration + self.outputs[request] - generated, []).append(request)

    def counts(self, step: _Step, *, has_encoder: bool, joining: int = 0) -> StepCounts:
        batch, inputs = step.batch, self.inputs
        ended = [request for request, start, length in step.encode if start + length == inputs[request]]
        decodes = batch.decoding + batch.held if step.decodes else 0
        context = batch.context if step.decodes else 0
        mean_input = 0.0
        if has_encoder:
            context += decodes - batch.inputs if step.decodes else 0
            passing = decodes + len(ended)
            total = (batch.inputs if step.decodes else 0) + sum(inputs[request] for request in ended)
            mean_input = total / max(passing, 1)
        sampled = decodes if has_encoder and step.lane == "encode" else decodes + len(ended)
        pieces = [(start, start + length, int(start + length == inputs[r])) for r, start, length in step.encode]
        prompt_tokens = sum(length for _, _, length in step.encode)
        return StepCounts(pieces, decodes, context, sampled, prompt_tokens + decodes, mean_input, joining)


class OneLaneRun(Run):
    """rra, orca, chunked and static, as `xgpt.policies.OneLane`."""

    def __init__(self, settings: LaneSettings, cost: LaneCost, kv: Kv, stream: Stream) -> None:
        super().__init__(stream, kv)
        self._settings = settings
        self._of_batch = [settings.of_microbatch(i) for i in range(settings.microbatches)]
        self._batches = [_Batch() for _ in self._of_batch]
        for of, batch in zip(self._of_batch, self._batches, strict=True):
            batch.since_encode = of.encode_every
            batch.budget = PromptBudget(of.encode_tokens or 0.0, of.decode_batch)
        self._clock = _Clock(cost)
        self._turn = 0
        self._under_way: deque[tuple[int, _Step]] = deque()

    def _decode_on(self) -> bool:
        batch, settings, cost = self._batches[0], self._of_batch[0], self._clock.cost
        if not batch.decoding or batch.encoding or self._under_way or len(self._batches) > 1:
            return False
        if cost.has_encoder or cost.num_stages > 1:
            return False
        most = settings.encode_every - batch.since_encode
        if settings.mix or settings.refill_when_empty:
            if settings.mix and self.head < self.tail:
                return False
            most = len(self.inputs) * self.max_output
        if most <= 0:
            return False
        arrivals, tail, decode_s, ends = self._arrivals_ns, self.tail, cost.decode_steps, batch.ends
        next_ns = arrivals[tail] if settings.mix and tail < len(arrivals) else np.inf
        now, start = self.now_ns, most
        while most > 0 and now < next_ns:
            running = batch.decoding + batch.held
            now += max(1, round(decode_s(running, batch.context) * 1e9))
            batch.iteration += 1
            batch.context += running
            most -= 1
            if batch.iteration in ends:
                break
        batch.since_encode += start - most
        self.now_ns = self._clock.free_ns[0] = now
        if batch.iteration in ends:
            self._release(self._finish(batch), batch)
        return True

    def _waits_for_an_end(self) -> bool:
        return not self._settings.refill_when_empty and self._batches[self._turn].steps > 0

    def _next_end_ns(self) -> int | None:
        return self._under_way[0][0] if self._under_way else None

    def _issue(self) -> None:
        has_encoder = self._clock.cost.has_encoder
        while (step := self._next_step()) is not None:
            step.batch.steps += 1
            end_ns = self._clock.end_ns(self.now_ns, self.counts(step, has_encoder=has_encoder))
            self._under_way.append((end_ns, step))

    def _next_step(self) -> _Step | None:
        settings, batches = self._settings, self._batches
        refill = settings.refill_when_empty
        if refill and not self.num_inside:
            self._refill()
        count = len(batches)
        for i in range(count):
            number = (self._turn + i) % count
            batch = batches[number]
            if batch.steps and not (refill and self._has_more_to_encode(batch)):
                return None
            step = self._step_of(number, batch)
            if step is not None:
                stays = refill and self._has_more_to_encode(batch)
                self._turn = number if stays else (number + 1) % count
                return step
        return None

    def _step_of(self, number: int, batch: _Batch) -> _Step | None:
        settings = self._of_batch[number]
        may_encode = self._may_encode(number)
        if not batch.num_running and not (may_encode and self.can_admit()):
            return None
        encode: list[tuple[int, int, int]] = []
        if settings.mix:
            encode = self._fill(settings, batch)
        elif settings.refill_when_empty:
            encode = self._part(settings, batch)
        elif may_encode and self._is_phase_over(number):
            batch.phase += 1
            encode = self._phase(settings, batch)
        decodes = bool(batch.decoding and (settings.mix or not (encode or batch.encoding)))
        if not encode and not decodes:
            return None
        batch.since_encode = 0 if encode else batch.since_encode + 1
        return _Step(encode, decodes, batch)

    def _may_encode(self, number: int) -> bool:
        settings = self._settings
        if len(self._batches) == 1 or settings.mix or settings.refill_when_empty:
            return True
        phase = self._batches[number].phase
        return all(batch.phase > phase or self._is_phase_over(i) for i, batch in enumerate(self._batches))

    def _is_phase_over(self, number: int) -> bool:
        batch = self._batches[number]
        return not batch.num_running or batch.since_encode >= self._of_batch[number].encode_every

    def _fill(self, settings: LaneSettings, batch: _Batch) -> list[tuple[int, int, int]]:
        left = np.inf if settings.token_budget is None else settings.token_budget - batch.decoding
        most = np.inf if settings.max_batch is None else settings.max_batch
        chunks: list[tuple[int, int, int]] = []
        for request, encoded in batch.encoding.items():
            if left <= 0:
                return chunks
            length = int(min(self.inputs[request] - encoded, left))
            chunks.append((request, encoded, length))
            left -= length
        while left > 0 and self.head < self.tail and batch.num_running < most:
            admitted = self.admit()
            if admitted is None:
                break
            batch.encoding[admitted] = 0
            length = int(min(self.inputs[admitted], left))
            chunks.append((admitted, 0, length))
            left -= length
        return chunks

    def _phase(self, settings: LaneSettings, batch: _Batch) -> list[tuple[int, int, int]]:
        budget = batch.budget
        chunks: list[tuple[int, int, int]] = []
        assert budget is not None
        budget.open(batch.decoding - settings.carried_batch)
        while self.head < self.tail:
            length = self.inputs[self.head]
            if not (budget.covers(length) or (not chunks and not batch.decoding)):
                batch.since_encode = 0
                return chunks
            admitted = self.admit()
            if admitted is None:
                break
            batch.encoding[admitted] = 0
            chunks.append((admitted, 0, length))
            budget.spend(length)
        budget.close()
        return chunks

    def _refill(self) -> None:
        most = np.inf if self._settings.max_batch is None else self._settings.max_batch
        entered: list[int] = []
        while len(entered) < most and (request := self.admit()) is not None:
            entered.append(request)
        for i, request in enumerate(entered):
            self._batches[i * len(self._batches) // len(entered)].encoding[request] = 0
        self._turn = 0

    def _part(self, settings: LaneSettings, batch: _Batch) -> list[tuple[int, int, int]]:
        size = -(-batch.num_running // settings.encode_parts)
        part = [request for request in batch.encoding if request not in batch.issued][:size]
        batch.issued.update(part)
        return [(request, 0, self.inputs[request]) for request in part]

    def _has_more_to_encode(self, batch: _Batch) -> bool:
        return len(batch.encoding) > len(batch.issued)

    def _settle_next(self) -> None:
        _, (encode, decodes, batch, _, _) = self._under_way.popleft()
        batch.steps -= 1
        finished = self.advance(batch) if decodes else []
        for request, start, length in encode:
            if start + length < self.inputs[request]:
                batch.encoding[request] = start + length
                continue
            del batch.encoding[request]
            batch.issued.discard(request)
            self.first_ns[request] = self.now_ns
            self.join(request, batch, 1)
        if encode:
            finished += self._finish(batch)  # those of one token have ended with their prompt
        self._release(finished, batch)

    def _release(self, finished: list[int], batch: _Batch) -> None:
        """Free the places of requests that have ended; those of a static batch once all of it has."""
        if not self._settings.refill_when_empty:
            for request in finished:
                self.leave(request)
            return
        for request in finished:
            batch.held += 1
            batch.context += self.inputs[request] + self.outputs[request]
            batch.inputs += self.inputs[request]
        if not any(b.decoding or b.encoding for b in self._batches):
            self._end_batch()

    def _end_batch(self) -> None:
        """Those that were held leave."""
        for batch in self._batches:
            batch.held = batch.context = batch.inputs = 0
        self._reserved = self.num_inside = 0


class TwoLaneRun(Run):
    """waa, as `xgpt.policies.waa.TwoLane`."""

    def __init__(self, settings: TwoLaneSettings, encode: LaneCost, decode: LaneCost, kv: Kv, stream: Stream) -> None:
        super().__init__(stream, kv)
        self._settings = settings
        self._clocks = {"encode": _Clock(encode), "decode": _Clock(decode)}
        self._transfer = Transfer(encode, decode)
        self._encode = [_Batch() for _ in range(settings.encode_stages)]
        self._decode = [_Batch() for _ in range(settings.decode_microbatches)]
        self._moving: list[int] = []
        self._is_moving = False
        self._arrived: deque[int] = deque()
        self._encode_turn = self._decode_turn = self._encode_blocks = 0
        self._budget = PromptBudget(settings.encode_tokens, settings.decode_batch)
        self._emits = not settings.encoder_only
        self._under_way: list[tuple[int, int, _Step]] = []
        self._num_begun = 0

    def _next_end_ns(self) -> int | None:
        return self._under_way[0][0] if self._under_way else None

    def _issue(self) -> None:
        while (step := self._next_decode()) is not None:
            self._begin(step)
        if (step := self._next_transfer()) is not None:
            self._begin(step)
        while (step := self._next_encode()) is not None:
            self._begin(step)

    def _decode_on(self) -> bool:
        batch, clock = self._decode[0], self._clocks["decode"]
        if not batch.decoding or batch.steps or self._arrived or len(self._decode) > 1 or self._transfer.occupies:
            return False
        if clock.cost.has_encoder or clock.cost.num_stages > 1:
            return False
        if (step := self._next_transfer()) is not None:
            self._begin(step)
        while (step := self._next_encode()) is not None:
            self._begin(step)
        # The decode lane goes on by itself until something else ends or arrives.
        next_ns = self._under_way[0][0] if self._under_way else np.inf
        if self.tail < len(self._arrivals_ns):
            next_ns = min(next_ns, self._arrivals_ns[self.tail])
        decode_s, ends, start = clock.cost.decode_steps, batch.ends, self.now_ns
        while batch.decoding:
            then = self.now_ns + max(1, round(decode_s(batch.decoding, batch.context) * 1e9))
            if then >= next_ns:
                break
            self.now_ns = clock.free_ns[0] = then
            batch.iteration += 1
            batch.context += batch.decoding
            if batch.iteration in ends:
                for request in self._finish(batch):
                    self.leave(request)
                break
        return self.now_ns > start

    def _begin(self, step: _Step) -> None:
        if step.lane == "transfer":
            seconds = self._transfer.at(sum(self.inputs[request] for request in step.transfer))
            if self._transfer.occupies:
                for clock in self._clocks.values():
                    clock.occupy(self.now_ns, seconds)
            end_ns = self.now_ns + max(1, round(seconds * 1e9))
        else:
            clock = self._clocks[step.lane]
            joining = 0 if self._emits else sum(self.inputs[request] for request in step.transfer)
            end_ns = clock.end_ns(self.now_ns, self.counts(step, has_encoder=clock.cost.has_encoder, joining=joining))
            step.batch.steps += 1
        heapq.heappush(self._under_way, (end_ns, self._num_begun, step))
        self._num_begun += 1

    def _next_decode(self) -> _Step | None:
        count = len(self._decode)
        for i in range(count):
            number = (self._decode_turn + i) % count
            batch = self._decode[number]
            if batch.steps:
                return None
            if not (batch.decoding or self._arrived):
                continue
            share = -(-self._num_decoding() // count)
            joined = []
            while self._arrived and batch.decoding < share:
                joined.append(self._arrived.popleft())
                self.join(joined[-1], batch, int(self._emits))
            if not batch.decoding:
                continue
            self._decode_turn = (number + 1) % count
            return _Step([], True, batch, "decode", tuple(joined))
        return None

    def _num_decoding(self) -> int:
        return len(self._arrived) + sum(batch.decoding for batch in self._decode)

    def _next_transfer(self) -> _Step | None:
        if self._is_moving or not self._moving:
            return None
        self._is_moving = True
        return _Step([], False, self._encode[0], "transfer", tuple(self._moving))

    def _next_encode(self) -> _Step | None:
        batch = self._encode[self._encode_turn]
        if batch.steps or not self.can_admit():
            return None
        settings, kv, budget = self._settings, self._kv, self._budget
        due = self._due()
        if self.num_inside and self.num_inside + due > settings.max_decode_batch:
            return None
        ahead = sum(kv.of(self.inputs[request]) for request in range(self.head, self.head + due))
        if self._encode_blocks + ahead > settings.encode_blocks:
            return None
        budget.open(self._num_decoding() - settings.decode_batch)
        entered: list[int] = []
        while len(entered) < due and (request := self.admit()) is not None:
            budget.spend(self.inputs[request])
            self._encode_blocks += kv.of(self.inputs[request])
            entered.append(request)
        if self.head == self.tail or budget.covers(self.inputs[self.head]):
            budget.close()
        self._encode_turn = (self._encode_turn + 1) % len(self._encode)
        return _Step([(request, 0, self.inputs[request]) for request in entered], False, batch, "encode")

    def _due(self) -> int:
        settings, budget = self._settings, copy(self._budget)
        budget.open(self._num_decoding() - settings.decode_batch)
        count = blocks = 0
        for request in range(self.head, min(self.tail, self.head + settings.max_decode_batch + 1)):
            blocks += self._kv.of(self.inputs[request])
            fits = count < settings.max_decode_batch and blocks <= settings.encode_blocks
            if count and not (fits and budget.covers(self.inputs[request])):
                break
            budget.spend(self.inputs[request])
            count += 1
        return count

    def _settle_next(self) -> None:
        _, _, step = heapq.heappop(self._under_way)
        match step.lane:
            case "transfer":
                self._is_moving = False
                self._arrived.extend(step.transfer)
                del self._moving[: len(step.transfer)]
                for request in step.transfer:
                    self._encode_blocks -= self._kv.of(self.inputs[request] + self._emits)
            case "encode":
                step.batch.steps -= 1
                self._encoded([request for request, _, _ in step.encode])
            case _:
                step.batch.steps -= 1
                for request in step.transfer:
                    if not self._emits:
                        self.first_ns[request] = self.now_ns
                for request in self.advance(step.batch):
                    self.leave(request)

    def _encoded(self, requests: list[int]) -> None:
        for request in requests:
            self._encode_blocks -= self._kv.of(self.inputs[request])
            if self._emits:
                self.first_ns[request] = self.now_ns
                if self.outputs[request] == 1:
                    self.ended(request)
                    self.leave(request)
                    continue
            self._encode_blocks += self._kv.of(self.inputs[request] + self._emits)
            self._moving.append(request)
