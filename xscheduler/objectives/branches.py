"""Branch and bound for the highest arrival rate, over the placements of all policies.

A branch is a placement under a policy, with all of its settings. Its bound is at first that of the placement
(`xscheduler.placement_bounds`), from thousands of which one call is made, then that of its settings: the highest
saturated throughput under the loosened bounds (`xscheduler.arrival_bounds`), by branch and bound over boxes of them. A
branch is settled by simulation of its settings that are best in closed form; it is dropped once its bound is not above
the best simulated rate.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from xgpt.core.schema import Constraint
from xscheduler.arrival_bounds import loosened
from xscheduler.box_bounds import breach
from xscheduler.candidates import Candidates
from xscheduler.search.branch_and_bound import upper_bound
from xscheduler.space import Space

BOUND = "Little's law: what an engine that is never idle serves within the same bounds, on monotone tables"
CLOSE = 0.005
"""Branches are not settled whose bound is above the best rate by no more than this share."""
NUM_BOXES = 12
"""Boxes drawn to attack the bounds within the best branch."""


@dataclass
class Branch:
    """A placement under a policy.

    Attributes:
        space: its settings, under the constraint of arriving requests.
        relaxed: the same settings, under the constraint of an engine that is never idle.
        bound: requests a second that no settings keep; it shrinks as the search goes on.
    """

    kind: str
    space: Space
    relaxed: Space
    bound: float
    is_refined: bool = False

    @property
    def evaluations(self) -> int:
        """Number of points that were predicted, under either constraint."""
        return min(self.space.evaluations + self.relaxed.evaluations, self.space.num_points)

    def refine(self, at_least: float) -> None:
        """Bound the settings by branch and bound; no closer than to this rate."""
        self.bound, self.is_refined = min(self.bound, upper_bound([self.relaxed], at_least)), True

    def breach(self, rate: float) -> float:
        """Return the share by which a simulated rate, or a random point, is above what bounds it."""
        by_point = breach(self.relaxed, NUM_BOXES, np.random.default_rng(0))
        return max(by_point, rate / max(upper_bound([self.relaxed]), 1e-9) - 1)


class Branches:
    """All branches of some policies.

    Args:
        constraint: the bounds that arriving requests must keep in the engine.

    Attributes:
        best_rate: the highest simulated rate so far.
    """

    def __init__(self, candidates: Candidates, kinds: Sequence[str], constraint: Constraint) -> None:
        relaxed = loosened(constraint, candidates.lengths)
        under = candidates.under(relaxed)
        self.best_rate = 0.0
        self.all = [
            Branch(kind, space, other, other.bound)
            for kind in kinds
            for space, other in zip(candidates.spaces(kind), under.spaces(kind, between=True), strict=True)
        ]

    def spaces(self, kind: str) -> list[Space]:
        """Return the spaces of a policy."""
        return [branch.space for branch in self.all if branch.kind == kind]

    def of(self, space: Space) -> Branch:
        """Return the branch of a space."""
        return next(one for one in self.all if (one.kind, one.space.placement) == (space.kind, space.placement))

    def open(self) -> Iterator[Branch]:
        """Yield the branches that may keep more than the best rate so far, the highest bound first."""
        heap = [(-branch.bound, i) for i, branch in enumerate(self.all)]
        heapq.heapify(heap)
        while heap and -heap[0][0] > (1 + CLOSE) * self.best_rate:
            _, i = heapq.heappop(heap)
            branch = self.all[i]
            if branch.is_refined:
                yield branch
            else:
                branch.refine(self.best_rate)
                heapq.heappush(heap, (-branch.bound, i))

    def most(self, rate: float) -> float:
        """Return the rate that no settings of any branch keep, or this rate if that is higher."""
        return max((branch.bound for branch in self.all), default=rate)

    def most_of(self, kind: str, rate: float) -> float:
        """Return the rate that no settings of a policy keep, or this rate if that is higher."""
        return upper_bound([branch.relaxed for branch in self.all if branch.kind == kind], rate)
