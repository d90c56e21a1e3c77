"""List a policy's settings on one placement, and evaluate which of them fit in memory and keep the constraint."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InputError
from xgpt.core.schema import (
    AdmissionOrder,
    Constraint,
    EngineSpec,
    KvPromise,
    ModelSpec,
    PolicySettings,
    Speculation,
    Variable,
)
from xgpt.core.schema.engine import OF_OTHERS
from xgpt.core.schema.policy import most_running
from xscheduler.expression import Values, value_of
from xscheduler.placement import Placement
from xsimulator.forecast import CHOICES, FORECASTS, TUNED, Performance
from xsimulator.forecast.base import Ints, PlacementLimits
from xsimulator.lengths import Lengths
from xsimulator.memory import LaneMemory, RequestBlocks
from xsimulator.queueing import LoadCurves, highest_rates

Array = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

POLICIES: dict[str, type[Any]] = {kind: forecast.settings for kind, forecast in FORECASTS.items()}
"""The class of settings of every policy that the search knows."""

UNCUT = "an encoder reads a prompt whole, so prompts cannot be cut into chunks"


def runnable(kinds: Iterable[str], model: ModelSpec, speculation: Speculation | None = None) -> tuple[str, ...]:
    """Return the policies in `kinds` that can run the model. Policies that cut prompts are left out if the model has an
    encoder (see `UNCUT`), and policies that need xgpt's scheduler if `speculation` is given.
    """
    able = (kind for kind in kinds if not (CHOICES[kind].cuts_prompts and model.is_encoder_decoder))
    return tuple(kind for kind in able if speculation is None or kind == OF_OTHERS)


def run_by(
    engine: EngineSpec | None,
    speculation: Speculation | None,
    kinds: tuple[str, ...],
    policy: str,
    order: AdmissionOrder | None = None,
) -> tuple[str, ...]:
    """Return the policies in `kinds` that the engine can run, by its own scheduler or xgpt's, which has no drafts.

    Args:
        policy: the choice that includes `kinds`.

    Raises:
        InputError: it runs none of them, or not in this order.
    """
    needs, other = "drafts need", "or leave `speculative` out"
    if engine is not None and not engine.takes_ours:
        needs, other = f"{engine.framework} runs only", "or `engine=vllm`, where xgpt's scheduler runs"
    elif speculation is None:
        return kinds
    found = tuple(kind for kind in kinds if kind == OF_OTHERS)
    says = f"{needs} {OF_OTHERS} in order of arrival: give"
    if policy in TUNED or not found:
        raise InputError("policy", policy, f"{says} `policy={OF_OTHERS}`, {other}")
    if order not in (None, "fcfs"):
        raise InputError("order", order, f"{says} `order=fcfs`, {other}")
    return found


POINTS_AT_ONCE = 20_000


@dataclass(frozen=True)
class SpaceLimits:
    """The limits of a space, apart from its constraint."""

    memory: LaneMemory
    block_size: int
    kv: KvPromise = "reserve"
    max_batch: int = 512
    engine: EngineSpec | None = None
    encode_memory: LaneMemory | None = None
    fixed: Mapping[str, int] = field(default_factory=dict)
    price_per_device_hour: float | None = None


@dataclass(frozen=True)
class Axis:
    variable: Variable
    values: Ints


@dataclass(frozen=True)
class Models:
    """A placement's forecasts: `model` uses the profile's tables. `floor` uses the lower tables
    (`xscheduler.lower_tables`), so its times are lower bounds.
    """

    model: Any
    floor: Any


class Left(NamedTuple):
    """The share of the latency bound that settings may use, by the value of one variable. 0 means that they are not
    allowed.
    """

    name: str
    values: Ints
    shares: Array

    def of(self, columns: Mapping[str, Array | Ints]) -> Array:
        index = self.values.searchsorted(columns[self.name] - 1e-9)
        return self.shares[np.minimum(index, len(self.values) - 1)]


class Space:
    """All settings of one policy on one placement: the points of a search.

    A variable is searched if latency rises or falls with its value. All values of the other variables are enumerated
    (`branches`).
    """

    def __init__(
        self,
        kind: str,
        placement: Placement,
        lengths: Lengths,
        models: Callable[[], Models],
        constraint: Constraint,
        limits: SpaceLimits,
    ) -> None:
        self.kind = kind
        self.forecast = CHOICES[kind]
        self.placement = placement
        self.lengths = lengths
        self.constraint = constraint
        self.limits = limits
        self.fixed = limits.fixed
        self.bound = np.inf
        self.kv: KvPromise = "reserve" if self.forecast.reserves_kv else limits.kv
        self._make_models = models
        self._looked_at: list[Ints] = []
        self.between = False
        self.left: Left | None = None

    def under(self, constraint: Constraint, bound: float, *, between: bool = False, left: Left | None = None) -> Space:
        """Return a space with the same settings under another constraint.

        Args:
            bound: upper bound on the throughput of every point, in requests/s of all replicas together.
            between: whether the space is one of upper bounds. A point with batch size b then represents all batch sizes
                from b - 1 to b, including fractional sizes. The throughput at size b counts as the point's throughput,
                and the smallest size must keep the constraint (`Evaluation.lesser`) and fit in memory on average.
            left: None means that all settings may use the whole latency bound.
        """
        other = copy(self)
        other.constraint, other.bound, other._looked_at = constraint, bound, []
        other.left = left
        if between != self.between:
            other.between = between
            for name in ("capacity", "axes", "searched", "enumerated", "lines", "_line_axes", "num_points"):
                vars(other).pop(name, None)
        return other

    def tightened(self, factor: float) -> Space:
        """Return this space with all bounds multiplied by a factor below 1. Both spaces share `evaluations`."""
        other, headroom = copy(self), (1 + self.constraint.headroom) / factor - 1
        other.constraint = self.constraint.but(headroom=headroom)
        return other

    def sampling_for(self, slots: int) -> Space:
        """Return this space with the memory beside an engine that is started for `slots` requests."""
        other = copy(self)
        other.limits = replace(self.limits, memory=self.limits.memory.sampling_for(slots))
        vars(other).pop("capacity", None)
        return other

    @cached_property
    def models(self) -> Models:
        return self._make_models()

    @property
    def evaluations(self) -> int:
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
    def _room(self) -> PlacementLimits:
        micro = self.placement.microbatches
        limits = self.limits
        least, groups = self.least_requests, self.placement.num_groups
        return PlacementLimits(
            self.lengths, micro, least, self.capacity, limits.max_batch, limits.engine, self.between, groups
        )

    @cached_property
    def least_requests(self) -> int:
        return max(self.placement.microbatches, self.placement.fixed.get("encode_microbatches", 1))

    @cached_property
    def capacity(self) -> float:
        limits = self.limits
        at_rest = float(self.request_blocks.most(limits.memory.blocks_beside(np.zeros(1)))[0])
        return float(min(at_rest, limits.max_batch * self.placement.microbatches))

    @property
    def _on_average(self) -> bool:
        # If memory is short, WAA still decodes while a prompt waits, so a cap up to the mean costs nothing.
        return self.between or (self.limits.encode_memory is not None and self.kv == "reserve")

    @property
    def request_blocks(self) -> RequestBlocks:
        limits, on_average = self.limits, self._on_average
        kept, own = limits.memory.kept_blocks, limits.memory.request_blocks
        return _request_blocks(self.lengths, limits.block_size, self.kv, kept, own, on_average=on_average)

    def _blocks_beside(self, step_tokens: Array) -> Array:
        limits = self.limits
        # WAA's decode lane encodes no prompts, so its steps are small.
        return limits.memory.blocks_beside(step_tokens if limits.encode_memory is None else np.zeros_like(step_tokens))

    def capacity_beside(self, step_tokens: Array) -> Array:
        """Return the number of requests whose K/V fits in memory beside a step of `step_tokens` tokens."""
        in_memory = self.request_blocks.most(self._blocks_beside(step_tokens))
        return np.minimum(in_memory, self.limits.max_batch * self.placement.microbatches)

    def requests_fit(self, performance: Performance) -> Bools:
        """Return whether memory holds the requests of each point, and the longest request by itself."""
        requests, variance = performance.peak_requests, performance.peak_variance
        blocks = self._blocks_beside(performance.peak_tokens)
        longest = ceil((self.lengths.max_whole_input + self.lengths.max_output) / self.limits.block_size)
        fits = self.request_blocks.fit(requests, variance, blocks) & (longest <= blocks)
        return fits & (requests <= self.limits.max_batch * self.placement.microbatches)

    def prompts_fit(self, encode_tokens: Array, step_tokens: Array) -> Bools:
        """Return whether WAA's encode lane has memory for one batch in each stage and one in transfer. It must also
        hold the longest prompt, which would otherwise wait forever.
        """
        memory = self.limits.encode_memory
        if memory is None:
            return np.ones(len(encode_tokens), bool)
        blocks = (len(memory.lane) + 1) * encode_tokens * (1 + self.limits.block_size / 2 / self.lengths.mean_input)
        size = self.limits.block_size
        blocks += (len(memory.lane) + 1) * encode_tokens / self.lengths.mean_input * memory.request_blocks * size
        needed = np.maximum(blocks, ceil(self.lengths.max_whole_input / size) * size)
        return needed <= (memory.blocks_beside(step_tokens) - memory.kept_blocks) * size

    def branches(self) -> list[dict[str, int]]:
        names = [axis.variable.name for axis in self.enumerated]
        return [dict(zip(names, values, strict=True)) for values in product(*(axis.values for axis in self.enumerated))]

    @cached_property
    def lines(self) -> tuple[Axis | None, Axis, Ints]:
        """Divide the points into lines along one variable, one line for each value of the other variable. Return the
        other variable's axis (None if there is none), the axis along the lines, and each line's number of points.
        """
        inner, outer = self._line_and_other
        assert np.all(np.diff(inner.values) == 1), (
            f"{self.kind}: the values of {inner.variable.name}, its line, are not consecutive integers"
        )
        if outer is None:
            return None, inner, np.asarray([len(inner.values)])
        counts = self.forecast.line_counts(outer.values, inner.values, self._room)
        return outer, inner, np.minimum(np.maximum(counts, 0), len(inner.values)).astype(int)

    @property
    def _line_and_other(self) -> tuple[Axis, Axis | None]:
        names = [axis.variable.name for axis in self.axes]
        assert self.forecast.line in names, (
            f"{self.kind}: its line, {self.forecast.line}, is none of its variables {names}"
        )
        assert len(names) <= 2, f"{self.kind}: a space has at most two control variables, not {names}"
        inner, *others = sorted(self.axes, key=lambda axis: axis.variable.name != self.forecast.line)
        assert inner.variable.latency != "none", (
            f"{self.kind}: the latency of {inner.variable.name}, its line, must rise or fall; others are enumerated"
        )
        return inner, others[0] if others else None

    def within_memory(
        self, low: tuple[int, ...], high: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Shrink a box, given as indices on the searched axes, to the points that fit in memory.

        None means that no point fits.
        """
        if self._line_axes is None:
            return low, high
        i, j, counts = self._line_axes
        # The lines get longer as the other variable grows.
        first = max(low[j], bisect_right(counts, low[i]))
        last = min(high[i], counts[high[j]] - 1)
        if first > high[j] or last < low[i]:
            return None
        return (low[i], first) if i < j else (first, low[i]), (last, high[j]) if i < j else (high[j], last)

    @cached_property
    def _line_axes(self) -> tuple[int, int, list[int]] | None:
        outer, inner, counts = self.lines
        if outer is None or len(self.searched) == 1:
            return None
        return self.searched.index(inner), self.searched.index(outer), counts.tolist()

    @cached_property
    def num_points(self) -> int:
        return int(self.lines[2].sum())

    def points(self, indices: Ints) -> dict[str, Ints]:
        outer, inner, counts = self.lines
        if outer is None:
            return {inner.variable.name: inner.values[indices]}
        ends = np.cumsum(counts)
        line = np.searchsorted(ends, indices, side="right")
        along = indices - (ends - counts)[line]
        return {inner.variable.name: inner.values[along], outer.variable.name: outer.values[line]}

    def _numbers(self, columns: dict[str, Ints]) -> Ints:
        outer, inner, counts = self.lines
        along = columns[inner.variable.name] - inner.values[0]
        line: Ints = np.zeros_like(along)
        on_line = along >= 0
        if outer is not None:  # settings that a caller gives need not lie on a line
            values = columns[outer.variable.name]
            line = np.minimum(outer.values.searchsorted(values), len(outer.values) - 1)
            on_line &= outer.values[line] == values
        inside = on_line & (along < counts[line])
        return (np.concatenate([[0], np.cumsum(counts)])[line] + along)[inside]

    def sweep(self) -> Iterator[tuple[dict[str, Ints], Evaluation]]:
        for start in range(0, self.num_points, POINTS_AT_ONCE):
            columns = self.points(np.arange(start, min(start + POINTS_AT_ONCE, self.num_points)))
            yield columns, self.evaluate(columns)

    def grid_points(self, num_points: int) -> dict[str, Ints]:
        values_per_axis = round(num_points ** (1 / len(self.axes)))
        picked = []
        for axis in self.axes:
            indices = np.unique(np.round(np.geomspace(1, len(axis.values), values_per_axis)).astype(int) - 1)
            picked.append(axis.values[indices])
        grids = np.meshgrid(*picked, indexing="ij")
        return {axis.variable.name: grid.ravel() for axis, grid in zip(self.axes, grids, strict=True)}

    def evaluate(self, columns: dict[str, Ints]) -> Evaluation:
        self._looked_at.append(self._numbers(columns))
        return self._evaluate(self.models.model, columns)

    def evaluate_floor(self, columns: dict[str, Ints], evaluation: Evaluation) -> Evaluation:
        """Predict points on the lower tables. The periods and latencies are then lower bounds."""
        if self.models.floor is self.models.model:
            return evaluation
        return self._evaluate(self.models.floor, columns)

    def _evaluate(self, model: Any, columns: dict[str, Ints]) -> Evaluation:
        return self._predicted(model, columns, dict.fromkeys(self._growing(), 1.0) if self.between else {})

    def _predicted(self, model: Any, columns: Mapping[str, Array | Ints], step: Mapping[str, float]) -> Evaluation:
        less = {name: np.maximum(columns[name] - by, self._least(name)) for name, by in step.items()}

        def lesser(chosen: Ints) -> Performance:
            return self._performance(model, {name: values[chosen] for name, values in {**columns, **less}.items()})

        left = None if self.left is None else self.left.of(columns)
        most = self.forecast.filled(columns, self.capacity) if self.between else columns
        return Evaluation(self._performance(model, most), self, left, lesser if step else None)

    def _as_run(self, columns: Mapping[str, Array | Ints]) -> Mapping[str, Array | Ints]:
        engine, is_chosen = self.limits.engine, "token_budget" in columns and "max_batch" not in self.fixed
        if engine is None or (engine.framework, engine.scheduler) != ("vllm", "own") or not is_chosen:
            return columns
        most = most_running(columns["token_budget"], self.placement.microbatches)
        return {**columns, "max_batch": np.minimum(columns["max_batch"], np.maximum(self.least_requests, most))}

    def running(self, columns: Mapping[str, Array | Ints]) -> Mapping[str, Array | Ints]:
        """Return given settings whose limit on running requests is no higher than what memory holds: beyond that, an
        engine with its own scheduler lets requests wait.
        """
        engine, load = self.limits.engine, self.forecast.load
        if engine is None or not engine.runs_alone or "token_budget" not in columns:
            return columns
        most = np.floor(self.capacity_beside(columns["token_budget"] / self.placement.microbatches))
        return {**columns, load: np.minimum(columns[load], np.maximum(self.least_requests, most))}

    def _performance(self, model: Any, columns: Mapping[str, Array | Ints]) -> Performance:
        columns = self._as_run(columns)
        if self.forecast.load in self.fixed:
            columns = self.running(columns)
        size = len(next(iter(columns.values())))
        fixed = {name: np.full(size, value) for name, value in self.placement.fixed.items() if "microbatches" in name}
        return self.forecast.evaluate(model, **columns, **fixed)

    def evaluate_parts(self, columns: dict[str, Ints], count: int) -> Evaluation:
        """Predict fractional batch sizes: for each point, `count` evenly spaced sizes. They begin just above the next
        smaller whole size and end at the point's own size. All are predicted in one call.
        """
        names = self._growing()
        points: dict[str, Array] = {name: np.repeat(values.astype(float), count) for name, values in columns.items()}
        fine = names[-1]
        points[fine] -= np.tile(np.arange(count - 1.0, -1.0, -1.0) / count, len(points[fine]) // count)
        step = {name: 1 / count if name == fine else 1.0 for name in names}
        return self._predicted(self.models.model, {**points, fine: np.maximum(points[fine], self._least(fine))}, step)

    def _growing(self) -> tuple[str, ...]:
        return (self.forecast.load, *self.forecast.follows)

    def _least(self, name: str) -> int:
        return next(int(axis.values[0]) for axis in self.axes if axis.variable.name == name)

    def settings(self, columns: dict[str, Ints], index: int) -> PolicySettings:
        values = {name: int(column[index]) for name, column in self._as_run(columns).items()}
        steadying = {name: self.fixed[name] for name in self.forecast.settings.steadying if name in self.fixed}
        return self.forecast.settings.model_validate(values | self.placement.fixed | steadying)


def columns_of(settings: PolicySettings) -> dict[str, Ints]:
    return {variable.name: np.asarray([getattr(settings, variable.name)]) for variable in settings.variables}


_request_blocks = lru_cache(maxsize=4096)(RequestBlocks.of)


class Evaluation:
    """The predictions of some points, and which of these points are allowed.

    Args:
        left: share of the latency bound that each point may use. None means the whole bound.
        lesser: predicts, for the points with the given indices, the smallest batches that they represent. None means
            that a point represents only itself.
    """

    def __init__(
        self,
        performance: Performance,
        space: Space,
        left: Array | None = None,
        lesser: Callable[[Ints], Performance] | None = None,
    ) -> None:
        self.performance = performance
        self.left: Array = np.ones(len(performance.encode_batch)) if left is None else left
        self._lesser = lesser
        self._constraint = space.constraint
        self._space = space

    @cached_property
    def lesser(self) -> Performance:
        return self.performance if self._lesser is None else self._lesser(np.arange(len(self.left)))

    @cached_property
    def throughput(self) -> Array:
        return self._space.placement.replicas * self.performance.throughput

    @cached_property
    def score(self) -> Array:
        text = self._constraint.maximise
        return self.throughput if text is None else np.broadcast_to(value_of(text, self._figures), len(self.throughput))

    @property
    def _figures(self) -> dict[str, Values]:
        performance, placement = self.performance, self._space.placement
        devices = float(placement.num_devices * placement.replicas)
        return {
            "throughput": self.throughput,
            "tokens": self.throughput * self._space.lengths.mean_output,
            "latency": performance.latency,
            "ttft": performance.ttft,
            "tpot": performance.tpot,
            "gap": performance.itl_p99,
            "running": performance.decode_batch,
            "encode_batch": performance.encode_batch,
            "idle": performance.bubble,
            "devices": devices,
            "replicas": float(placement.replicas),
            "cost": devices * (self._space.limits.price_per_device_hour or np.nan),
        }

    def take(self, indices: Ints) -> Evaluation:
        lesser = self._lesser
        of_taken = None if lesser is None else lambda chosen: lesser(indices[chosen])
        taken = Evaluation(self.performance.take(indices), self._space, None, of_taken)
        if "lesser" in vars(self):
            taken.lesser = self.lesser.take(indices)
        taken.__dict__.update(
            {name: values[indices] for name, values in vars(self).items() if isinstance(values, np.ndarray)}
        )
        return taken

    def at(self, index: int) -> dict[str, float]:
        return self.performance.at(index) | {"throughput": float(self.throughput[index])}

    @cached_property
    def fits(self) -> Bools:
        """Whether each point fits in memory and is allowed by the policy."""
        return self.in_memory & self._space.forecast.is_allowed(self.performance)

    @cached_property
    def in_memory(self) -> Bools:
        """Whether each point fits in memory."""
        performance, space = self.lesser, self._space
        return space.requests_fit(performance) & space.prompts_fit(performance.encode_tokens, performance.peak_tokens)

    @cached_property
    def excess(self) -> Array:
        """Largest share by which a time, headroom included, exceeds its bound. It is at most 0 if all bounds are
        kept.
        """
        return self.excess_at(np.arange(len(self.left)))

    def excess_at(
        self,
        indices: Ints,
        times: Callable[[], tuple[Array, Array, Array] | None] = lambda: None,
        left: Array | None = None,
    ) -> Array:
        """Return `excess` for some of the points, in the given order, without predicting the other points."""
        constraint, left = self._constraint, self.left[indices] if left is None else left
        excess = np.where(left > 0, -1.0, np.inf)
        if not constraint.bounds_latency:
            return excess
        if (given := times()) is None:
            lesser = None if "lesser" in vars(self) else self._lesser
            least = self.lesser.take(indices) if lesser is None else lesser(indices)
            given = least.latency, least.ttft, least.tpot
        latency, ttft, tpot = given
        values = latency / np.maximum(left, 1e-9), ttft, tpot
        for bound, value in zip(constraint.bounds, values, strict=True):
            if bound is not None:
                excess = np.maximum(excess, value * (1 + constraint.headroom) / bound - 1)
        return excess

    def max_rates(self, at_least: float = 0.0, wanted: Bools | None = None, *, only_best: bool = False) -> Array:
        """For points on load curves, compute in closed form the highest arrival rate at which each point keeps the
        bounds, waiting included (`xsimulator.queueing.highest_rates`). It is for all replicas together.

        # [curves, loads]
        """
        space, constraint = self._space, self._constraint
        given, replicas = (space.forecast.stations, self.performance, space.lengths), space.placement.replicas
        curves = [
            LoadCurves(*given, goal, constraint.headroom, groups=space.placement.num_groups)
            for goal in constraint.goals
        ]
        return replicas * highest_rates(curves, at_least / replicas, wanted, only_best=only_best)

    @cached_property
    def feasible(self) -> Bools:
        return self.fits & (self.excess <= 0)
