"""The trade-off in one look: the highest throughput for each latency, of every policy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from xscheduler.space import Settings, Space

NUM_POINTS = 1000
"""Settings that are looked at."""


class Point(NamedTuple):
    """A schedule that no other one looked at beats in both throughput and latency."""

    latency_s: float
    throughput_rps: float
    settings: Settings


def frontier(space: Space) -> list[Point]:
    """Schedules of a space that fit, from the lowest latency to the highest throughput.

    They are found on a grid in one vectorised call: each can be reached, and between two of them better ones may lie
    (the search, not the frontier, is what finds and proves the best).
    """
    columns = space.grid_points(NUM_POINTS)
    evaluation = space.evaluate(columns)
    latency, throughput = evaluation.performance.latency, evaluation.performance.throughput
    order = np.lexsort((-throughput, latency))
    order = order[evaluation.feasible[order]]
    best = np.maximum.accumulate(throughput[order]) if len(order) else throughput[order]
    rises = np.concatenate([[True], best[1:] > best[:-1]]) if len(order) else np.zeros(0, bool)
    return [Point(float(latency[i]), float(throughput[i]), space.settings(columns, int(i))) for i in order[rises]]
