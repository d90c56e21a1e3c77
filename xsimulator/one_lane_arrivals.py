"""Requests that arrive one by one under rra, orca, chunked and static, by counts."""

from __future__ import annotations

from collections import deque

import numpy as np

from xgpt.policies.rule import LaneSettings, PromptBudget
from xsimulator.arrivals import Batch, Kv, Run, Step, Stream
from xsimulator.clock import Clock
from xsimulator.step_cost import LaneCost


class OneLaneRun(Run):
    """rra, orca, chunked and static, as `xgpt.policies.OneLane`."""

    def __init__(self, settings: LaneSettings, cost: LaneCost, kv: Kv, stream: Stream) -> None:
        super().__init__(stream, kv)
        self._settings = settings
        self._of_batch = [settings.of_microbatch(i) for i in range(settings.microbatches)]
        self._batches = [Batch() for _ in self._of_batch]
        for of, batch in zip(self._of_batch, self._batches, strict=True):
            batch.since_encode = of.encode_every
            batch.budget = PromptBudget(of.encode_tokens or 0.0, of.decode_batch)
        self._clock = Clock(cost)
        self._turn = 0
        self._under_way: deque[tuple[int, Step]] = deque()
        self._assumed: tuple[Step, list[int]] | None = None
        """Running ahead: the step under way whose tokens are taken for made, and the requests that end in it."""

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
        return not self._settings.refill_when_empty and self._batches[self._turn].steps > self._settings.ahead

    def _next_end_ns(self) -> int | None:
        return self._under_way[0][0] if self._under_way else None

    def _issue(self) -> None:
        has_encoder = self._clock.cost.has_encoder
        while (step := self._next_step()) is not None:
            step.batch.steps += 1
            end_ns = self._clock.end_ns(self.now_ns, self.counts(step, has_encoder=has_encoder))
            self._under_way.append((end_ns, step))

    def _next_step(self) -> Step | None:
        settings, batches = self._settings, self._batches
        refill = settings.refill_when_empty
        if refill and not self.num_inside:
            self._refill()
        count = len(batches)
        for i in range(count):
            number = (self._turn + i) % count
            batch = batches[number]
            if batch.steps > settings.ahead and not (refill and self._has_more_to_encode(batch)):
                return None
            if batch.steps and settings.ahead:
                self._assume(self._under_way[-1][1])
            step = self._step_of(number, batch)
            if step is not None:
                stays = refill and self._has_more_to_encode(batch)
                self._turn = number if stays else (number + 1) % count
                return step
        return None

    def _step_of(self, number: int, batch: Batch) -> Step | None:
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
        mixes = settings.mix and not (encode and settings.prompts_first)
        decodes = bool(batch.decoding and (mixes or not (encode or batch.encoding)))
        if not encode and not decodes:
            return None
        batch.since_encode = 0 if encode else batch.since_encode + 1
        return Step(encode, decodes, batch)

    def _may_encode(self, number: int) -> bool:
        settings = self._settings
        if len(self._batches) == 1 or settings.mix or settings.refill_when_empty:
            return True
        phase = self._batches[number].phase
        return all(batch.phase > phase or self._is_phase_over(i) for i, batch in enumerate(self._batches))

    def _is_phase_over(self, number: int) -> bool:
        batch = self._batches[number]
        return not batch.num_running or batch.since_encode >= self._of_batch[number].encode_every

    def _fill(self, settings: LaneSettings, batch: Batch) -> list[tuple[int, int, int]]:
        decodes = 0 if settings.prompts_first else batch.decoding
        left = np.inf if settings.token_budget is None else settings.token_budget - decodes
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
            start = batch.encoding[admitted] = self.found(admitted)
            length = int(min(self.inputs[admitted] - start, left))
            chunks.append((admitted, start, length))
            left -= length
        return chunks

    def _phase(self, settings: LaneSettings, batch: Batch) -> list[tuple[int, int, int]]:
        budget = batch.budget
        chunks: list[tuple[int, int, int]] = []
        assert budget is not None
        budget.open(batch.decoding - settings.carried_batch)
        while self.head < self.tail:
            found = self.found(self.head)
            length = self.inputs[self.head] - (found if settings.reuse_is_planned else 0)
            if not (budget.covers(length) or (not chunks and not batch.decoding)):
                batch.since_encode = 0
                return chunks
            admitted = self.admit()
            if admitted is None:
                break
            batch.encoding[admitted] = found
            chunks.append((admitted, found, self.inputs[admitted] - found))
            budget.spend(length)
        budget.close()
        return chunks

    def _refill(self) -> None:
        most = np.inf if self._settings.max_batch is None else self._settings.max_batch
        entered: list[int] = []
        while len(entered) < most and (request := self.admit()) is not None:
            entered.append(request)
        for i, request in enumerate(entered):
            self._batches[i * len(self._batches) // len(entered)].encoding[request] = self.found(request)
        self._turn = 0

    def _part(self, settings: LaneSettings, batch: Batch) -> list[tuple[int, int, int]]:
        size = -(-batch.num_running // settings.encode_parts)
        part = [request for request in batch.encoding if request not in batch.issued][:size]
        batch.issued.update(part)
        return [(request, self.found(request), self.inputs[request] - self.found(request)) for request in part]

    def _has_more_to_encode(self, batch: Batch) -> bool:
        return len(batch.encoding) > len(batch.issued)

    def _settle_next(self) -> None:
        _, step = self._under_way.popleft()
        encode, decodes, batch, _, _ = step
        batch.steps -= 1
        if self._settings.ahead:
            self._settle_ahead(step)
            return
        finished = self.advance(batch) if decodes else []
        self._join(encode, batch, self.now_ns)
        if encode:
            finished += self._finish(batch)  # those of one token have ended with their prompt
        self._release(finished, batch)

    def _join(self, encode: list[tuple[int, int, int]], batch: Batch, now_ns: int) -> None:
        """Account for the pieces of prompts that a step has encoded."""
        for request, start, length in encode:
            if start + length < self.inputs[request]:
                batch.encoding[request] = start + length
                continue
            del batch.encoding[request]
            batch.issued.discard(request)
            self.first_ns[request] = now_ns
            self.join(request, batch, 1)

    def _assume(self, step: Step) -> None:
        """Take a step's tokens for made: requests go on, but for those that have reached their maximum with it."""
        if self._assumed is not None:
            return
        encode, decodes, batch, _, _ = step
        if decodes:
            batch.iteration += 1
            batch.context += batch.decoding
        self._join(encode, batch, -1)
        ended = batch.ends.pop(batch.iteration, [])
        for request in ended:
            if self.outputs[request] == self.max_output:
                self._drop(request, batch)
                batch.ending += 1
        self._assumed = step, ended

    def _settle_ahead(self, step: Step) -> None:
        if self._assumed is None:
            self._assume(step)
        assert self._assumed is not None
        (_, ended), batch, self._assumed = self._assumed, step.batch, None
        for request, start, length in step.encode:
            if start + length == self.inputs[request]:
                self.first_ns[request] = self.now_ns
        for request in ended:
            if self.outputs[request] == self.max_output:
                batch.ending -= 1
            else:
                self._drop(request, batch)
            self.ended(request)
            self.leave(request)

    def _drop(self, request: int, batch: Batch) -> None:
        """A request decodes no further."""
        batch.decoding -= 1
        batch.context -= self.inputs[request] + self.outputs[request]
        batch.inputs -= self.inputs[request]

    def _release(self, finished: list[int], batch: Batch) -> None:
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
        """Remove the requests that were held."""
        for batch in self._batches:
            batch.held = batch.context = batch.inputs = 0
        self._reserved = self.num_inside = 0
