"""The integer space of one policy on one placement: which settings exist, fit in memory and keep the constraint."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from xgpt.schema import (
    Constraint,
    EngineSpec,
    KvPromise,
    ModelSpec,
    PolicySettings,
    Variable,
)
from xscheduler.box_bounds import excess_of
from xscheduler.placement import Placement
from xsimulator.forecast import CHOICES, FORECASTS, Performance
from xsimulator.forecast.base import Ints, Room
from xsimulator.lengths import Lengths
from xsimulator.memory import LaneMemory, capacity

Array = npt.NDArray[np.float64]

POLICIES: dict[str, type[Any]] = {kind: forecast.settings for kind, forecast in FORECASTS.items()}
"""The settings of every policy that the search knows."""

UNCUT = "an encoder reads a prompt whole, so its prompts cannot be cut in chunks"


def runnable(kinds: Iterable[str], model: ModelSpec) -> tuple[str, ...]:
    """Return those of some policies that a model can run under: see `UNCUT`."""
    return tuple(kind for kind in kinds if not (CHOICES[kind].cuts_prompts and model.is_encoder_decoder))


POINTS_AT_ONCE = 20_000
"""Points of a sweep that are predicted in one call."""


@dataclass(frozen=True)
class SpaceLimits:
    """What bounds the space from outside.

    Attributes:
        memory: of the lane that decodes.
        encode_memory: of WAA's encode lane.
        block_size: tokens a K/V block.
        kv: how memory is promised to requests. Static batches are always set aside whole.
        max_batch: requests in a micro-batch at most that the profile, the runner and the engine are made for.
        engine: that runs the plan; None: any.
        fixed: values that control variables are held at.
    """

    memory: LaneMemory
    block_size: int
    kv: KvPromise = "reserve"
    max_batch: int = 512
    engine: EngineSpec | None = None
    encode_memory: LaneMemory | None = None
    fixed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Axis:
    """The values of one control variable."""

    variable: Variable
    values: Ints


@dataclass(frozen=True)
class Models:
    """What predicts a placement's settings: on the profile's tables, and on the lower tables below them."""

    model: Any
    floor: Any


@dataclass(frozen=True)
class Wish:
    """What a user asks for beyond throughput and the constraint.

    Attributes:
        objective: what is to be as high as can be, for each point; None: throughput.
        accepts: which points are allowed; None: all.
    """

    objective: Callable[[Performance], Array] | None = None
    accepts: Callable[[Performance], npt.NDArray[np.bool_]] | None = None


class Space:
    """All settings of one policy on one placement, candidates of a search.

    Variables whose latency is monotone are searched; the others are enumerated (`branches`).

    Args:
        models: called when the first point is predicted.
        wish: a user's own objective and constraint, of which no bound and no direction is known.
    """

    def __init__(
        self,
        kind: str,
        placement: Placement,
        lengths: Lengths,
        models: Callable[[], Models],
        constraint: Constraint,
        limits: SpaceLimits,
        wish: Wish | None = None,
    ) -> None:
        self.kind = kind
        self.forecast = CHOICES[kind]
        self.placement = placement
        self.lengths = lengths
        self.constraint = constraint
        self.limits = limits
        self.fixed = limits.fixed
        self.bound = np.inf
        """Throughput, all replicas together, that no point exceeds."""
        self.wish = wish
        self.kv: KvPromise = "reserve" if self.forecast.reserves_kv else limits.kv
        self._make_models = models
        self._looked_at: list[Ints] = []
        """Numbers of the points that were predicted, call by call."""

    def under(self, constraint: Constraint, bound: float) -> Space:
        """Return the same settings under another constraint, of which none was looked at.

        Args:
            bound: throughput, all replicas together, that no point exceeds.
        """
        other = copy(self)
        other.constraint, other.bound, other._looked_at = constraint, bound, []
        return other

    @cached_property
    def models(self) -> Models:
        return self._make_models()

    @property
    def evaluations(self) -> int:
        """Points of the space that were predicted, each counted once however often that was."""
        return len(np.unique(np.concatenate(self._looked_at))) if self._looked_at else 0

    @cached_property
    def axes(self) -> list[Axis]:
        return [Axis(variable, self._values(variable.name)) for variable in self.forecast.settings.variables]

    @cached_property
    def searched(self) -> list[Axis]:
        return [axis for axis in self.axes if axis.variable.latency != "none"]

    @cached_property
    def enumerated(self) -> list[Axis]:
        return [axis for axis in self.axes if axis.variable.latency == "none"]

    def _values(self, name: str) -> Ints:
        return np.asarray([self.fixed[name]]) if name in self.fixed else self.forecast.values(name, self._room)

    @property
    def _room(self) -> Room:
        micro = self.placement.microbatches
        limits = self.limits
        return Room(self.lengths, micro, self.least_requests, self.capacity, limits.max_batch, limits.engine)

    @cached_property
    def least_requests(self) -> int:
        """No micro-batch goes without a request."""
        return max(self.placement.microbatches, self.placement.fixed.get("encode_microbatches", 1))

    @cached_property
    def capacity(self) -> float:
        """Requests that may hold K/V at once when steps have no activations to speak of."""
        limits = self.limits
        at_rest = _at_rest(limits.memory, self.lengths, limits.block_size, self.kv)
        return float(min(at_rest, limits.max_batch * self.placement.microbatches))

    def capacity_beside(self, step_tokens: Array) -> Array:
        """Requests that may hold K/V at once when the largest step has `step_tokens` tokens."""
        limits = self.limits
        # WAA's prompts are encoded elsewhere: its decode steps are small.
        blocks = limits.memory.blocks_beside(
            step_tokens if limits.encode_memory is None else np.zeros_like(step_tokens)
        )
        in_memory = capacity(self.lengths, blocks, limits.block_size, self.kv, limits.memory.kept_blocks)
        return np.minimum(in_memory, limits.max_batch * self.placement.microbatches)

    def prompts_fit(self, encode_tokens: Array, step_tokens: Array) -> npt.NDArray[np.bool_]:
        """Whether WAA's encode lane holds a batch in each of its stages and one in transfer."""
        memory = self.limits.encode_memory
        if memory is None:
            return np.ones(len(encode_tokens), bool)
        held = (len(memory.lane) + 1) * encode_tokens * (1 + self.limits.block_size / 2 / self.lengths.mean_input)
        return held <= (memory.blocks_beside(step_tokens) - memory.kept_blocks) * self.limits.block_size

    def branches(self) -> list[dict[str, int]]:
        """One assignment of the enumerated variables each."""
        names = [axis.variable.name for axis in self.enumerated]
        return [dict(zip(names, values, strict=True)) for values in product(*(axis.values for axis in self.enumerated))]

    @cached_property
    def lines(self) -> tuple[Axis | None, Axis, Ints]:
        """The points as lines along one variable: the other one, this one, and how many of its values each line has."""
        inner = next(axis for axis in self.axes if axis.variable.name == self.forecast.line)
        outer = next((axis for axis in self.axes if axis is not inner), None)
        if outer is None:
            return None, inner, np.asarray([len(inner.values)])
        counts = self.forecast.line_counts(outer.values, inner.values, self._room)
        return outer, inner, np.minimum(np.maximum(counts, 0), len(inner.values)).astype(int)

    def within_memory(
        self, low: tuple[int, ...], high: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the least box of indices on the searched axes that holds all of a box's points that have a number.

        None where it holds none.
        """
        if self._line_axes is None:
            return low, high
        i, j, counts = self._line_axes
        # The further along the other variable, the more of this one's values there are.
        first = max(low[j], bisect_right(counts, low[i]))
        last = min(high[i], counts[high[j]] - 1)
        if first > high[j] or last < low[i]:
            return None
        return (low[i], first) if i < j else (first, low[i]), (last, high[j]) if i < j else (high[j], last)

    @cached_property
    def _line_axes(self) -> tuple[int, int, list[int]] | None:
        """Of the searched axes those along and across the lines, and the values of each line."""
        outer, inner, counts = self.lines
        if outer is None or len(self.searched) == 1:
            return None
        return self.searched.index(inner), self.searched.index(outer), counts.tolist()

    @property
    def num_points(self) -> int:
        """Settings that fit in memory, but for what their activations take."""
        return int(self.lines[2].sum())

    def points(self, indices: Ints) -> dict[str, Ints]:
        """Points by their number, 0 to num_points - 1, as columns."""
        outer, inner, counts = self.lines
        if outer is None:
            return {inner.variable.name: inner.values[indices]}
        ends = np.cumsum(counts)
        line = np.searchsorted(ends, indices, side="right")
        along = indices - (ends - counts)[line]
        return {inner.variable.name: inner.values[along], outer.variable.name: outer.values[line]}

    def _numbers(self, columns: dict[str, Ints]) -> Ints:
        """Return the inverse of `points`, for those of these settings that are points of the space."""
        outer, inner, counts = self.lines
        along = columns[inner.variable.name] - inner.values[0]
        line: Ints = np.zeros_like(along)
        on_line = along >= 0
        if outer is not None:  # settings that were not searched for need lie on none
            values = columns[outer.variable.name]
            line = np.minimum(outer.values.searchsorted(values), len(outer.values) - 1)
            on_line &= outer.values[line] == values
        inside = on_line & (along < counts[line])
        return (np.concatenate([[0], np.cumsum(counts)])[line] + along)[inside]

    def sweep(self) -> Iterator[tuple[dict[str, Ints], Evaluation]]:
        """Yield every point with its prediction, in batches that memory holds."""
        for start in range(0, self.num_points, POINTS_AT_ONCE):
            columns = self.points(np.arange(start, min(start + POINTS_AT_ONCE, self.num_points)))
            yield columns, self.evaluate(columns)

    def grid_points(self, num_points: int) -> dict[str, Ints]:
        """Return about `num_points` points at most, on a grid that is even on a logarithmic scale, as columns."""
        values_per_axis = round(num_points ** (1 / len(self.axes)))
        picked = []
        for axis in self.axes:
            indices = np.unique(np.round(np.geomspace(1, len(axis.values), values_per_axis)).astype(int) - 1)
            picked.append(axis.values[indices])
        grids = np.meshgrid(*picked, indexing="ij")
        return {axis.variable.name: grid.ravel() for axis, grid in zip(self.axes, grids, strict=True)}

    def slowest_points(self) -> dict[str, Ints]:
        """Return the points of lowest latency, one for each branch: every searched variable at its slow end."""
        branches = self.branches()
        columns = {name: np.asarray([branch[name] for branch in branches]) for name in branches[0]}
        for axis in self.searched:
            slow = axis.values[0] if axis.variable.latency == "rises" else axis.values[-1]
            columns[axis.variable.name] = np.full(len(branches), slow)
        return columns

    def evaluate(self, columns: dict[str, Ints]) -> Evaluation:
        """Predict points and judge them."""
        self._looked_at.append(self._numbers(columns))
        return self._evaluate(self.models.model, columns)

    def evaluate_floor(self, columns: dict[str, Ints], evaluation: Evaluation) -> Evaluation:
        """Return the same points' predictions on the lower tables: periods and latencies that no point falls below."""
        if self.models.floor is self.models.model:
            return evaluation
        return self._evaluate(self.models.floor, columns)

    def _evaluate(self, model: Any, columns: dict[str, Ints]) -> Evaluation:
        size = len(next(iter(columns.values())))
        fixed = {name: np.full(size, value) for name, value in self.placement.fixed.items() if "microbatches" in name}
        return Evaluation(self.forecast.evaluate(model, **columns, **fixed), self)

    def settings(self, columns: dict[str, Ints], index: int) -> PolicySettings:
        values = {name: int(column[index]) for name, column in columns.items()}
        return self.forecast.settings.model_validate(values | self.placement.fixed)


@lru_cache(maxsize=4096)
def _at_rest(memory: LaneMemory, lengths: Lengths, block_size: int, kv: KvPromise) -> float:
    """Requests that a lane holds where steps have no activations: the same for all placements on it."""
    return float(capacity(lengths, memory.blocks_beside(np.zeros(1)), block_size, kv, memory.kept_blocks)[0])


class Evaluation:
    """Predictions of some points, and which of them are allowed."""

    def __init__(self, performance: Performance, space: Space) -> None:
        self.performance = performance
        self._constraint = space.constraint
        self._space = space

    @cached_property
    def throughput(self) -> Array:
        """Requests a second, all replicas together."""
        return self._space.placement.replicas * self.performance.throughput

    @cached_property
    def score(self) -> Array:
        """What is to be as high as can be: throughput, or a user's own objective."""
        wish = self._space.wish
        return self.throughput if wish is None or wish.objective is None else wish.objective(self.performance)

    def take(self, indices: Ints) -> Evaluation:
        """These points, in this order, with what is known of them."""
        taken = Evaluation(self.performance.take(indices), self._space)
        taken.__dict__.update({name: of[indices] for name, of in vars(self).items() if isinstance(of, np.ndarray)})
        return taken

    def at(self, index: int) -> dict[str, float]:
        """One point's predictions, by name; the throughput is that of all replicas."""
        return self.performance.at(index) | {"throughput": float(self.throughput[index])}

    @cached_property
    def fits(self) -> npt.NDArray[np.bool_]:
        """In memory, and as the policy allows."""
        return self.in_memory & self._space.forecast.is_allowed(self.performance)

    @cached_property
    def in_memory(self) -> npt.NDArray[np.bool_]:
        """What does not hold at a box's smallest settings holds nowhere in it. It depends on no table of times."""
        performance, space = self.performance, self._space
        fits = performance.peak_requests <= space.capacity_beside(performance.peak_tokens)
        return fits & space.prompts_fit(performance.encode_tokens, performance.peak_tokens)

    @cached_property
    def excess(self) -> Array:
        """By which share the worst latency exceeds its bound, headroom included; at most 0 where all are kept."""
        of = self.performance
        return excess_of(self._constraint, of.latency, of.ttft, of.tpot)

    @cached_property
    def feasible(self) -> npt.NDArray[np.bool_]:
        wish = self._space.wish
        feasible = self.fits & (self.excess <= 0)
        return feasible if wish is None or wish.accepts is None else feasible & wish.accepts(self.performance)
