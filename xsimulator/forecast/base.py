"""Define the interface of a policy's closed form.

A forecast has no state. It reads a model (`one_lane.OneLaneModel` or `two_lanes.TwoLaneModel`), which describes the
steps of a placement's lanes under one workload.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import scipy as sp

from xgpt.core.schema import EngineSpec, PlanDraft, PolicySettings
from xsimulator.costs.curves import Array
from xsimulator.forecast.placements import BoundTerms, LeastSteps
from xsimulator.lengths import Lengths

Columns = Mapping[str, Array]
"""Candidate settings: for each control variable, and for the number of micro-batches, a column of values."""
Ints = npt.NDArray[np.int_]
M = TypeVar("M")


class PlacementLimits(NamedTuple):
    """The limits of control variables on a placement.

    Attributes:
        capacity: number of requests whose K/V fits in memory at the same time.
        groups: number of groups that encode prompts.
        between: whether a value also represents fractional values below it, so that the next value counts, too.
    """

    lengths: Lengths
    microbatches: int
    least: int
    capacity: float
    max_batch: int
    engine: EngineSpec | None = None
    between: bool = False
    groups: int = 1


class Stations(NamedTuple):
    """The properties of a policy as a queueing system.

    Attributes:
        admits_each_step: whether every step may admit requests. Otherwise, one step in a cycle admits requests.
        frees_together: whether slots become free together, after a phase or a batch.
        has_encode_lane: whether prompts queue for a lane of their own, which is idle part of the time.
    """

    admits_each_step: bool
    frees_together: bool
    has_encode_lane: bool = False


class Forecast(ABC, Generic[M]):
    """The closed form of one policy.

    Attributes:
        model: function that creates the model for predictions from the lanes' costs (`LaneCost`), the lengths, the
            quantile and `all_requests`.
        line: the control variable whose consecutive integer values form a line of settings. Latency rises or falls
            along the line. A policy has at most two variables, and the other variable selects the line.
        load: the control variable that grows along a load curve. A load curve starts at one request.
        swaps_between_steps: whether an engine can change, between two steps, to any other policy with this property.
    """

    settings: ClassVar[type[Any]]
    model: ClassVar[Callable[..., Any]]
    line: ClassVar[str]
    load: ClassVar[str]
    follows: ClassVar[tuple[str, ...]] = ()
    num_curves: ClassVar[int] = 1
    stations: ClassVar[Stations]
    swaps_between_steps: ClassVar[bool] = False
    reserves_kv: ClassVar[bool] = False
    cuts_prompts: ClassVar[bool] = False

    # Settings ----------------------------------------------------------------------------------------------------

    def microbatches(self, counts: Sequence[int]) -> list[dict[str, int]]:
        return [{"microbatches": count} for count in counts]

    def takes(self, fixed: Mapping[str, Any]) -> bool:
        """Return whether the policy allows the settings that a placement fixes."""
        return True

    def covers(self, settings: PolicySettings) -> bool:
        """Return whether this forecast predicts plans with these settings."""
        return settings.kind == self.settings.model_fields["kind"].default and self.takes(vars(settings))

    def values(self, name: str, room: PlacementLimits) -> Ints:
        return np.arange(room.least, max(room.least, int(room.capacity) + room.between) + 1)

    def line_counts(self, outer: Ints, inner: Ints, room: PlacementLimits) -> npt.NDArray[Any]:
        """Return the number of values of the variable `line` that are allowed with each value of the other variable."""
        return np.full(len(outer), len(inner))

    def curve_values(self, values: Ints) -> Ints:
        """Return those values for which there may be load curves. They are constant along a curve."""
        return values

    def is_allowed(self, found: Performance) -> npt.NDArray[np.bool_]:
        """Return which of the predicted settings the policy allows, whether or not they fit in memory."""
        return np.ones(len(found.throughput), bool)

    # Predictions -------------------------------------------------------------------------------------------------

    def evaluate(self, model: M, **columns: npt.ArrayLike) -> Performance:
        return self.predict(model, {name: np.atleast_1d(np.asarray(values, float)) for name, values in columns.items()})

    @abstractmethod
    def predict(self, model: M, columns: Columns) -> Performance:
        """Return the predictions at saturation for candidates, one for each row of the columns."""

    def estimate(self, model: M, settings: PolicySettings) -> dict[str, float]:
        searched = {variable.name for variable in settings.variables}
        columns = {name: value for name, value in vars(settings).items() if name in searched or "microbatches" in name}
        return self.evaluate(model, **columns).at(0)

    def reestimate(self, plan: PlanDraft, model: M, inside: float) -> dict[str, float]:
        """Return predictions for a plan under other lengths. The plan's settings do not change if K/V still fits."""
        most = min(getattr(plan.policy, self.load), int(inside))
        return self.estimate(model, plan.policy.but(**{self.load: most}))

    def filled(self, columns: Mapping[str, Any], capacity: float) -> Mapping[str, Any]:
        """Return the settings whose predictions bound those of settings that keep memory full. Memory holds `capacity`
        requests on average.
        """
        return columns

    def promises_too_little(self, found: Performance) -> npt.NDArray[np.bool_]:
        """Return which settings may be clearly better than predicted. The search uses upper bounds for them."""
        return np.zeros(len(found.throughput), bool)

    # Bounds ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def placement_terms(self, steps: LeastSteps) -> BoundTerms:
        """Return the terms that bound the throughput of placements with any settings."""

    def box_throughput(
        self, model: M, low: Performance, high: Performance, floor: Performance, microbatches: Array, latency_s: Array
    ) -> Array:
        """Return, for each box, an upper bound on the requests a second of its settings.

        Args:
            model: the model with the lower tables, whose times are lower bounds.
            low, high: predictions for each box's corner with the lowest values, and for the corner with the highest
                values.
            latency_s: the bound on each box's latency, or infinite without a bound.
        """
        return high.encode_batch / floor.cycle

    def box_latencies(
        self, model: M, lesser: Callable[[], Performance], floor: Performance, corners: int, microbatches: float
    ) -> tuple[Array, Array, Array] | None:
        """Return lower bounds on latency, TTFT and TPOT of each box. A box is a range of settings.

        Return None if these bounds are the predictions for the box's slow corner.

        Args:
            model: the model with the lower tables.
            lesser, floor: the model's predictions for the corners of all boxes, box by box, with `corners` entries for
                each box. `floor` predicts each corner's own batch, and `lesser` the smallest batch that the corner
                represents.
        """
        return None


def column(columns: Columns, name: str) -> Array:
    found = columns.get(name)
    return np.ones(len(next(iter(columns.values())))) if found is None else found


@dataclass(frozen=True, slots=True)
class Performance:
    """Predictions for candidates, with one entry for each candidate.

    Attributes:
        latency: time, in s, from admission to the last token of a request whose output length is at the quantile.
        ttft: time, in s, from admission to the first token.
        tpot: mean gap, in s, between the tokens of a request whose output length is at the quantile.
        itl_p99: 99th percentile, in s, of all gaps between tokens.
        encode_batch: mean number of prompts in a step that encodes.
        decode_batch: number of decoding requests (under rra and static, when decoding begins).
        peak_requests: largest number of requests that have K/V at the same time.
        peak_variance: variance of this number. It is 0 if the policy holds the number.
        cycle: time, in s, from one encode step to the next.
        gate: longest time, in s, until the next step that may admit requests while the schedule is busy.
        prompt_s: seconds by which TTFT grows if the request's own prompt is longer by the mean prompt length.
        filling: under rra, seconds of a cycle in which the slowest stage has no step.
    """

    throughput: Array
    latency: Array
    ttft: Array
    tpot: Array
    itl_p99: Array
    encode_batch: Array
    encode_tokens: Array
    decode_batch: Array
    peak_requests: Array
    peak_variance: Array
    peak_tokens: Array
    cycle: Array
    gate: Array
    prompt_s: Array
    bubble: Array
    filling: Array

    def at(self, index: int) -> dict[str, float]:
        return {name: float(getattr(self, name)[index]) for name in Performance.__slots__}

    def take(self, indices: npt.NDArray[np.int_] | slice) -> Performance:
        return Performance(*(getattr(self, name)[indices] for name in Performance.__slots__))


class SizesFirst(Performance):
    """Predictions of which only some fields are known at first. The others are computed once one of them is read."""

    __slots__ = ("_known", "_others")

    def __init__(self, known: dict[str, Array], others: Callable[[], dict[str, Array]]) -> None:
        for name, values in {"_known": known, "_others": others, **known}.items():
            object.__setattr__(self, name, values)

    def __getattr__(self, name: str) -> Any:  # called for a field that is not set
        if name not in Performance.__slots__:
            raise AttributeError(name)
        for field, values in self._others().items():
            object.__setattr__(self, field, values)
        return object.__getattribute__(self, name)

    def take(self, indices: npt.NDArray[np.int_] | slice) -> Performance:
        known = {name: values[indices] for name, values in self._known.items()}
        others = [name for name in Performance.__slots__ if name not in known]
        return SizesFirst(known, lambda: {name: getattr(self, name)[indices] for name in others})


def stack(size: int, parts: list[tuple[Any, Performance]]) -> Performance:
    columns = {}
    for field in fields(Performance):
        column = np.empty(size)
        for where, part in parts:
            column[where] = getattr(part, field.name)
        columns[field.name] = column
    return Performance(**columns)


def upper_deviate(share: npt.ArrayLike) -> Array:
    """Return the 99th percentile of gaps as a standard normal deviate. It refers to the longest `share` of the gaps."""
    return sp.special.ndtri(np.minimum(np.maximum(1 - 0.01 / np.maximum(share, 1e-9), 0.02), 0.99))
