"""The integer space of one policy: which settings exist, fit in memory, and keep the constraint."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import numpy.typing as npt

from xgpt.schema import (
    SLICE_TOKENS,
    ChunkedSettings,
    Constraint,
    KvPromise,
    OrcaSettings,
    RraSettings,
    StaticSettings,
    Variable,
)
from xscheduler.bound import INTERVAL_BOUND, UnitCostBound
from xsimulator.analytic import OneLaneModel, Performance
from xsimulator.memory import capacity

Ints = npt.NDArray[np.int_]
Settings = RraSettings | OrcaSettings | ChunkedSettings | StaticSettings

POLICIES: dict[str, type[Settings]] = {
    "rra": RraSettings,
    "chunked": ChunkedSettings,
    "orca": OrcaSettings,
    "static": StaticSettings,
}
"""Every policy that the search knows, in the order of its tables."""

TOKEN_BUDGETS = tuple(sorted({round(2 ** (e / 4) / 8) * 8 for e in range(4 * 5, 4 * 13 + 1)}))
"""Budgets worth telling apart, 32 to 8192 tokens: four to an octave, in multiples of 8."""


@dataclass(frozen=True)
class Limits:
    """What bounds the space from outside.

    Attributes:
        blocks: K/V blocks of the device; block_size: tokens each.
        blocks_per_step_token: blocks that the activations of each token in a step displace.
        kv: how memory is promised to requests. Static batches are always set aside whole.
        max_batch: requests at once that the profile and the runner are made for.
    """

    blocks: int
    block_size: int
    blocks_per_step_token: float = 0.0
    kv: KvPromise = "reserve"
    max_batch: int = 512


@dataclass(frozen=True)
class Axis:
    """The values of one control variable."""

    variable: Variable
    values: tuple[int, ...]


class Space:
    """All settings of one policy, the candidates of a search.

    Variables whose throughput is monotone are searched; the others are enumerated (`branches`).
    """

    bound_name = INTERVAL_BOUND

    def __init__(
        self,
        kind: str,
        model: OneLaneModel,
        constraint: Constraint,
        limits: Limits,
        floor: OneLaneModel | None = None,
    ) -> None:
        self.kind = kind
        self.model = model
        self.floor = floor or model
        """Predicts on tables below the profile's that never fall (xscheduler.minorant)."""
        self.constraint = constraint
        self.limits = limits
        self.kv: KvPromise = "reserve" if kind == "static" else limits.kv
        self.capacity = float(self.capacity_beside(0))
        """Requests that may hold K/V at once, beside the smallest steps."""
        self.evaluations = 0
        self._axes = [Axis(variable, self._values(variable.name)) for variable in POLICIES[kind].variables]
        self.searched = [axis for axis in self._axes if axis.variable.throughput != "none"]
        self.enumerated = [axis for axis in self._axes if axis.variable.throughput == "none"]

    def _values(self, name: str) -> tuple[int, ...]:
        lengths = self.model.lengths
        if name == "token_budget":
            return tuple(b for b in TOKEN_BUDGETS if b <= 2 * self.limits.max_batch * lengths.max_input)
        if name == "decode_iterations":
            return tuple(range(1, max(2, lengths.max_output)))
        return tuple(range(1, self.limits.max_batch + 1))

    @cached_property
    def bound(self) -> float:
        """Throughput that no point exceeds."""
        corner = {
            axis.variable.name: axis.values[-1 if axis.variable.throughput != "falls" else 0] for axis in self._axes
        }
        return UnitCostBound(self.floor, self.limits.max_batch).of(self, corner)

    def capacity_beside(self, step_tokens: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Requests that may hold K/V at once when the largest step has so many tokens."""
        limits = self.limits
        blocks = self.blocks_beside(step_tokens)
        in_memory = capacity(self.model.lengths, blocks, limits.block_size, self.kv)
        return np.minimum(in_memory, limits.max_batch)

    def blocks_beside(self, step_tokens: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """K/V blocks that remain beside the activations of a step of so many tokens."""
        at_once = np.minimum(step_tokens, SLICE_TOKENS)
        return np.floor(self.limits.blocks - self.limits.blocks_per_step_token * at_once)

    def branches(self) -> list[dict[str, int]]:
        """One assignment of the enumerated variables each."""
        names = [axis.variable.name for axis in self.enumerated]
        return [dict(zip(names, values, strict=True)) for values in product(*(axis.values for axis in self.enumerated))]

    @property
    def num_points(self) -> int:
        size = 1
        for axis in self._axes:
            size *= len(axis.values)
        return size

    def all_points(self) -> dict[str, Ints]:
        """Every point, as columns."""
        grids = np.meshgrid(*(np.asarray(axis.values) for axis in self._axes), indexing="ij")
        return {axis.variable.name: grid.ravel() for axis, grid in zip(self._axes, grids, strict=True)}

    def grid_points(self, num_points: int) -> dict[str, Ints]:
        """At most about so many points, on a grid that is even on a logarithmic scale, as columns."""
        values_per_axis = round(num_points ** (1 / len(self._axes)))
        picked = []
        for axis in self._axes:
            last = len(axis.values) - 1
            indices = np.unique(np.round(np.geomspace(1, last + 1, values_per_axis)).astype(int) - 1)
            picked.append(np.asarray(axis.values)[indices])
        grids = np.meshgrid(*picked, indexing="ij")
        return {axis.variable.name: grid.ravel() for axis, grid in zip(self._axes, grids, strict=True)}

    def slowest_points(self) -> dict[str, Ints]:
        """The points of lowest latency, one for each branch: every searched variable at its slow end."""
        branches = self.branches()
        columns = {name: np.asarray([branch[name] for branch in branches]) for name in branches[0]}
        for axis in self.searched:
            slow = axis.values[0] if axis.variable.throughput == "rises" else axis.values[-1]
            columns[axis.variable.name] = np.full(len(branches), slow)
        return columns

    def evaluate(self, columns: dict[str, Ints]) -> Evaluation:
        """Predict points and judge them."""
        performance = self.model.evaluate(self.kind, **columns)
        self.evaluations += len(performance.throughput)
        return Evaluation(performance, self)

    def evaluate_floor(self, columns: dict[str, Ints], evaluation: Evaluation) -> Evaluation:
        """The same points' predictions on the minorant tables: periods and latencies that no point falls below."""
        if self.floor is self.model:
            return evaluation
        self.evaluations += len(evaluation.performance.throughput)
        return Evaluation(self.floor.evaluate(self.kind, **columns), self)

    def settings(self, columns: dict[str, Ints], index: int) -> Settings:
        return POLICIES[self.kind].model_validate({name: int(column[index]) for name, column in columns.items()})


class Evaluation:
    """Predictions of some points, and which of them are allowed."""

    def __init__(self, performance: Performance, space: Space) -> None:
        self.performance = performance
        self._constraint = space.constraint
        self._space = space

    @cached_property
    def fits(self) -> npt.NDArray[np.bool_]:
        return self.performance.peak_requests <= self._space.capacity_beside(self.performance.peak_tokens)

    @cached_property
    def excess(self) -> npt.NDArray[np.float64]:
        """By which share the worst latency exceeds its bound, headroom included; at most 0 where all are kept."""
        constraint, performance = self._constraint, self.performance
        excess = np.full(len(performance.throughput), -1.0)
        for bound, value in (
            (constraint.latency_bound_s, performance.latency),
            (constraint.ttft_s, performance.ttft),
            (constraint.tpot_s, performance.tpot),
        ):
            if bound is not None:
                excess = np.maximum(excess, value * (1 + constraint.headroom) / bound - 1)
        return excess

    @cached_property
    def feasible(self) -> npt.NDArray[np.bool_]:
        return self.fits & (self.excess <= 0)
