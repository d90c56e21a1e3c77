"""Arrivals by counts, step by step in Python: micro-batches and the loop, for `xsimulator.counts.stepped_lane`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from xgpt.policies.rule import PromptBudget
from xsimulator.costs.step_counts import StepCounts
from xsimulator.counts.arrivals import Kv, Limits, Stream


class Batch:
    """A micro-batch by its counts.

    Attributes:
        encoding: requests whose prompt is not encoded yet -> tokens of it that are.
        decoding: requests in decode.
        context, inputs: tokens of prompts and outputs, and of prompts alone, of those in decode.
        iteration: decode steps so far.
        ends: requests that end in each iteration to come.
        steps: under way.
    """

    __slots__ = (
        "budget",
        "context",
        "decoding",
        "encoding",
        "ends",
        "inputs",
        "iteration",
        "phase",
        "since_encode",
        "steps",
    )

    def __init__(self) -> None:
        self.encoding: dict[int, int] = {}
        self.decoding = self.context = self.inputs = self.iteration = self.steps = self.phase = 0
        self.since_encode = 0
        self.ends: dict[int, list[int]] = {}
        self.budget: PromptBudget | None = None

    @property
    def num_running(self) -> int:
        return len(self.encoding) + self.decoding


class Step(NamedTuple):
    encode: list[tuple[int, int, int]]
    """(request, start, length)"""
    decodes: bool
    batch: Batch


class Run(ABC):
    """One run of a schedule over a stream.

    Attributes:
        first_ns, end_ns: when each request has its first and its last token; -1: not yet.
    """

    def __init__(self, stream: Stream, kv: Kv) -> None:
        self.inputs, self.outputs, self._arrivals_ns, self._cached = (
            np.asarray(of, int).tolist() for of in (stream.inputs, stream.outputs, stream.arrivals_ns, stream.cached)
        )
        assert isinstance(stream.max_output, int)
        self.max_output = stream.max_output
        self._kv = kv
        self.head = self.tail = 0
        """Requests [head, tail) wait."""
        self.num_inside = self._reserved = 0
        self.now_ns = 0
        self.first_ns = [-1] * len(self.inputs)
        self.end_ns = [-1] * len(self.inputs)
        self._limits: Limits | None = None
        self.is_given_up = False
        """Whether too many requests have broken their bounds."""
        self._num_broken: list[int] = []
        self._num_left = len(self.inputs)

    def run(self, limits: Limits | None = None) -> bool:
        """Run until all requests that count have ended; False: too many of them broke their limits."""
        self._limits = limits
        if limits is not None:
            self._num_left = limits.last - limits.first
            self._num_broken = [0] * len(limits.goals)
        arrivals, count = self._arrivals_ns, len(self.inputs)
        while self._num_left and not self.is_given_up:
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
        return not self.is_given_up

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

    def found(self, request: int) -> int:
        """Return the tokens of a prompt that need not be encoded."""
        return self._cached[request] if self._cached else 0

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
            whole, first = now - self._arrivals_ns[request], self.first_ns[request]
            waited, gaps = first - self._arrivals_ns[request], self.outputs[request] - 1
            for i, goal in enumerate(limits.goals):
                if whole > goal.whole_ns or waited > goal.first_ns or now - first > goal.gap_ns * gaps:
                    self._num_broken[i] += 1
                    self.is_given_up |= self._num_broken[i] > goal.most_broken

    def advance(self, batch: Batch) -> list[int]:
        """Account for a decode step of a micro-batch; the requests that ended in it."""
        batch.iteration += 1
        batch.context += batch.decoding
        return self._finish(batch)

    def _finish(self, batch: Batch) -> list[int]:
        """Take those out that have their last token now."""
        finished = batch.ends.pop(batch.iteration, [])
        for request in finished:
            batch.decoding -= 1
            batch.context -= self.inputs[request] + self.outputs[request]
            batch.inputs -= self.inputs[request]
            self.ended(request)
        return finished

    def join(self, request: int, batch: Batch, generated: int) -> None:
        """A request begins to decode; some of its tokens are more than it has already."""
        batch.decoding += 1
        batch.context += self.inputs[request] + generated
        batch.inputs += self.inputs[request]
        batch.ends.setdefault(batch.iteration + self.outputs[request] - generated, []).append(request)

    def counts(self, step: Step, *, has_encoder: bool) -> StepCounts:
        batch, inputs = step.batch, self.inputs
        ended = [request for request, start, length in step.encode if start + length == inputs[request]]
        decodes = batch.decoding if step.decodes else 0
        context = batch.context if step.decodes else 0
        mean_input = 0.0
        if has_encoder:
            context += decodes - batch.inputs if step.decodes else 0
            passing = decodes + len(ended)
            total = (batch.inputs if step.decodes else 0) + sum(inputs[request] for request in ended)
            mean_input = total / max(passing, 1)
        sampled = decodes + len(ended)
        pieces = [(start, start + length, int(start + length == inputs[r])) for r, start, length in step.encode]
        prompt_tokens = sum(length for _, _, length in step.encode)
        return StepCounts(pieces, decodes, context, sampled, prompt_tokens + decodes, mean_input)
