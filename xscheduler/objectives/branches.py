"""Search the placements of all policies for the highest arrival rate, by branch and bound.

A branch is a placement under a policy, with all settings. Its first bound is the placement's
(`xscheduler.placement_bounds`, one call for thousands of placements). Its refined bound is the highest throughput at
saturation of any settings under loosened latency bounds (`xscheduler.arrival_bounds`), found by branch and bound over
boxes of settings. To settle a branch, its best settings in closed form are simulated. A branch is dropped once its
bound does not exceed the best simulated rate.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from xgpt.core.progress import Progress
from xgpt.core.schema import Constraint, PlanDraft, PolicySettings
from xscheduler.arrival_bounds import GroupTimes, PromptSteps, Waits, loosened, paced, shortened
from xscheduler.box_bounds import breach
from xscheduler.candidates import Candidates
from xscheduler.search.branch_and_bound import UpperBound, upper_bound
from xscheduler.search.checked import NUM_BOXES
from xscheduler.space import Left, Space, columns_of
from xscheduler.tolerances import TOLERANCES
from xsimulator.costs.curves import Array
from xsimulator.forecast import CHOICES
from xsimulator.forecast.base import Ints

BOUND = (
    "the throughput, by Little's law, of an engine that is never idle and keeps the same bounds, on monotone step times"
)
WAIT_STEPS = 5
"""Number of bisection steps to find the rate at which waiting leaves too little time."""
NUM_SIZES = 24
MANY = 10**9
MOST_PREDICTIONS = 3_000_000
"""Branches are no longer bounded after this many predictions. Most problems take far fewer."""
FAR_BELOW = 0.9
"""A search for a bound ends once the bound is below this share of the simulated rate. How far below does not matter."""


@dataclass
class Branch:
    """A placement under a policy.

    Attributes:
        bound: upper bound on the rate of all settings, in requests a second. The search tightens it.
        in_steps: True if any step of a micro-batch may encode prompts and the steps of a micro-batch do not overlap.
        prompt_s: lower bound on the slowest stage's seconds for a prompt of the mean length, if a single stage encodes
            prompts one by one. Otherwise None.
    """

    kind: str
    space: Space
    relaxed: Space
    bound: float
    in_steps: bool = False
    prompt_s: float | None = None
    is_refined: bool = False
    predictions: int = 0
    _searched: list[_Searched] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._at_rate = np.inf, self.relaxed  # the lowest rate so far, and the relaxed space at it

    @property
    def alike(self) -> Hashable:
        """A key that is equal for branches that differ only in the name of their policy."""
        placement = self.space.placement
        other = tuple(sorted((name, value) for name, value in placement.fixed.items() if name != "allocation"))
        return CHOICES[self.kind].settings, placement.layouts, placement.replicas, other

    @property
    def evaluations(self) -> int:
        return min(self.space.evaluations + self.relaxed.evaluations, self.space.num_points)

    def refine(self, at_least: float, waits: Waits | None) -> None:
        """Tighten the bound by including the waits at the rate `at_least`. The bound does not fall below this rate.

        At a higher rate, requests wait longer, so less time remains for decoding. So the highest throughput in the time
        that remains at `at_least` is an upper bound on all higher rates. If it is below `at_least`, no settings sustain
        `at_least`.
        """
        self.bound, self.is_refined = min(self.bound, max(self._served(at_least, at_least, waits), at_least)), True

    def tighten(self, at_least: float, waits: Waits | None) -> None:
        low = at_least
        self.refine(at_least, waits)
        for _ in range(WAIT_STEPS):
            if self.bound <= (1 + TOLERANCES.close) * low or waits is None:
                break
            rate = (low + self.bound) / 2
            served = self._served(rate, rate, waits)
            if served <= rate:
                self.bound = rate
            else:
                low, self.bound = rate, min(self.bound, served)

    def breach(self, rate: float, waits: Waits | None, settings: PolicySettings) -> float:
        """Return the share by which a rate that was simulated with these settings, or a point of a drawn box, exceeds
        its bound.
        """
        by_point = breach(self.relaxed, NUM_BOXES, np.random.default_rng(0))
        if waits is None:
            own = self.relaxed.evaluate(columns_of(settings))
            if own.feasible[0] and own.throughput[0] >= rate:
                return by_point  # the bound is at least the throughput of its points
        at = high = rate
        if self._left(rate, waits).max() <= 0:  # then the bound is the highest rate at which waiting leaves any time
            at = FAR_BELOW * rate
            for _ in range(WAIT_STEPS):
                middle = (at + high) / 2
                at, high = (middle, high) if self._left(middle, waits).max() > 0 else (at, middle)
        served = min(self._served(at, FAR_BELOW * rate, waits), high)
        return max(by_point, rate / max(served, 1e-9) - 1)

    @cached_property
    def _steps(self) -> PromptSteps:
        budgets = np.asarray([MANY]) if self._sizes is None else self._sizes[1]
        micro = self.space.placement.microbatches
        return PromptSteps(self.relaxed.models.floor.lane, self.space.lengths, budgets / micro, micro)

    @cached_property
    def _sizes(self) -> tuple[str, Ints] | None:
        """The variable on which waiting depends, and its values."""
        for axis in self.relaxed.axes:
            if axis.variable.name == "token_budget":
                return axis.variable.name, axis.values
            if axis.variable.name == "encode_batch" and self._has_lanes:
                chosen = np.unique(np.geomspace(1, len(axis.values), NUM_SIZES).round().astype(int) - 1)
                return axis.variable.name, axis.values[chosen]
        return None

    @property
    def _has_lanes(self) -> bool:
        return len(self.space.placement.layouts) == 2

    @cached_property
    def _prompts_s(self) -> tuple[list[float], Array]:
        assert self._sizes is not None
        floor = self.relaxed.models.floor
        return floor.prompt_s(self._sizes[1].astype(float)).tolist(), floor.through_s()

    @cached_property
    def _group_times(self) -> GroupTimes:
        assert self._sizes is not None
        models, sizes = self.relaxed.models, self._sizes[1].astype(float)
        least_s, alone_s = models.floor.group_times(sizes)
        return GroupTimes(least_s, alone_s, models.model.longest_s(sizes))

    def _served(self, rate: float, at_least: float, waits: Waits | None) -> float:
        left = self._left(rate, waits)
        most = float(left.max())
        if most <= 0:
            return at_least
        relaxed = self._relaxed_at(rate)
        if left.min() <= 1 - TOLERANCES.close:
            by_size = None if self._sizes is None or len(left) == 1 else Left(*self._sizes, left / most)
            relaxed = relaxed.under(shortened(relaxed.constraint, most), relaxed.bound, between=True, left=by_size)
        for known in self._searched:
            if known.holds(relaxed, left, at_least):
                return max(known.bound.throughput, at_least)
        bound = upper_bound([relaxed], at_least)
        self.predictions += bound.predictions
        self._searched.append(_Searched(left, at_least, bound))
        return bound.throughput

    def _relaxed_at(self, rate: float) -> Space:
        """Return the relaxed space. If prompts have a lane, the bound on TPOT is tighter the higher the rate."""
        relaxed, constraint = self.relaxed, self.relaxed.constraint
        if not self._has_lanes or constraint.tpot_s is None or relaxed.models.floor.decode.has_encoder:
            return relaxed
        if rate < self._at_rate[0]:
            self._searched.clear()
            of_one = rate / self.space.placement.replicas
            bounds = paced(constraint, self.space.lengths, relaxed.models.floor.moving_s, of_one)
            self._at_rate = rate, relaxed.under(bounds, relaxed.bound, between=True)
        return self._at_rate[1]

    def _left(self, rate: float, waits: Waits | None) -> Array:
        of_one = rate / self.space.placement.replicas
        if waits is not None and self.in_steps:
            return waits.left_by_budget(self._steps, of_one)
        if waits is not None and self.space.placement.num_groups > 1:
            return waits.left_in_groups(self.space.placement.num_groups, self._group_times, of_one)
        if waits is not None and self._has_lanes:
            prompts_s, through_s = self._prompts_s
            return np.asarray([waits.left(prompt_s, of_one, through_s) for prompt_s in prompts_s])
        if waits is not None and self.prompt_s is not None:
            return np.asarray([waits.left(self.prompt_s, of_one)])
        return np.ones(1)


class _Searched(NamedTuple):
    """A search of a branch's settings. `left` is, for each token budget, the share of the latency bound that settings
    may use. `at_least` is the rate at which the search began, and `bound` its result.
    """

    left: Array
    at_least: float
    bound: UpperBound

    def holds(self, relaxed: Space, left: Array, at_least: float) -> bool:
        """Return whether this bound can be reused: it is valid if settings may use at most the shares `left` of the
        latency bound, and a new search could not lower it.

        A new search could not lower it if the best point found is still allowed: the bound exceeds this point's
        throughput by no more than the precision of a search.
        """
        throughput, best = self.bound.throughput, self.bound.best
        if (left > self.left).any():
            return False
        if throughput <= at_least:
            return True
        if throughput <= self.at_least:  # the search only found that no settings exceed the rate at its start
            return False
        if np.array_equal(left, self.left):
            return True
        if best is None or best.settings is None or throughput > (1 + TOLERANCES.target_gap) * best.throughput:
            return False
        return bool(relaxed.evaluate(columns_of(best.settings)).feasible[0])


class Branches:
    """All branches of some policies."""

    def __init__(
        self, candidates: Candidates, kinds: Sequence[str], constraint: Constraint, progress: Progress | None = None
    ) -> None:
        relaxed = loosened(constraint, candidates.lengths)
        under = candidates.under(relaxed)
        self.best_rate = 0.0
        self._constraint, self._lengths = constraint, candidates.lengths
        self._waits: Waits | None = None
        self._progress, self._num_bounded = progress, 0
        self._refined: dict[Hashable, float] = {}
        self.all = [
            _branch(candidates, kind, space.under(constraint, space.bound), other)
            for kind in kinds
            for space, other in zip(candidates.spaces(kind), under.spaces(kind, between=True), strict=True)
        ]

    def count_waits(self) -> None:
        """This is valid only if requests enter in order of arrival."""
        self._waits = Waits(self._constraint, self._lengths)

    def breach(self, space: Space, plan: PlanDraft, rate: float, *, waits: bool = True) -> float:
        return self.of(space).breach(rate, self._waits if waits else None, plan.policy)

    def spaces(self, kind: str) -> list[Space]:
        return [branch.space for branch in self.all if branch.kind == kind]

    def of(self, space: Space) -> Branch:
        return next(one for one in self.all if (one.kind, one.space.placement) == (space.kind, space.placement))

    @property
    def is_spent(self) -> bool:
        return sum(branch.predictions for branch in self.all) >= MOST_PREDICTIONS

    def open(self) -> Iterator[Branch]:
        """Yield the branches that may sustain a higher rate than the best so far, the highest bound first."""
        heap, yielded = [(-branch.bound, i) for i, branch in enumerate(self.all)], set[Hashable]()
        heapq.heapify(heap)
        while heap and -heap[0][0] > (1 + TOLERANCES.close) * self.best_rate and not self.is_spent:
            _, i = heapq.heappop(heap)
            branch = self.all[i]
            if branch.is_refined:
                if branch.alike not in yielded:
                    yield branch
                yielded.add(branch.alike)
            else:
                self._refine(branch)
                heapq.heappush(heap, (-branch.bound, i))

    def _refine(self, branch: Branch) -> None:
        alike = branch.alike
        if alike not in self._refined:
            self._say(branch)
            branch.refine(self.best_rate, self._waits)
            self._refined[alike] = branch.bound
        branch.bound, branch.is_refined = min(branch.bound, self._refined[alike]), True

    def tighten(self) -> bool:
        """Tighten the bounds of the branches that have the highest bounds. Return False if the predictions ran out."""
        highest, closest = self.best_rate, dict[Hashable, float]()
        for branch in sorted(self.all, key=lambda one: -one.bound):
            if branch.bound <= (1 + TOLERANCES.close) * highest:
                break
            if branch.alike not in closest:
                if self.is_spent:
                    return False
                self._say(branch)
                branch.tighten(highest, self._waits)
                closest[branch.alike] = branch.bound
            branch.bound = min(branch.bound, closest[branch.alike])
            highest = max(highest, branch.bound)
        return True

    def _say(self, branch: Branch) -> None:
        self._num_bounded += 1
        if self._progress is not None:
            parts = max(len(self.all), self._num_bounded)
            self._progress(self._num_bounded, parts, f"bounding the rates of placements: {branch.kind}")

    def most(self, rate: float, kind: str | None = None) -> float:
        return max([rate, *(branch.bound for branch in self.all if kind in (None, branch.kind))])


def _branch(candidates: Candidates, kind: str, space: Space, relaxed: Space) -> Branch:
    placement, in_steps = space.placement, space.forecast.stations.admits_each_step
    one_by_one = len(placement.layouts) == 1 and placement.microbatches == 1 and space.least_requests == 1
    prompt_s = candidates.screen.least_prompt(placement) if one_by_one and not in_steps else None
    return Branch(kind, space, relaxed, relaxed.bound, in_steps, prompt_s)
