"""Branch and bound over the monotone variables of a policy.

Source: ExeGPT Algorithm 1, with any number of searched variables, an incumbent shared by the enumerated ones, and a
certificate. A block is a box of indices on the searched axes. Where directions hold, its best throughput is at the
corner with every variable at its fast end, and its lowest latency at the opposite corner; tolerances absorb the
points that break a direction. The gap does not rest on directions: it comes from `UnitCostBound`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from xscheduler.bound import UnitCostBound
from xscheduler.search.base import Found
from xscheduler.space import Evaluation, Ints, Space

THROUGHPUT_TOLERANCE = 0.002
"""A block is dropped when its fast corner, raised by this share, does not beat the incumbent."""
LATENCY_TOLERANCE = 0.01
"""A block is dropped when its slow corner breaks a bound by more than this share."""


@dataclass(order=True, slots=True)
class _Block:
    """Boxes ordered by what they promise, the best first."""

    priority: float
    low: tuple[int, ...] = field(compare=False)
    high: tuple[int, ...] = field(compare=False)
    branch: int = field(compare=False)
    bound: float = field(compare=False)
    """Throughput that no point of the box exceeds, whatever the directions."""


class _Search:
    def __init__(self, space: Space) -> None:
        self.space = space
        self.branches = space.branches()
        self.bound = UnitCostBound(space.model, space.limits.max_batch)
        self.best: Found | None = None
        self.best_throughput = 0.0
        self.unexplored = 0.0
        """The highest bound of a block that was dropped without predicting all of its points."""
        self.queue: list[_Block] = []

    def run(self) -> Found:
        axes = self.space.searched
        low = tuple(0 for _ in axes)
        high = tuple(len(axis.values) - 1 for axis in axes)
        self.add([(low, high, branch) for branch in range(len(self.branches))])
        while self.queue:
            block = heapq.heappop(self.queue)
            if -block.priority <= self.best_throughput:
                self.unexplored = max(self.unexplored, block.bound)
                continue
            self.add([(low, high, block.branch) for low, high in self._halves(block)])
        if self.best is None:
            return Found(None, {}, self.space.evaluations, 0.0, self.bound.name)
        gap = max(0.0, self.unexplored / self.best_throughput - 1)
        best = self.best
        return Found(best.settings, best.values, self.space.evaluations, gap, self.bound.name)

    def add(self, boxes: list[tuple[tuple[int, ...], tuple[int, ...], int]]) -> None:
        """Predict the corners of new blocks in one call; keep the incumbent, queue what may beat it."""
        corners = [self._corners(low, high) for low, high, _ in boxes]
        points = [(point, branch) for (_, _, branch), of_box in zip(boxes, corners, strict=True) for point in of_box]
        columns = self._columns(points)
        evaluation = self.space.evaluate(columns)
        self._keep_best(columns, evaluation)
        start = 0
        for (low, high, branch), of_box in zip(boxes, corners, strict=True):
            slow, fast = start, start + len(of_box) - 1
            start += len(of_box)
            if not self._may_be_feasible(evaluation, slow):
                continue
            bound = self.bound.of(self.space, {name: int(column[fast]) for name, column in columns.items()})
            if low == high:
                continue
            if evaluation.feasible[fast]:
                self.unexplored = max(self.unexplored, bound)
                continue
            # Outside memory the corner predicts nothing: only the bound speaks for the block.
            promise = evaluation.performance.throughput[fast] * (1 + THROUGHPUT_TOLERANCE)
            promise = min(bound, promise) if evaluation.fits[fast] else bound
            heapq.heappush(self.queue, _Block(-promise, low, high, branch, bound))

    def _corners(self, low: tuple[int, ...], high: tuple[int, ...]) -> list[tuple[int, ...]]:
        """All corners, from the slow one (lowest throughput and latency) to the fast one."""
        ends = [
            (lo, hi) if axis.variable.throughput == "rises" else (hi, lo)
            for axis, lo, hi in zip(self.space.searched, low, high, strict=True)
        ]
        return list(product(*ends))

    def _columns(self, points: list[tuple[tuple[int, ...], int]]) -> dict[str, Ints]:
        columns: dict[str, Ints] = {}
        for i, axis in enumerate(self.space.searched):
            columns[axis.variable.name] = np.asarray([axis.values[point[i]] for point, _ in points])
        for axis in self.space.enumerated:
            name = axis.variable.name
            columns[name] = np.asarray([self.branches[branch][name] for _, branch in points])
        return columns

    def _keep_best(self, columns: dict[str, Ints], evaluation: Evaluation) -> None:
        throughput = np.where(evaluation.feasible, evaluation.performance.throughput, -np.inf)
        index = int(throughput.argmax())
        if throughput[index] > self.best_throughput:
            self.best_throughput = float(throughput[index])
            settings = self.space.settings(columns, index)
            self.best = Found(settings, evaluation.performance.at(index), 0, None, "")

    def _may_be_feasible(self, evaluation: Evaluation, slow: int) -> bool:
        return bool(evaluation.fits[slow] and evaluation.excess[slow] <= LATENCY_TOLERANCE)

    def _halves(self, block: _Block) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Cut the axis that spans the larger ratio of values."""
        spans = [
            axis.values[hi] / axis.values[lo]
            for axis, lo, hi in zip(self.space.searched, block.low, block.high, strict=True)
        ]
        i = int(np.argmax(spans))
        values = self.space.searched[i].values
        lo, hi = block.low[i], block.high[i]
        middle = int(np.searchsorted(values, np.sqrt(values[lo] * values[hi]), side="right")) - 1
        middle = min(max(middle, lo), hi - 1)
        return [
            (block.low, (*block.high[:i], middle, *block.high[i + 1 :])),
            ((*block.low[:i], middle + 1, *block.low[i + 1 :]), block.high),
        ]


def search(space: Space) -> Found:
    """Find the best allowed point, with the gap to what the bound leaves open."""
    return _Search(space).run()
