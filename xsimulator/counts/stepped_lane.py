"""One lane's arrivals by counts, step by step in Python, for rules that go by the clock.

`one_lane_arrivals` has the same schedule compiled, for all rules that do not: tests/contract/test_counts.py.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from xgpt.policies.rule import LaneSettings, PromptBudget
from xsimulator.clock import Clock
from xsimulator.costs.step_cost import LaneCost
from xsimulator.counts.arrivals import Kv, Stream
from xsimulator.counts.stepped_arrivals import Batch, Run, Step


class SteppedRun(Run):
    """rra, orca and chunked, as `xgpt.policies.OneLane`, one step at a time."""

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

    def _decode_on(self) -> bool:
        batch, settings, cost = self._batches[0], self._of_batch[0], self._clock.cost
        if not batch.decoding or batch.encoding or self._under_way or len(self._batches) > 1:
            return False
        if cost.has_encoder or cost.num_stages > 1:
            return False
        most = settings.encode_every - batch.since_encode
        if settings.mix:
            if self.head < self.tail:
                return False
            most = len(self.inputs) * self.max_output
        if most <= 0:
            return False
        arrivals, tail, decode_s, ends = self._arrivals_ns, self.tail, cost.decode_steps, batch.ends
        next_ns = arrivals[tail] if settings.mix and tail < len(arrivals) else np.inf
        now, start = self.now_ns, most
        while most > 0 and now < next_ns:
            running = batch.decoding
            now += max(1, round(decode_s(running, batch.context) * 1e9))
            batch.iteration += 1
            batch.context += running
            most -= 1
            if batch.iteration in ends:
                break
        batch.since_encode += start - most
        self.now_ns = self._clock.free_ns[0] = now
        if batch.iteration in ends:
            self._release(self._finish(batch))
        return True

    def _waits_for_an_end(self) -> bool:
        return self._batches[self._turn].steps > 0

    def _next_end_ns(self) -> int | None:
        return self._under_way[0][0] if self._under_way else None

    def _issue(self) -> None:
        has_encoder = self._clock.cost.has_encoder
        while (step := self._next_step()) is not None:
            step.batch.steps += 1
            end_ns = self._clock.end_ns(self.now_ns, self.counts(step, has_encoder=has_encoder))
            self._under_way.append((end_ns, step))

    def _next_step(self) -> Step | None:
        count = len(self._batches)
        for i in range(count):
            number = (self._turn + i) % count
            batch = self._batches[number]
            if batch.steps:
                return None
            step = self._step_of(number, batch)
            if step is not None:
                self._turn = (number + 1) % count
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
        if len(self._batches) == 1 or settings.mix:
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
            if settings.whole_prompts and left < min(self.inputs[self.head], settings.token_budget or np.inf):
                break
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

    def _settle_next(self) -> None:
        _, step = self._under_way.popleft()
        encode, decodes, batch = step
        batch.steps -= 1
        finished = self.advance(batch) if decodes else []
        self._join(encode, batch, self.now_ns)
        if encode:
            finished += self._finish(batch)  # those of one token have ended with their prompt
        self._release(finished)

    def _join(self, encode: list[tuple[int, int, int]], batch: Batch, now_ns: int) -> None:
        """Account for the pieces of prompts that a step has encoded."""
        for request, start, length in encode:
            if start + length < self.inputs[request]:
                batch.encoding[request] = start + length
                continue
            del batch.encoding[request]
            self.first_ns[request] = now_ns
            self.join(request, batch, 1)

    def _release(self, finished: list[int]) -> None:
        for request in finished:
            self.leave(request)
