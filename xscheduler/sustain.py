"""Schedules under a given arrival rate: who keeps the bound when waiting counts, and up to which rate.

Predicted by the closed-form queue (xsimulator.queueing); each replica takes its share of the arrivals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xgpt.schema import Constraint
from xscheduler.frontier import Point, of_space
from xscheduler.space import Settings, Space
from xsimulator.analytic import Performance, TwoLaneModel
from xsimulator.queueing import Queue

NUM_PLACEMENTS = 6
"""Placements of a policy that are looked at: those of the highest bounds."""
NUM_CANDIDATES = 10
"""Schedules of a placement that are looked at, along its frontier."""


class Sustained(NamedTuple):
    """A schedule that keeps the bound at the rate, and what it does at saturation."""

    space: Space
    settings: Settings
    values: dict[str, float]
    evaluations: int


def best_sustained(spaces: Sequence[Space], constraint: Constraint, rate: float) -> Sustained | None:
    """The schedule with the most room above the rate among those that keep the constraint at it; None where none does.

    Args:
        spaces: of one policy, without a latency bound: under light load batches are small, and so are latencies.
    """
    able = sorted((space for space in spaces if space.bound > rate), key=lambda space: -space.bound)
    best: tuple[float, Space, Settings] | None = None
    for space in able[:NUM_PLACEMENTS]:
        points = [point for point in of_space(space) if point.throughput_rps > rate]
        if not points:
            continue
        picked = _spread(points)
        keeps = _keeps(space, [point.settings for point in picked], constraint, rate)
        for point, kept in zip(picked, keeps, strict=True):
            if kept and (best is None or point.throughput_rps > best[0]):
                best = point.throughput_rps, space, point.settings
    if best is None:
        return None
    _, space, settings = best
    values = space.evaluate(_columns([settings])).at(0)
    return Sustained(space, settings, values, sum(space.evaluations for space in spaces))


def max_arrival_rate(space: Space, settings: Settings, constraint: Constraint) -> float:
    """The highest Poisson rate, over all replicas, at which the quantile of the whole time keeps the latency bound."""
    queue = _queue(space, [settings])
    replicas = space.placement.replicas
    if constraint.latency_bound_s is None:
        return float(replicas * queue.saturation[0])
    bound_s = constraint.latency_bound_s / (1 + constraint.headroom)
    return float(replicas * queue.max_rate(bound_s, constraint.quantile)[0])


def _keeps(space: Space, settings: Sequence[Settings], constraint: Constraint, rate: float) -> list[bool]:
    loaded = _queue(space, settings).at(rate / space.placement.replicas, constraint.quantile)
    slack = 1 + constraint.headroom
    keeps = loaded.utilisation < 1
    if constraint.latency_bound_s is not None:
        keeps &= loaded.whole * slack <= constraint.latency_bound_s
    if constraint.ttft_s is not None:
        keeps &= loaded.ttft * slack <= constraint.ttft_s
    return [bool(kept) for kept in keeps]


def _queue(space: Space, settings: Sequence[Settings]) -> Queue:
    model = space.models.model

    def evaluate(kind: str, **columns: np.ndarray) -> Performance:
        return model.evaluate(**columns) if isinstance(model, TwoLaneModel) else model.evaluate(kind, **columns)

    fixed = {name: value for name, value in space.placement.fixed.items() if name.endswith("microbatches")}
    columns = _columns(settings) | {name: np.full(len(settings), value) for name, value in fixed.items()}
    return Queue(evaluate, space.lengths, space.kind, **columns)


def _columns(settings: Sequence[Settings]) -> dict[str, np.ndarray]:
    names = [variable.name for variable in settings[0].variables]
    return {name: np.asarray([getattr(one, name) for one in settings]) for name in names}


def _spread(points: Sequence[Point]) -> list[Point]:
    """At most NUM_CANDIDATES of them, evenly along the frontier, the last one among them."""
    indices = np.unique(np.round(np.linspace(0, len(points) - 1, NUM_CANDIDATES)).astype(int))
    return [points[i] for i in indices]
