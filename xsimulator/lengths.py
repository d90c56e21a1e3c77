"""Compute the moments and tails of a workload's lengths that the closed forms need."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from xgpt.core.schema import Workload
from xgpt.core.workload import quantile

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int_]


@dataclass(frozen=True, eq=False)
class Reused:
    """The part of prompts that requests find in the cache, and the memory of this part.

    Attributes:
        whole, cached: tokens of prompts, and how many of them are found. # [kinds] each
        probabilities: probabilities of these kinds of requests. # [kinds]
        kept_tokens: tokens of K/V memory that hold prompts, of running requests and of earlier ones.
        most: share of all prompt tokens that would be found in an unlimited cache.
        holds_prompts: whether each running request takes memory for its whole prompt, as if no other running request
            shared it. If false, requests take less memory than in reality, which is used for bounds.
    """

    whole: Array
    cached: Array
    probabilities: Array
    kept_tokens: float
    most: float
    holds_prompts: bool = True

    @classmethod
    def proportional(cls, workload: Workload, share: float, kept_tokens: float, most: float) -> Reused:
        """Return reuse in which every request finds the same share of its prompt, except its last token."""
        whole = np.asarray(workload.input.lengths, float)
        cached = np.floor(np.minimum(share * whole, whole - 1))
        return cls(whole, cached, np.asarray(workload.input.probabilities), kept_tokens, most)

    @property
    def share(self) -> float:
        """Share of all prompt tokens that are found."""
        return float((self.probabilities @ self.cached) / (self.probabilities @ self.whole))

    def kept_blocks(self, block_size: int) -> int:
        """Return the number of K/V blocks for the kept tokens."""
        return math.ceil(self.kept_tokens / block_size)


class Lengths:
    """Input lengths I and decode iterations D of a workload.

    If a part of prompts is found cached, I counts only the rest, and `mean_whole_input` all tokens.

    The encode pass emits the first output token, so a request of output length s decodes D = s - 1 times. ExeGPT counts
    s; all code here counts D.
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
        """Return the mean and mean square of the K/V blocks that a running request holds at a random moment."""

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
        """E[D]."""
        return self.mean_output - 1

    @cached_property
    def survival(self) -> Array:
        """P(D >= t) for t = 1 .. max D. It has at least one entry, so one-token outputs need no special case."""
        times = np.arange(1, max(2, self.max_output))
        above = np.searchsorted(self.outputs - 1, times, side="left")
        tail = np.concatenate([np.cumsum(self.output_probabilities[::-1])[::-1], [0.0]])
        return tail[above]

    @cached_property
    def mean_decode_context(self) -> float:
        """Mean tokens that a request attends to in a decode iteration: E[I] + (E[D^2]/E[D] + 1)/2, for any schedule."""
        if not self.mean_decodes:
            return self.mean_whole_input
        times = np.arange(1, len(self.survival) + 1)
        return self.mean_whole_input + float(times @ self.survival) / self.mean_decodes

    def in_the_middle(self, num_requests: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Return random requests in decode: the number of output tokens that each has generated, and the number still
        to come (at least one).

        A request that decodes longer is in decode more often, and equally often at each of its decode iterations. #
        [requests] each
        """
        shares = self.output_probabilities * (self.outputs - 1)
        if not shares.any():
            return np.zeros(num_requests, int), np.ones(num_requests, int)
        outputs = rng.choice(self.outputs.astype(int), num_requests, p=shares / shares.sum())
        generated = rng.integers(1, outputs)
        return generated, outputs - generated

    @property
    def _held_inputs(self) -> Array:
        """Prompt tokens that count towards a running request's memory."""
        if self.reused is None:
            return self.inputs
        return self.reused.whole if self.reused.holds_prompts else np.zeros_like(self.inputs)

    def decodes_at(self, q: float) -> int:
        """Return D of a request whose output has the quantile's length."""
        return quantile(self._workload.output, q) - 1

    def reserved_blocks(self, block_size: int) -> tuple[float, float]:
        """Return the mean and mean square of the K/V blocks that are reserved for a request under "reserve"."""
        blocks = np.ceil((self._held_inputs + self.max_output) / block_size)
        return float(self.input_probabilities @ blocks), float(self.input_probabilities @ blocks**2)

    def output_blocks(self, block_size: int) -> tuple[float, float]:
        """Return the mean and mean square of the K/V blocks for a running request's output at a random moment."""
        met = np.concatenate([[1.0], self.survival])
        met /= met.sum()
        blocks = np.arange(len(met)) / block_size + 1
        return float(blocks @ met), float(blocks**2 @ met)

    def _occupied_blocks(self, block_size: int) -> tuple[float, float]:
        """Return `occupied_blocks`.

        A request that decodes D times is equally often at each age 0 .. D, so the probability of age a is proportional
        to P(D >= a).
        """
        ages = np.arange(len(self.survival) + 1)
        met = np.concatenate([[1.0], self.survival])
        met /= met.sum()
        blocks = np.ceil((self._held_inputs[:, None] + 1 + ages) / block_size)  # [inputs, ages]
        return float(self.input_probabilities @ blocks @ met), float(self.input_probabilities @ blocks**2 @ met)


def phases(decodes: npt.ArrayLike, decode_iterations: int) -> Array:
    """Return c = ceil(D / N_D), the number of phases for which a request stays in decode. Source: ExeGPT sec. 6."""
    return np.ceil(np.asarray(decodes, float) / decode_iterations)


def steady_decode_batch(lengths: Lengths, encode_batch: float, decode_iterations: int) -> float:
    """Return the requests in decode at the start of an RRA phase: B_D = B_E E[c(D)], exact by Little's law.

    The paper's B_E / E[1/c] is biased: requests that stay longer are over-represented in decode.
    Source: ExeGPT sec. 6, corrected.
    """
    decodes = lengths.outputs - 1
    return encode_batch * math.fsum(lengths.output_probabilities * phases(decodes, decode_iterations))
