"""Closed form of steps that decode everything and encode into free slots: orca (no token budget) and chunked.

The slots of a micro-batch form a closed queueing network: a slot decodes D steps, then its next prompt passes a station
that takes budget - b tokens a step. With x prompts a step, b = x E[D] and load rho = x E[I]/(budget - b),

    max_batch = x (E[D] + W(rho)),   W = 1 / (1 - exp(-1/y)),   y = (E[I] + wait) / (budget - b),

where W rounds a stay of mean y up to whole steps and the wait is Pollaczek-Khinchine's. The left side rises with x, so
it has one root; without a budget it is x = max_batch / (E[D] + 1).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from xsimulator.analytic.performance import Performance, upper_deviate
from xsimulator.analytic.pipeline import Pipeline, Steps, expected_max_deviate
from xsimulator.cost import Array
from xsimulator.lane import LaneCost
from xsimulator.lengths import Lengths

SQRT_2_PI = np.sqrt(2 * np.pi)
ROOT_STEPS = np.linspace(0.0, 1.0, 17)
ROOT_LEVELS = 4
"""The root is looked for on a grid, then on one within its interval, and so on."""


class _Slots(NamedTuple):
    """The steady state of a micro-batch's slots. # [n] each"""

    rate: Array
    """Prompts a step."""
    room: Array
    """Prompt tokens that a step has room for."""
    load: Array
    """Share of that room in use."""
    slots: Array
    """Slots that this takes."""


class MixedSteps:
    """Predicts orca and chunked for one lane of stages and one workload.

    Args:
        self_context: tokens that self-attention meets before the first output token.
        quantile_decodes: decode iterations of a request whose output has the quantile's length.
    """

    def __init__(
        self, lane: LaneCost, pipeline: Pipeline, lengths: Lengths, self_context: float, quantile_decodes: int
    ) -> None:
        self._lane, self._pipeline, self._lengths = lane, pipeline, lengths
        self._quantile_decodes = quantile_decodes
        context = self_context + lengths.mean_decode_context - lengths.mean_input
        self._attention = lane.decode_attention(context, lengths.mean_input)
        self._prompts = lane.prompts(lengths)

    def evaluate(self, max_batch: Array, budget: Array, microbatches: Array) -> Performance:
        lengths, m = self._lengths, microbatches
        mean_input = lengths.mean_input
        budget = np.maximum(np.floor(budget / m), 1.0)
        max_batch = np.maximum(max_batch / m, 1e-9)
        others = np.maximum((max_batch - 1) / max_batch, 0.0)
        rate, room, load, _ = self._steady(max_batch, budget, others)
        decode_batch = rate * lengths.mean_decodes

        # A busy step encodes what the slots freed, up to its room. Whoever is still in encode makes a step busy, so in
        # a step that only decodes every slot does.
        busy = np.maximum(1 - np.maximum(1 - rate / max_batch, 0.0) ** max_batch, load)
        requests, tokens = rate / busy, rate * mean_input / busy
        idle_batch = np.minimum(max_batch, budget)
        idle_batch = np.minimum(idle_batch, decode_batch / np.maximum(1 - busy, 1e-9))
        busy_batch = np.maximum(decode_batch - (1 - busy) * idle_batch, 0.0) / busy

        # Tokens of a busy step: a compound Poisson sum, given that it is not empty. Of several micro-batches that
        # encode at once, the one with the most tokens is what the others wait for.
        square = rate * lengths.mean_square_input + (rate * mean_input) ** 2
        sd_tokens = np.sqrt(np.maximum(square / busy - tokens**2, 0.0))
        others_busy = np.where(load < 0.99, busy * others, busy)
        deviate = expected_max_deviate(np.maximum(m * busy, 1.0))
        most_tokens = np.minimum(tokens + deviate * sd_tokens, room)
        long_tokens = np.minimum(np.maximum(tokens + upper_deviate(others_busy) * sd_tokens, 0.0), room)
        own_tokens = np.minimum(room, mean_input * (1 + rate * others))

        # The step that only decodes, the mean busy one, the longest of a round's, of the tail's, and a request's own.
        each = requests / tokens
        none = np.zeros_like(rate)
        cost, hop = self._steps(
            np.concatenate([idle_batch, busy_batch, busy_batch, busy_batch, decode_batch * others]),
            np.concatenate([none, requests, each * most_tokens, each * long_tokens, 1 + rate * others]),
            np.concatenate([none, tokens, most_tokens, long_tokens, own_tokens]),
        )
        size = len(rate)
        idle, full, most, long, own = (
            (cost[:, i * size : (i + 1) * size], hop[:, i * size : (i + 1) * size]) for i in range(5)
        )
        own_most = np.maximum(own[0], most[0])
        certain = np.ones_like(rate)
        rounds = self._rounds(
            (np.tile(full[0], 4), np.tile(full[1], 4)),
            (np.hstack([most[0], most[0], own_most, long[0]]), np.hstack([most[1], most[1], own[1], long[1]])),
            (np.tile(idle[0], 4), np.tile(idle[1], 4)),
            np.concatenate([busy, others_busy, certain, certain]),
            np.tile(busy, 4),
            np.tile(m, 4),
        )
        step_s, decode_s, own_s, long_s = rounds.reshape(4, size)
        long_s = np.where(m > 1, long_s, self._pipeline.through(*long))
        own_s = np.where(m > 1, own_s, self._pipeline.through(*own))
        whole_steps = lengths.inputs / room[:, None]
        spans = np.maximum(np.ceil(whole_steps), 1) + load[:, None] * np.minimum(0.5, whole_steps)
        ttft = own_s * (spans @ lengths.input_probabilities)
        variance = lengths.mean_square_input - mean_input**2
        largest = np.minimum(max_batch * mean_input + 4 * np.sqrt(max_batch * variance), max_batch * lengths.max_input)
        return Performance(
            throughput=m * rate / step_s,
            latency=ttft + self._quantile_decodes * decode_s,
            ttft=ttft,
            tpot=decode_s,
            itl_p99=np.where(others_busy > 0.01, long_s, self._pipeline.round(*idle, m)),
            encode_batch=m * requests,
            encode_tokens=m * tokens,
            decode_batch=m * decode_batch,
            peak_requests=m * max_batch,
            peak_tokens=np.minimum(budget, largest),
            cycle=step_s / busy,
        )

    def _steady(self, max_batch: Array, budget: Array, others: Array) -> _Slots:
        """The rate at which so many slots and so many tokens a step balance."""
        lengths = self._lengths
        highest = np.minimum(
            max_batch / (lengths.mean_decodes + 1), budget / (lengths.mean_input + lengths.mean_decodes)
        )
        if not np.isfinite(budget).any():
            return self._at(highest, budget, others)
        low, width = np.zeros_like(highest), highest
        rows = np.arange(len(highest))
        for _ in range(ROOT_LEVELS):
            grid = low[:, None] + width[:, None] * ROOT_STEPS
            slots = self._at(grid, budget[:, None], others[:, None]).slots
            # The last point of the grid that takes too few slots; the highest rate is never too low.
            index = (slots[:, 1:-1] < max_batch[:, None]).sum(axis=1)
            low, width = grid[rows, index], width / (len(ROOT_STEPS) - 1)
        return self._at(low + width / 2, budget, others)

    def _at(self, rate: Array, budget: Array, others: Array) -> _Slots:
        lengths = self._lengths
        room = budget - rate * lengths.mean_decodes
        load = rate * lengths.mean_input / room
        residual = lengths.mean_square_input / (2 * lengths.mean_input)
        y = (lengths.mean_input + others * residual * load / np.maximum(1 - load, 1e-9)) / room
        slots = rate * (lengths.mean_decodes - 1 / np.expm1(-1 / np.maximum(y, 1e-9)))
        return _Slots(rate, room, load, slots)

    def _steps(self, batch: Array, requests: Array, tokens: Array) -> Steps:
        """Steps that decode a batch and encode so many tokens of so many requests."""
        lane = self._lane
        sampled = batch + requests
        seconds = lane.tokens(sampled if lane.has_encoder else batch + tokens)
        seconds += self._attention(batch) + self._prompts(requests)
        return seconds + lane.samples(sampled) + lane.overhead(sampled), lane.hop(batch + tokens)

    def _rounds(self, busy: Steps, most: Steps, idle: Steps, own: Array, others: Array, m: Array) -> Array:
        """Seconds of a round in which a micro-batch's own step is busy with one probability, each other with another.

        Steps keep their order, so whoever follows a busy one waits for it: a round takes as long as its slowest step
        does through all stages, or as the slowest stage's work. That each round pays for a busy step of its own is
        too much, as those of neighbouring rounds overlap; that the M steps from a busy one on pay just once is too
        little, as one of them may be busy again later. The mean of the two is within 4% of the recursion, even where
        busy steps take ten times as long.

        Args:
            busy, most: the mean busy step, and the longest of those of a round.
            m: micro-batches.
        """
        pipeline = self._pipeline
        quiet = pipeline.round(*idle, m)
        none = (1 - own) * (1 - others) ** (m - 1)  # nobody is busy
        each = 1 - none ** (1 / m)
        slow = pipeline.through(*most)
        mean = each * busy[0] + (1 - each) * idle[0]
        stage = np.argmax(mean, axis=0)
        rows = np.arange(len(stage))
        busy_s, idle_s = busy[0][stage, rows], idle[0][stage, rows]
        some = np.maximum(1 - none, 1e-12)
        work = m * (idle_s + each / some * (busy_s - idle_s))  # given that somebody is busy
        sd = np.sqrt(m * each * (1 - each)) * np.abs(busy_s - idle_s)
        held = slow + _excess(work - slow, sd)
        gap = (1 - each) / np.maximum(each, 1e-12)
        once = m * (held + gap * quiet / m) / (m + gap)
        always = none * quiet + (1 - none) * held
        return np.where(m == 1, none * quiet + (1 - none) * pipeline.through(*busy), (once + always) / 2)


def _excess(mean: Array, sd: Array) -> Array:
    """E[max(X, 0)] of a normal X."""
    z = mean / np.maximum(sd, 1e-12)
    density, tail = np.exp(-z * z / 2) / SQRT_2_PI, ndtr(-np.abs(z))
    return np.maximum(mean, 0.0) + np.maximum(sd, 1e-12) * (density - np.abs(z) * tail)
