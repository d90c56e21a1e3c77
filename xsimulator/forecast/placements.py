"""The parts of a placement's bound: least times of its steps, by mean decode batch.

m is the mean number of requests in decode of a micro-batch. Arrays are [placements, terms, m] unless stated otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from xsimulator.costs.curves import Array
from xsimulator.lengths import Lengths

NUM_PHASES = 24
"""Lengths of a phase at which the share of idle iterations is looked up."""


class Iterations:
    """Decode iterations of one workload, at each m.

    Attributes:
        lengths: of the workload.
        batches: the values of m.
        decodes: iterations of a request of the quantile's length, at least one; mean_decodes: of all, in the mean.
    """

    def __init__(self, lengths: Lengths, batches: Array, decodes: int) -> None:
        self.lengths, self.batches, self.decodes = lengths, batches, decodes
        self.mean_decodes = max(lengths.mean_decodes, 1e-9)
        self._survival = lengths.survival

    @cached_property
    def longest(self) -> Array:
        """Mean iterations until the longest of m requests ends. # [m]"""
        return self._some.sum(axis=1)

    @cached_property
    def longest_met(self) -> Array:
        """Those of them that a request of the quantile's length meets. # [m]"""
        return self._some[:, : self.decodes].sum(axis=1)

    @property
    def _some(self) -> Array:
        """Probability that one of m requests, or of one where m is less, is still in decode. # [m, iterations]"""
        survival = np.minimum(self._survival, 1.0)
        return 1 - (1 - survival) ** np.maximum(np.floor(self.batches), 1.0)[:, None]

    @cached_property
    def busy(self) -> Array:
        """Least share of a phase's iterations in which any request is in decode, of those a request meets. # [m]"""
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
    """Least seconds of the steps of some placements; terms are kinds of stages.

    Attributes:
        microbatches: that share the decode lane; parts: in which they are encoded. # [placements]
        decode: a step that only decodes; mixed: one that also encodes what the batch needs to stay as large; met: the
            same without the prompts that a request itself displaces.
        passing: all stages and hops, decode only. # [placements, 1, m]
        steady, steady_passing: `decode` and `passing` where every step has m requests, not just their mean.
        first: the first stage, decode only. # [placements, m]
        encode_each: a prompt at its cheapest on each kind; encode_lane: the same on the lane that encodes.
            # [placements, kinds]
        through: a prompt at its cheapest through all stages. # [placements]
        alone: a step that encodes one prompt of the mean length, through all stages that encode. # [placements]
    """

    of: Iterations
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
        """Micro-batches. # [placements, 1, 1]"""
        return self.microbatches[:, None, None]

    @property
    def encode(self) -> Array:
        """A step that encodes m prompts."""
        return self.encode_each[:, :, None] * self.of.batches

    @property
    def phase(self) -> Array:
        """An encode phase of as many requests as decode. # [placements, m]"""
        of_one = (self.through + (self.parts - 1) * self.encode_each.max(axis=1)) / self.parts
        return of_one[:, None] * self.microbatches[:, None] * self.of.batches


class BoundTerms(NamedTuple):
    """What bounds a policy's throughput on placements.

    Attributes:
        working: seconds of an iteration, each a bound from below.
        met: seconds that a request meets for each of its decode iterations, likewise.
        busy: share of iterations at least in which any request is in decode; 1 where none is without. # [m]
        before_s: seconds before the first iteration. # [placements]
        most_rps: requests a second at most, whatever decodes. # [placements]
        at_least_one: where less than one request decodes in the mean, one must keep the latency.
    """

    working: list[Array]
    met: list[Array]
    busy: Array | float = 1.0
    before_s: Array | float = 0.0
    most_rps: Array | float = np.inf
    at_least_one: bool = False
