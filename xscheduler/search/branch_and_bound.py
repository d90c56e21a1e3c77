"""Search the spaces of a policy by branch and bound over its monotone variables.

This is ExeGPT's Algorithm 1, extended to any number of searched variables, with one incumbent for all placements and
all values of the enumerated variables, and with a certificate. A block is a box of indices on the searched axes. If
throughput and latency are monotone, a block has its highest throughput at its fast corner and its lowest latency at its
slow corner. Tolerances allow for points that are not monotone. The gap does not rely on monotone predictions but on
valid bounds (xscheduler.box_bounds): a block is dropped only if neither its predicted throughput nor its bound beats
the incumbent.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

import numpy as np

from xgpt.core.schema import Ceiling, PolicySettings, SearchMethod
from xscheduler.box_bounds import CORNER, box_bounds, ends_of, least_excess
from xscheduler.space import Evaluation, Ints, Space
from xscheduler.tolerances import TOLERANCES

MAX_PREDICTIONS = 100_000
"""The search ends after this many predictions, on the profile's and on the lower tables together, with the gap so
far.
"""
BLOCKS_AT_ONCE = 24

SMALL = 32
"""A box with at most this many points is not divided. All its points are predicted."""
PARTS = {1: 8, 2: 2}
"""Number of parts into which a block is cut along each variable, by the number of searched variables."""
PARTS_OF_A_BATCH = 16
"""Number of batch sizes to predict from one whole batch size to the next, fractional ones included."""
POINTS_AT_ONCE = 64

Box = tuple[tuple[int, ...], tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search of one policy's spaces.

    Attributes:
        most: no point of the spaces has a higher throughput. None means that nothing is proven.
        method: the method that found the point. It differs from the requested method if that method's bounds were not
            valid.
    """

    space: Space | None = field(compare=False)
    settings: PolicySettings | None
    values: dict[str, float]
    evaluations: int
    most: float | None
    bound: str
    method: SearchMethod = "branch-and-bound"

    @property
    def ceiling(self) -> Ceiling:
        return Ceiling(self.most, self.bound)

    @property
    def throughput(self) -> float:
        return self.values["throughput"] if self.settings else 0.0


@dataclass(order=True, slots=True)
class _Block:
    """A box with its priority in the search. The lowest number comes first."""

    priority: float
    box: Box = field(compare=False)
    bound: float = field(compare=False)
    """Upper bound on the throughput of the box's points. It holds even if predictions are not monotone."""


def _size(box: Box) -> int:
    return prod(last - first + 1 for first, last in zip(box[0], box[1], strict=True))


class _Open:
    """The corners of an open box have been predicted, and the box may contain a better point."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.branches = space.branches()
        self.blocks: list[_Block] = []
        self._cuts: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        low = (0,) * len(space.searched)
        high = tuple(len(axis.values) - 1 for axis in space.searched)
        self.roots = [box for branch in range(len(self.branches)) for box in self._shrunk(low, high, branch)]

    @property
    def priority(self) -> float:
        return -self.blocks[0].priority if self.blocks else 0.0

    def take(self, best: float) -> list[Box]:
        if self.roots:
            roots, self.roots = self.roots, []
            return roots
        taken: list[_Block] = []
        while self.blocks and len(taken) < BLOCKS_AT_ONCE and self.priority > best:
            taken.append(heapq.heappop(self.blocks))
        return [part for block in taken for part in self._parts(block.box)]

    def corners(self, box: Box) -> list[tuple[int, ...]]:
        low, high, _ = box
        return list(product(*zip(low, high, strict=True)))

    def columns(self, points: Sequence[tuple[tuple[int, ...], int]]) -> dict[str, Ints]:
        columns: dict[str, Ints] = {}
        for i, axis in enumerate(self.space.searched):
            columns[axis.variable.name] = axis.values[[point[i] for point, _ in points]]
        for axis in self.space.enumerated:
            name = axis.variable.name
            columns[name] = np.asarray([self.branches[branch][name] for _, branch in points])
        return columns

    def _parts(self, box: Box) -> list[Box]:
        low, high, branch = box
        ranges = [self._cut(i, lo, hi) for i, (lo, hi) in enumerate(zip(low, high, strict=True))]
        return [
            shrunk
            for part in product(*ranges)
            for shrunk in self._shrunk(tuple(first for first, _ in part), tuple(last for _, last in part), branch)
        ]

    def _cut(self, i: int, low: int, high: int) -> list[tuple[int, int]]:
        key = i, low, high
        if key not in self._cuts:
            axes = self.space.searched
            self._cuts[key] = _cut(axes[i].values, low, high, PARTS[len(axes)])
        return self._cuts[key]

    def _shrunk(self, low: tuple[int, ...], high: tuple[int, ...], branch: int) -> list[Box]:
        inside = self.space.within_memory(low, high)
        return [] if inside is None else [(*inside, branch)]


def _cut(values: Ints, low: int, high: int, parts: int) -> list[tuple[int, int]]:
    inside = values[low : high + 1]
    cuts = np.exp(np.linspace(np.log(inside[0]), np.log(inside[-1]), parts + 1)[1:-1])
    starts = inside.searchsorted(cuts, side="right").tolist() if high > low else ()
    edges = [low, *sorted({low + min(max(start, 1), high - low) for start in starts}), high + 1]
    return [(first, after - 1) for first, after in pairwise(edges)]


class _Search:
    def __init__(self, spaces: Sequence[Space], at_least: float = 0.0) -> None:
        self.spaces = spaces
        self.best: SearchResult | None = None
        self.best_throughput = at_least
        self.unexplored = 0.0
        """The highest bound of all blocks that were dropped."""
        self.predictions = 0

    def run(self) -> SearchResult:
        waiting = [(-space.bound / (1 + TOLERANCES.throughput), i) for i, space in enumerate(self.spaces)]
        heapq.heapify(waiting)
        opened: dict[int, _Open] = {}
        while waiting and -waiting[0][0] > self.best_throughput and self.predictions < MAX_PREDICTIONS:
            _, i = heapq.heappop(waiting)
            if i not in opened:
                opened[i] = _Open(self.spaces[i])
            space = opened[i]
            self.divide(space, space.take(self.best_throughput))
            if space.blocks:
                heapq.heappush(waiting, (-space.priority, i))
        for _, i in waiting:
            left = [block.bound for block in opened[i].blocks] if i in opened else [self.spaces[i].bound]
            self.unexplored = max(self.unexplored, *left)
        evaluations = sum(space.evaluations for space in self.spaces)
        if self.best is None:
            return SearchResult(None, None, {}, evaluations, 0.0, CORNER)
        most = max(self.unexplored, self.best_throughput)
        return SearchResult(self.best.space, self.best.settings, self.best.values, evaluations, most, CORNER)

    def divide(self, parent: _Open, boxes: list[Box]) -> None:
        if ends_of(parent.space)[1] is not None:
            self._sweep(parent, [box for box in boxes if _size(box) <= SMALL])
            boxes = [box for box in boxes if _size(box) > SMALL]
        if boxes:
            self._bound(parent, boxes)

    def _sweep(self, parent: _Open, boxes: list[Box]) -> None:
        space = parent.space
        ranges = [[range(lo, hi + 1) for lo, hi in zip(low, high, strict=True)] for low, high, _ in boxes]
        points = [(point, box[2]) for box, inside in zip(boxes, ranges, strict=True) for point in product(*inside)]
        if not points:
            return
        columns = parent.columns(points)
        evaluation = space.evaluate(columns)
        self.predictions += len(points)
        if space.between:
            self._sweep_between(space, columns, evaluation)
        else:
            self._keep_best(space, columns, evaluation)

    def _sweep_between(self, space: Space, columns: dict[str, Ints], evaluation: Evaluation) -> None:
        tolerated = np.where(evaluation.fits, evaluation.throughput * (1 + TOLERANCES.throughput), np.inf)
        chosen = np.flatnonzero(evaluation.in_memory & (tolerated > self.best_throughput))
        if len(chosen):
            chosen = chosen[evaluation.excess_at(chosen) <= TOLERANCES.latency]
        chosen = chosen[np.argsort(-tolerated[chosen], kind="stable")]
        while len(chosen):  # the first points may make the others unnecessary
            now, chosen = chosen[:POINTS_AT_ONCE], chosen[POINTS_AT_ONCE:]
            self._try_parts(space, {name: values[now] for name, values in columns.items()})
            chosen = chosen[tolerated[chosen] > self.best_throughput]

    def _try_parts(self, space: Space, columns: dict[str, Ints]) -> None:
        """Predict the fractional batch sizes that points represent, since a fractional size may have a higher
        throughput than both neighbouring whole sizes.
        """
        parts = space.evaluate_parts(columns, PARTS_OF_A_BATCH)
        self.predictions += 2 * len(parts.throughput)
        served = parts.feasible * parts.throughput
        index = int(served.argmax())
        if served[index] > self.best_throughput:
            self.best_throughput = float(served[index])
            settings = space.settings(columns, index // PARTS_OF_A_BATCH)
            self.best = SearchResult(space, settings, parts.at(index), 0, None, "")

    def _bound(self, parent: _Open, boxes: list[Box]) -> None:
        corners = [parent.corners(box) for box in boxes]
        points = [(point, box[2]) for box, chosen in zip(boxes, corners, strict=True) for point in chosen]
        order = {point: i for i, point in enumerate(dict.fromkeys(points))}  # neighbouring boxes share corners
        columns = parent.columns(list(order))
        evaluation = parent.space.evaluate(columns)
        floor = parent.space.evaluate_floor(columns, evaluation)
        self.predictions += (1 if floor is evaluation else 2) * len(order)
        if not parent.space.between:
            self._keep_best(parent.space, columns, evaluation)
        if len(order) < len(points):
            where = np.asarray([order[point] for point in points])
            same = floor is evaluation
            evaluation = evaluation.take(where)
            floor = evaluation if same else floor.take(where)
        num_corners = len(corners[0])
        slow, fast = ends_of(parent.space)
        bounds = box_bounds(parent.space, evaluation, floor, num_corners, fast)
        least = least_excess(parent.space, floor, num_corners, slow)
        single: list[tuple[tuple[int, ...], int]] = []
        serves_more = parent.space.forecast.promises_too_little(evaluation.performance)
        for k, box in enumerate(boxes):
            at = k * num_corners
            if not evaluation.in_memory[at + slow] or least[k] > TOLERANCES.latency:
                continue
            bound = float(bounds[k])
            if box[0] == box[1]:
                if parent.space.between and bound > self.best_throughput:
                    if serves_more[at]:
                        self.best_throughput = bound
                    else:
                        single.append((box[0], box[2]))
                continue
            promise = bound / (1 + TOLERANCES.throughput)
            if fast is not None and evaluation.fits[at + fast]:
                # If the corner does not fit in memory, its prediction is not used, only the bound.
                tolerated = evaluation.throughput[at + fast] * (1 + TOLERANCES.throughput)
                promise = min(bound, float(tolerated))
            priority = max(promise, bound / (1 + TOLERANCES.target_gap))
            if priority > self.best_throughput:
                heapq.heappush(parent.blocks, _Block(-priority, box, bound))
            else:
                self.unexplored = max(self.unexplored, bound)
        if single:
            self._try_parts(parent.space, parent.columns(single))

    def _keep_best(self, space: Space, columns: dict[str, Ints], evaluation: Evaluation) -> None:
        better = np.flatnonzero(evaluation.fits & (evaluation.throughput > self.best_throughput))
        allowed = better[evaluation.excess_at(better) <= 0] if len(better) else better
        if len(allowed):
            index = int(allowed[evaluation.throughput[allowed].argmax()])
            self.best_throughput = float(evaluation.throughput[index])
            settings = space.settings(columns, index)
            self.best = SearchResult(space, settings, evaluation.at(index), 0, None, "")


def search(spaces: Sequence[Space]) -> SearchResult:
    return _Search(spaces).run()


class UpperBound(NamedTuple):
    """An upper bound on the throughput of all allowed points of some spaces."""

    throughput: float
    best: SearchResult | None
    predictions: int


def upper_bound(spaces: Sequence[Space], at_least: float = 0.0) -> UpperBound:
    box_search = _Search(spaces, at_least)
    box_search.run()
    most = max(box_search.best_throughput, box_search.unexplored)
    return UpperBound(most, box_search.best, box_search.predictions)
