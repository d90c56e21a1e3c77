"""Define the terms that bound the throughput of a placement: the least times of steps, for each mean decode batch m.

m is the mean number of decoding requests in a micro-batch. Arrays are [placements, terms, m] unless stated otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from xsimulator.costs.curves import Array
from xsimulator.lengths import Lengths

NUM_PHASES = 24


class Iterations:
    """The decode iterations of one workload, for each m.

    Attributes:
        decodes: number of decode iterations of a request with output length at the quantile (at least one).
    """

    def __init__(self, lengths: Lengths, batches: Array, decodes: int) -> None:
        self.lengths, self.batches, self.decodes = lengths, batches, decodes
        self.mean_decodes = max(lengths.mean_decodes, 1e-9)
        self._survival = lengths.survival

    @cached_property
    def longest(self) -> Array:
        """Mean number of iterations until the last of m requests finishes. # [m]"""
        return self._some.sum(axis=1)

    @cached_property
    def longest_met(self) -> Array:
        """Mean number of the `longest` iterations in which a request of the quantile's output length decodes. # [m]"""
        return self._some[:, : self.decodes].sum(axis=1)

    @property
    def _some(self) -> Array:
        """Probability that any of m requests still decodes in an iteration. # [m, iterations]"""
        survival = np.minimum(self._survival, 1.0)
        return 1 - (1 - survival) ** np.maximum(np.floor(self.batches), 1.0)[:, None]

    @cached_property
    def busy(self) -> Array:
        """Share of iterations in which any request decodes. It is computed for the phase length with the smallest such
        share. # [m]
        """
        survival, most = self._survival, self.decodes
        least = np.ones(len(self.batches))
        for n in np.unique(np.geomspace(1, len(survival), NUM_PHASES).astype(int)):
            padded = np.zeros(-(-len(survival) // n) * n)
            padded[: len(survival)] = survival
            share = padded.reshape(-1, n).sum(axis=0)[: max(most, 1)]
            encoded = self.batches / max(share.mean(), 1e-12)
            least = np.minimum(least, -np.expm1(-np.outer(encoded, share)).mean(axis=1))
        return np.maximum(least, 1e-3)


@dataclass(frozen=True)
class LeastSteps:
    """The least seconds of steps on some placements. Terms are kinds of stages.

    Attributes:
        microbatches: number of micro-batches that decode. # [placements]
        parts: number of micro-batches in which prompts are encoded. # [placements]
        decode: seconds of a step that only decodes.
        mixed: seconds of a step that also encodes m / E[D] prompts, which keep the batch at m.
        met: seconds of such a mixed step in which a given request decodes. Its slot has no prompt, so only m - 1
            requests are replaced.
        passing: seconds of a step that only decodes, through all stages and hops. # [placements, 1, m]
        steady, steady_passing: as `decode` and `passing`, if every step decodes m requests. The other two assume only
            that steps decode m requests on average.
        first: seconds of a step that only decodes, on the first stage. # [placements, m]
        encode_each: a prompt's share of the seconds of the largest step, on each kind of stage. # [placements, kinds]
        encode_lane: the same share, on the lane that encodes. # [placements, kinds]
        through: the same share, through all stages. # [placements]
        alone: seconds of a step that encodes only one prompt, through all stages that encode. # [placements]
    """

    iterations: Iterations
    microbatches: Array
    parts: Array
    decode: Array
    mixed: Array
    met: Array
    passing: Array
    steady: Array
    steady_passing: Array
    first: Array
    encode_each: Array
    encode_lane: Array
    through: Array
    alone: Array

    @property
    def each(self) -> Array:
        return self.microbatches[:, None, None]

    @property
    def encode(self) -> Array:
        """Seconds of a step that encodes m prompts."""
        return self.encode_each[:, :, None] * self.iterations.batches

    @property
    def phase(self) -> Array:
        """Seconds of a phase that encodes m requests in each micro-batch. # [placements, m]"""
        of_one = (self.through + (self.parts - 1) * self.encode_each.max(axis=1)) / self.parts
        return of_one[:, None] * self.microbatches[:, None] * self.iterations.batches


class BoundTerms(NamedTuple):
    """The terms that bound a policy's throughput on placements.

    Attributes:
        working: lower bounds on the seconds of an iteration.
        met: lower bounds on the seconds between two decode iterations of a request.
        busy: least share of iterations in which any request decodes. # [m]
        before_s: least latency before the first decode iteration. # [placements]
        most_rps: upper bound on requests a second with any m. # [placements]
        at_least_one: whether a limit on m below 1 counts as 1, since a lane may decode less than one request on
            average.
    """

    working: list[Array]
    met: list[Array]
    busy: Array | float = 1.0
    before_s: Array | float = 0.0
    most_rps: Array | float = np.inf
    at_least_one: bool = False
