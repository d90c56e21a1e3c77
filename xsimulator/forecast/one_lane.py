"""Compute the times of steps of one lane under one workload, for the closed forms of single-lane policies.

The closed forms make four assumptions. Requests always wait. Input and output lengths are independent. Every iteration
takes the time of its mean composition. The steps of a micro-batch follow each other through the stages as in
xsimulator.forecast.pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np

from xsimulator.costs.curves import Array, ContextTable, Table
from xsimulator.costs.step_cost import LaneCost
from xsimulator.forecast.pipeline import Pipeline
from xsimulator.lengths import Lengths

T = TypeVar("T")


class OneLaneModel:
    """The times of steps of one lane under one workload, which the forecasts of single-lane policies read.

    Args:
        lane: step costs on the lane's stages.
        quantile: quantile of the output length for which latency is reported.
        all_requests: whether to report the quantile of all requests' latencies. Under rra and static, this is the
            latency of a request whose output length is at the quantile, since longer outputs always take longer.
    """

    def __init__(self, lane: LaneCost, lengths: Lengths, quantile: float = 0.99, *, all_requests: bool = False) -> None:
        self.lane = lane
        self.lengths = lengths
        self.pipeline = Pipeline(self.lane)
        self.quantile_decodes = lengths.decodes_at(quantile)
        self.of_all = AllRequests(lengths, quantile) if all_requests else None
        self.self_context = 0.0 if self.lane.has_encoder else lengths.mean_whole_input
        """Number of tokens to which self-attention attends before the first output token."""
        self._made: dict[Callable[[OneLaneModel], Any], Any] = {}

    def part(self, make: Callable[[OneLaneModel], T]) -> T:
        """Return `make(self)`, which a forecast computes from this lane and workload. The result is cached."""
        if make not in self._made:
            self._made[make] = make(self)
        return cast(T, self._made[make])

    @cached_property
    def encode_table(self) -> Table:
        """Seconds of a step that only encodes whole prompts, by number of prompts. The functions are, in order: without
        hops, on each kind of stage; with hops, through all stages, and from each end of a run of equal stages on; and
        the last ones without hops.
        """
        hop, alone = self.lane.hop, self.lane.encode(self.lengths)
        whole = alone + Table(hop.points / self.lengths.mean_input, hop.values)
        alone, after = Table(whole.points, alone(whole.points)), self.pipeline.after
        sums = [self.pipeline.counts[None] @ whole.values, after @ whole.values, after @ alone.values]
        return Table(whole.points, np.concatenate([alone.values, *sums]))

    @cached_property
    def decode_table(self) -> ContextTable:
        """Seconds of a step that only decodes, by number of requests and their context: without hops on each kind of
        stage, with hops through all stages, and with hops on each kind. # 2 kinds + 1 functions
        """
        lane, longest = self.lane, len(self.lengths.survival) + 1
        contexts = lane.contexts_between(self.self_context, self.self_context + longest)
        alone, hop = lane.decode(contexts, self.lengths.mean_input), lane.hop
        whole = alone + Table(hop.points, np.repeat(hop.values[:, None], len(contexts), axis=1))
        through = self.pipeline.all_stages(whole.values)[None]
        return ContextTable(whole.points, contexts, np.concatenate([alone(whole.points), through, whole.values]))


DEVIATES = np.asarray([-np.sqrt(3.0), 0.0, np.sqrt(3.0)])[:, None, None]
WEIGHTS = np.asarray([1 / 6, 2 / 3, 1 / 6])[:, None, None]
HALVINGS = 12


class AllRequests:
    """Computes a quantile of all requests' latencies in closed form, with random prompts and random step times.

    The time to a request's first token depends on its prompt and on the step that encodes the prompt. Then come D
    decode steps, where D has the distribution of output lengths. If step times are independent, with mean t and
    standard deviation s, then

        P(latency > x) = sum_jk p_j w_k P(D > d_jk),   first_j + t d_jk + z_k s sqrt(d_jk) = x,

    where z_k and w_k represent a normal distribution (Gauss-Hermite). The probability falls with x, so bisection finds
    the quantile. If the time to the first token is constant and s is 0, the quantile is the latency of a request whose
    output length is at the quantile.

    Args:
        quantile: share of all requests whose latency the result bounds.
    """

    def __init__(self, lengths: Lengths, quantile: float) -> None:
        self._above = np.concatenate([lengths.survival, [0.0]])  # P(D > d)
        self._late = 1 - quantile
        self._decodes = lengths.decodes_at(quantile)

    def latency(self, first: Array, shares: Array, step: Array, deviation: Array) -> Array:
        """Return the quantile of all requests' latencies, s. # [n]

        Args:
            first, shares: possible seconds to the first token, and their probabilities. # [values, n] each
            step, deviation: mean and standard deviation of a decode step's seconds. # [n]
        """
        spread = DEVIATES * deviation  # [3, 1, n]
        step = np.maximum(step, 1e-12)
        weights = WEIGHTS * shares
        low = first.min(axis=0)
        high = first.max(axis=0) + self._decodes * step + 1.8 * deviation * np.sqrt(self._decodes)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            left = middle - first  # [values, n]
            root = np.sqrt(spread**2 + 4 * step * np.maximum(left, 0.0)) - spread
            decodes = np.minimum((root / (2 * step)) ** 2, len(self._above) - 1).astype(int)
            late = np.where(left < 0, 1.0, self._above[decodes])
            breaks = (weights * late).sum(axis=(0, 1)) > self._late
            low, high = np.where(breaks, middle, low), np.where(breaks, high, middle)
        return high
