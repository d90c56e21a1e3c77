"""Compute the means, mean squares and tails of a workload's lengths, and lengths in decode steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from xgpt.core.reuse_distances import ReuseCurve
from xgpt.core.schema import Speculation, Workload
from xgpt.core.workload import quantile

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int_]


@dataclass(frozen=True, eq=False)
class Reused:
    """The tokens of prompts that requests find in the cache, and the memory for these tokens.

    Attributes:
        whole, cached: for each kind of request, the number of prompt tokens, and of those that are cached. # [kinds]
            each
        kept_tokens: tokens of K/V memory that contain prompts of running and earlier requests.
        most: share of all prompt tokens that requests would find in an unlimited cache.
        holds_prompts: whether each running request takes memory for its whole prompt, as if it shared no blocks with
            other running requests. If False, prompts are assumed to take no memory. The result is then valid only as a
            bound, since it underestimates memory.
    """

    whole: Array
    cached: Array
    probabilities: Array
    kept_tokens: float
    most: float
    holds_prompts: bool = True

    @classmethod
    def proportional(cls, workload: Workload, share: float, kept_tokens: float, most: float) -> Reused:
        """Return a `Reused` in which the same share of each prompt is cached, but never a prompt's last token."""
        whole = np.asarray(workload.input.lengths, float)
        cached = np.floor(np.minimum(share * whole, whole - 1))
        return cls(whole, cached, np.asarray(workload.input.probabilities), kept_tokens, most)

    @property
    def share(self) -> float:
        return float((self.probabilities @ self.cached) / (self.probabilities @ self.whole))

    def kept_blocks(self, block_size: int) -> int:
        return math.ceil(self.kept_tokens / block_size)


class Lengths:
    """Input lengths I and decode iterations D of a workload.

    With reuse, I counts only the tokens that are not cached, and `mean_whole_input` counts all tokens.

    The encode step computes the first output token, so a request of output length s decodes D = s - 1 times. ExeGPT's
    formulas have s, but all code here has D.
    """

    def __init__(self, workload: Workload, reused: Reused | None = None) -> None:
        self.reused = reused
        self.inputs: Array = np.asarray(workload.input.lengths, float)
        self.input_probabilities: Array = np.asarray(workload.input.probabilities)
        self.max_whole_input = workload.input.lengths[-1]
        self.mean_whole_input = float(self.input_probabilities @ self.inputs)
        if reused is not None:
            self.inputs, self.input_probabilities = reused.whole - reused.cached, reused.probabilities
        self.outputs: Array = np.asarray(workload.output.lengths, float)
        self.output_probabilities: Array = np.asarray(workload.output.probabilities)
        self.max_input = int(np.ceil(self.inputs.max()))
        self.max_output = workload.output.lengths[-1]
        self._workload = workload
        self.occupied_blocks = cache(self._occupied_blocks)
        """Return the mean and mean square of the number of K/V blocks that a running request has at a random moment."""

    @cached_property
    def mean_input(self) -> float:
        return float(self.input_probabilities @ self.inputs)

    @cached_property
    def mean_square_input(self) -> float:
        return float(self.input_probabilities @ self.inputs**2)

    @cached_property
    def mean_output(self) -> float:
        return float(self.output_probabilities @ self.outputs)

    @property
    def mean_decodes(self) -> float:
        """Mean number of decode iterations, E[D]."""
        return self.mean_output - 1

    @cached_property
    def survival(self) -> Array:
        """P(D >= t) for t = 1 .. max D. There is at least one entry, so outputs of one token need no special case."""
        times = np.arange(1, max(2, self.max_output))
        above = np.searchsorted(self.outputs - 1, times, side="left")
        tail = np.concatenate([np.cumsum(self.output_probabilities[::-1])[::-1], [0.0]])
        return tail[above]

    @cached_property
    def mean_decode_context(self) -> float:
        """Mean number of tokens to which a decode attends, E[I] + (E[D^2]/E[D] + 1)/2, with any schedule."""
        if not self.mean_decodes:
            return self.mean_whole_input
        times = np.arange(1, len(self.survival) + 1)
        return self.mean_whole_input + float(times @ self.survival) / self.mean_decodes

    def in_the_middle(self, num_requests: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Draw requests that decode at a random moment. Return two numbers for each: the output tokens generated so
        far, and the output tokens still to come (at least one).

        Every decode iteration is equally likely, so an output length's probability is proportional to its iterations.
        # [requests] each
        """
        shares = self.output_probabilities * (self.outputs - 1)
        if not shares.any():
            return np.zeros(num_requests, int), np.ones(num_requests, int)
        outputs = rng.choice(self.outputs.astype(int), num_requests, p=shares / shares.sum())
        generated = rng.integers(1, outputs)
        return generated, outputs - generated

    @property
    def _held_inputs(self) -> Array:
        if self.reused is None:
            return self.inputs
        return self.reused.whole if self.reused.holds_prompts else np.zeros_like(self.inputs)

    def decodes_at(self, q: float) -> int:
        """Return the decode iterations D of a request whose output length is at quantile `q`."""
        return quantile(self._workload.output, q) - 1

    def reserved_blocks(self, block_size: int) -> tuple[float, float]:
        """Return the mean and mean square of the number of K/V blocks reserved for a request under "reserve"."""
        blocks = np.ceil((self._held_inputs + self.max_output) / block_size)
        return float(self.input_probabilities @ blocks), float(self.input_probabilities @ blocks**2)

    @property
    def _ages(self) -> Array:
        """Probability of each number of decode iterations that a running request has had: in proportion to P(D >= a),
        since each a in 0 .. D is equally likely.
        """
        met = np.concatenate([[1.0], self.survival])
        return met / met.sum()

    def output_blocks(self, block_size: int) -> tuple[float, float]:
        """Return the mean and mean square of the K/V blocks for a running request's output at a random moment."""
        met = self._ages
        blocks = np.arange(len(met)) / block_size + 1
        return float(blocks @ met), float(blocks**2 @ met)

    def _occupied_blocks(self, block_size: int) -> tuple[float, float]:
        ages, met = np.arange(len(self.survival) + 1), self._ages
        blocks = np.ceil((self._held_inputs[:, None] + 1 + ages) / block_size)  # [inputs, ages]
        return float(self.input_probabilities @ blocks @ met), float(self.input_probabilities @ blocks**2 @ met)


def phases(decodes: npt.ArrayLike, decode_iterations: int) -> Array:
    """Return the number of phases in which a request decodes, c = ceil(D / N_D). Source: ExeGPT sec. 6."""
    return np.ceil(np.asarray(decodes, float) / decode_iterations)


def steady_decode_batch(lengths: Lengths, encode_batch: float, decode_iterations: int) -> float:
    """Return the decoding requests in an rra phase: B_D = B_E E[c(D)], exact by Little's law (c is as in `phases`).

    The paper's B_E / E[1/c] is biased, since requests that decode for longer are more often among the decoding ones.
    Source: ExeGPT sec. 6, corrected.
    """
    decodes = lengths.outputs - 1
    return encode_batch * math.fsum(lengths.output_probabilities * phases(decodes, decode_iterations))


def decoded(outputs: npt.ArrayLike, speculation: Speculation | None, rng: np.random.Generator) -> Ints:
    """Return output lengths in steps of the schedule, for simulating requests with a draft. # [requests]

    An engine step counts as several steps of the schedule. Each of these gives a request one token on average. The
    first token comes with the prompt. Then engine steps emit 1, 2, ... tokens with the probabilities in
    `Speculation.shares` until the output is complete. Without a draft, the lengths are unchanged.
    """
    lengths = np.asarray(outputs)
    if speculation is None:
        return lengths
    left, steps = lengths - 1, np.zeros(len(lengths), int)
    ends = np.cumsum(speculation.shares)
    while (going := np.flatnonzero(left > 0)).size:
        left[going] -= 1 + np.minimum(np.searchsorted(ends, rng.random(going.size)), speculation.tokens)
        steps[going] += 1
    # The last step may emit more tokens than the output needs. All outputs are scaled to correct for this.
    whole = speculation.tokens_per_step * steps
    wanted, taken = float((lengths - 1).sum()), float(whole.sum())
    return 1 + np.round(whole * (wanted / taken if taken else 1.0)).astype(int)


KINDS = 200
"""Largest number of kinds of requests that closed forms distinguish."""


def reused_at(
    curve: ReuseCurve, tokens: float, kept_tokens: float | None = None, *, holds_prompts: bool = True
) -> Reused:
    """Return the part of prompts that requests find in a cache of `tokens` tokens.

    Args:
        kept_tokens: memory, in tokens, that is reserved for the cache. None means `tokens`.
    """
    kept = tokens if kept_tokens is None else kept_tokens
    return reused_of(curve.inputs, curve.cached(tokens), kept, curve.most, holds_prompts=holds_prompts)


def reused_of(inputs: Ints, cached: Ints, kept_tokens: float, most: float, *, holds_prompts: bool = True) -> Reused:
    """Return the part of prompts that requests find, given the cached tokens of each. # inputs, cached: [requests]"""
    order = np.argsort(inputs - cached, kind="stable")
    groups = np.array_split(order, min(len(order), KINDS))
    columns = [np.asarray([float(values[group].mean()) for group in groups]) for values in (inputs, cached)]
    shares = np.asarray([len(group) / len(order) for group in groups])
    return Reused(columns[0], columns[1], shares, kept_tokens, most, holds_prompts)


def parts_of(values: Array, probabilities: Array, edges: Array) -> tuple[Array, Array]:
    """Return the mean and the probability of each part of a distribution, divided at the quantiles `edges`."""
    reached = np.concatenate([[0.0], np.cumsum(probabilities)])
    inside = np.minimum(reached[1:, None], edges[1:]) - np.maximum(reached[:-1, None], edges[:-1])
    inside = np.maximum(inside, 0.0)  # [values, shares]
    shares = inside.sum(axis=0)
    kept = shares > 0
    return (values @ inside)[kept] / shares[kept], shares[kept] / shares.sum()
