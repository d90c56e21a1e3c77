"""Compute the steps of one lane of stages under one workload, for the closed forms of any policy.

Assumptions: requests always wait; input and output lengths are independent; step costs are charged at the mean
composition of each iteration; the steps of a micro-batch follow each other through the stages as in
xsimulator.forecast.pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np

from xsimulator.costs.curves import ContextTable, Table
from xsimulator.costs.step_cost import LaneCost
from xsimulator.forecast.all_requests import AllRequests
from xsimulator.forecast.pipeline import Pipeline
from xsimulator.lengths import Lengths

T = TypeVar("T")


class OneLaneModel:
    """Steps of a lane of stages under one workload. The forecasts of the single-lane policies read it.

    Args:
        lane: step costs on the lane's stages.
        quantile: quantile of the output length for which latency is reported.
        all_requests: whether to report the quantile of all requests' latencies. If every request meets the same steps
            (rra, static), a longer output takes longer, so that the quantile of latencies is the latency of a request
            of the quantile's length.
    """

    def __init__(self, lane: LaneCost, lengths: Lengths, quantile: float = 0.99, *, all_requests: bool = False) -> None:
        self.lane = lane
        self.lengths = lengths
        self.pipeline = Pipeline(self.lane)
        self.quantile_decodes = lengths.decodes_at(quantile)
        self.of_all = AllRequests(lengths, quantile) if all_requests else None
        self.self_context = 0.0 if self.lane.has_encoder else lengths.mean_whole_input
        """Tokens to which self-attention attends before the first output token."""
        self._made: dict[Callable[[OneLaneModel], Any], Any] = {}

    def part(self, make: Callable[[OneLaneModel], T]) -> T:
        """Return a further part that a forecast computes from this lane and workload, cached."""
        if make not in self._made:
            self._made[make] = make(self)
        return cast(T, self._made[make])

    @cached_property
    def encode_table(self) -> Table:
        """Seconds of a step that only encodes whole prompts, by the number of prompts: on each kind of stage; through
        all stages; and from each end of a run of equal stages on, with hops and without.
        """
        hop, alone = self.lane.hop, self.lane.encode(self.lengths)
        whole = alone + Table(hop.points / self.lengths.mean_input, hop.values)
        alone, after = Table(whole.points, alone(whole.points)), self.pipeline.after
        sums = [self.pipeline.counts[None] @ whole.values, after @ whole.values, after @ alone.values]
        return Table(whole.points, np.concatenate([alone.values, *sums]))

    @cached_property
    def decode_table(self) -> ContextTable:
        """Seconds of a step that only decodes, by its requests and their context: on each kind of stage; through all
        stages; and on each kind with the hop to it. # 2 kinds + 1 functions
        """
        lane, longest = self.lane, len(self.lengths.survival) + 1
        contexts = lane.contexts_between(self.self_context, self.self_context + longest)
        alone, hop = lane.decode(contexts, self.lengths.mean_input), lane.hop
        whole = alone + Table(hop.points, np.repeat(hop.values[:, None], len(contexts), axis=1))
        through = self.pipeline.all_stages(whole.values)[None]
        return ContextTable(whole.points, contexts, np.concatenate([alone(whole.points), through, whole.values]))
