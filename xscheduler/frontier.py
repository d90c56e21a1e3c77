"""Compute a policy's trade-off between latency and throughput: the highest throughput for each latency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xgpt.core.schema import PolicySettings
from xscheduler.space import Space

NUM_POINTS = 1000
"""Approximate number of settings that are predicted for each placement."""
NUM_PLACEMENTS = 40
"""Largest number of placements to search. Those with the highest bounds come first."""


class TradeOff(NamedTuple):
    """A schedule that no other predicted schedule beats in both throughput and latency."""

    latency_s: float
    throughput_rps: float
    settings: PolicySettings


def frontier(spaces: Sequence[Space]) -> list[TradeOff]:
    """Return the trade-off of all spaces, from the lowest latency to the highest throughput.

    The schedules are taken from a grid of each placement's settings. Each schedule is attainable, but a better schedule
    may exist between two grid points. Only the search proves that a schedule is the best.
    """
    points = [
        point for space in sorted(spaces, key=lambda space: -space.bound)[:NUM_PLACEMENTS] for point in of_space(space)
    ]
    best: list[TradeOff] = []
    for point in sorted(points, key=lambda point: (point.latency_s, -point.throughput_rps)):
        if not best or point.throughput_rps > best[-1].throughput_rps:
            best.append(point)
    return best


def of_space(space: Space) -> list[TradeOff]:
    """Return the trade-off of one placement."""
    columns = space.grid_points(NUM_POINTS)
    evaluation = space.evaluate(columns)
    latency, throughput = evaluation.performance.latency, evaluation.throughput
    order = np.lexsort((-throughput, latency))
    order = order[evaluation.feasible[order]]
    if not len(order):
        return []
    best = np.maximum.accumulate(throughput[order])
    rises = np.concatenate([[True], best[1:] > best[:-1]])
    return [TradeOff(float(latency[i]), float(throughput[i]), space.settings(columns, int(i))) for i in order[rises]]
