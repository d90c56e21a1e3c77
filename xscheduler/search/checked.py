"""Search by branch and bound, then test its bounds, and search by another method if the bounds are not valid.

Branch and bound relies on the bounds of boxes (xscheduler.box_bounds). Afterwards, random boxes are drawn in the space
of the best point and in the next most promising space. If a point exceeds the bound of its box, the excess is added to
the upper bound. If the excess is more than a tolerance, the bounds prove nothing. Small spaces are then searched
exhaustively. This proves the result. Larger spaces are also searched by Optuna, and the better of the two points is
returned without a proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from xscheduler.box_bounds import breach
from xscheduler.search import branch_and_bound, optuna_search
from xscheduler.search.branch_and_bound import SearchResult
from xscheduler.space import Space
from xscheduler.tolerances import TOLERANCES

NUM_BOXES = 12

SWEPT = 100_000
"""Spaces of up to this many points are searched exhaustively if bounds are not valid."""


def search(spaces: Sequence[Space]) -> SearchResult:
    """Return the best allowed point. If random points exceed their bounds, its upper bound is raised or dropped."""
    found = branch_and_bound.search(spaces)
    promising = [space for space in sorted(spaces, key=lambda space: -space.bound) if space is not found.space]
    looked_at = [*([found.space] if found.space is not None else []), *promising[:1]]
    rng = np.random.default_rng(0)
    worst = max((breach(space, NUM_BOXES, rng) for space in looked_at), default=0.0)
    evaluations = sum(space.evaluations for space in spaces)
    if worst <= TOLERANCES.breach:
        most = None if found.most is None else found.most * (1 + worst)
        return replace(found, evaluations=evaluations, most=most)
    if sum(space.num_points for space in spaces) <= SWEPT:
        return exhaustive(spaces)
    other = optuna_search.search(spaces)
    best = other if other.throughput > found.throughput else replace(found, evaluations=other.evaluations)
    bound = "none: a sampled point beats the bound of its box"
    return replace(best, method="optuna", most=None, bound=bound)


EVERY_POINT = "every point was predicted"


def exhaustive(spaces: Sequence[Space]) -> SearchResult:
    best, highest = SearchResult(None, None, {}, 0, 0.0, EVERY_POINT), -np.inf
    for space in spaces:
        for columns, evaluation in space.sweep():
            score = np.where(evaluation.feasible, evaluation.score, -np.inf)
            index = int(score.argmax())
            if score[index] > highest:
                highest = float(score[index])
                best = SearchResult(space, space.settings(columns, index), evaluation.at(index), 0, None, EVERY_POINT)
    evaluations = sum(space.evaluations for space in spaces)
    return replace(best, method="exhaustive", evaluations=evaluations, most=best.throughput)
