"""Requests that arrive one by one under waa, by counts."""

from __future__ import annotations

import heapq
from collections import deque
from copy import copy

import numpy as np

from xgpt.policies.rule import PromptBudget
from xgpt.policies.waa import TwoLaneSettings
from xsimulator.arrivals import Batch, Kv, Run, Step, Stream
from xsimulator.clock import Clock
from xsimulator.step_cost import LaneCost
from xsimulator.transfer import TransferCost


class TwoLaneRun(Run):
    """waa, as `xgpt.policies.waa.TwoLane`."""

    def __init__(self, settings: TwoLaneSettings, encode: LaneCost, decode: LaneCost, kv: Kv, stream: Stream) -> None:
        super().__init__(stream, kv)
        self._settings = settings
        self._clocks = {"encode": Clock(encode), "decode": Clock(decode)}
        self._transfer = TransferCost(encode, decode)
        self._encode = [Batch() for _ in range(settings.encode_stages)]
        self._decode = [Batch() for _ in range(settings.decode_microbatches)]
        self._moving: list[int] = []
        self._is_moving = False
        self._arrived: deque[int] = deque()
        self._encode_turn = self._decode_turn = self._encode_blocks = 0
        self._budget = PromptBudget(settings.encode_tokens)
        self._emits = not settings.encoder_only
        self._under_way: list[tuple[int, int, Step]] = []
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

    def _begin(self, step: Step) -> None:
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

    def _next_decode(self) -> Step | None:
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
            return Step([], True, batch, "decode", tuple(joined))
        return None

    def _num_decoding(self) -> int:
        return len(self._arrived) + sum(batch.decoding for batch in self._decode)

    def _next_transfer(self) -> Step | None:
        if self._is_moving or not self._moving:
            return None
        self._is_moving = True
        return Step([], False, self._encode[0], "transfer", tuple(self._moving))

    def _next_encode(self) -> Step | None:
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
        budget.open()
        entered: list[int] = []
        while len(entered) < due and (request := self.admit()) is not None:
            budget.spend(self._length(request))
            self._encode_blocks += kv.of(self.inputs[request])
            entered.append(request)
        if self.head == self.tail or budget.covers(self._length(self.head)):
            budget.close()
        self._encode_turn = (self._encode_turn + 1) % len(self._encode)
        pieces = [(request, self.found(request), self.inputs[request] - self.found(request)) for request in entered]
        return Step(pieces, False, batch, "encode")

    def _length(self, request: int) -> int:
        """Return the tokens of a prompt that count towards an encode batch."""
        return self.inputs[request] - (self.found(request) if self._settings.reuse_is_planned else 0)

    def _due(self) -> int:
        settings, budget = self._settings, copy(self._budget)
        budget.open()
        count = blocks = 0
        for request in range(self.head, min(self.tail, self.head + settings.max_decode_batch + 1)):
            blocks += self._kv.of(self.inputs[request])
            fits = count < settings.max_decode_batch and blocks <= settings.encode_blocks
            if count and not (fits and budget.covers(self._length(request))):
                break
            budget.spend(self._length(request))
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
