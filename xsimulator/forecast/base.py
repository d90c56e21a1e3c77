"""The contract of a policy's forecast: all that the planner, the queue and re-planning ask of a policy.

A forecast keeps nothing. What it reads is a model: the steps of a placement's lanes under one workload
(`one_lane.OneLaneModel`, `two_lanes.TwoLaneModel`), which policies on the same lanes share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from xgpt.schema import EngineSpec, Plan, PolicySettings
from xsimulator.costs.curves import Array
from xsimulator.forecast.performance import Performance
from xsimulator.forecast.placements import BoundTerms, LeastSteps
from xsimulator.lengths import Lengths

Columns = Mapping[str, Array]
"""Candidates: a column of values for each control variable, and for micro-batches."""
Ints = npt.NDArray[np.int_]
M = TypeVar("M")


class Room(NamedTuple):
    """What a placement leaves to the control variables.

    Attributes:
        least: requests at least, so that no micro-batch goes without one.
        capacity: requests that may hold K/V at once.
        max_batch: requests in a micro-batch at most.
        engine: that runs the plan; None: any.
    """

    lengths: Lengths
    microbatches: int
    least: int
    capacity: float
    max_batch: int
    engine: EngineSpec | None = None


class Stations(NamedTuple):
    """What requests that arrive meet.

    Attributes:
        admits_each_step: every step may admit some; otherwise once a cycle.
        frees_together: places are free again together, after a phase or a batch.
    """

    admits_each_step: bool
    frees_together: bool


class Forecast(ABC, Generic[M]):
    """One policy.

    Attributes:
        settings: its settings, which declare its control variables.
        model: makes what predictions read, from the lanes' costs (`LaneCost`), the lengths, the quantile and
            `all_requests`.
        line: the variable that numbers settings along a line; another one, if there is one, is the line's own.
        load: the variable that grows along a curve, from one request on.
        follows: variables that shrink with it.
        num_curves: values of another variable at which curves begin.
        stations: what the queue of requests is made of.
        swaps_between_steps: whether an engine goes over to it between two steps, from others that it does so with.
        reserves_kv: whether K/V memory is always set aside whole.
        cuts_prompts: whether steps encode pieces of prompts.
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
        """Return the settings that make each of these numbers of micro-batches."""
        return [{"microbatches": count} for count in counts]

    def takes(self, fixed: Mapping[str, Any]) -> bool:
        """Whether it is planned on a placement with these values of its settings."""
        return True

    def covers(self, settings: PolicySettings) -> bool:
        """Whether a plan of these settings is one of this forecast's."""
        return settings.kind == self.settings.model_fields["kind"].default and self.takes(vars(settings))

    def values(self, name: str, room: Room) -> Ints:
        """The values of a control variable: requests, unless a policy says otherwise."""
        return np.arange(room.least, max(room.least, int(room.capacity)) + 1)

    def line_counts(self, outer: Ints, inner: Ints, room: Room) -> npt.NDArray[Any]:
        """How many of the line variable's values go with each value of the other one."""
        return np.full(len(outer), len(inner))

    def curve_values(self, values: Ints) -> Ints:
        """Values of the other variable at which curves may begin."""
        return values

    def is_allowed(self, found: Performance) -> npt.NDArray[np.bool_]:
        """Which predicted settings go with each other, memory apart."""
        return np.ones(len(found.throughput), bool)

    # Predictions -------------------------------------------------------------------------------------------------

    def evaluate(self, model: M, **columns: npt.ArrayLike) -> Performance:
        """Predict candidates; `columns` are control variables, one entry a candidate. Micro-batches not named are 1."""
        return self.predict(model, {name: np.atleast_1d(np.asarray(of, float)) for name, of in columns.items()})

    @abstractmethod
    def predict(self, model: M, columns: Columns) -> Performance:
        """Predict candidates at saturation, one of them for each entry of the columns."""

    def estimate(self, model: M, settings: PolicySettings) -> dict[str, float]:
        """Predict one plan's settings."""
        searched = {variable.name for variable in settings.variables}
        columns = {name: of for name, of in vars(settings).items() if name in searched or "microbatches" in name}
        return self.evaluate(model, **columns).at(0)

    def reestimate(self, plan: Plan, model: M, inside: float) -> dict[str, float]:
        """Predict a plan under other lengths than it was made for, its resolved numbers kept.

        Args:
            model: of these lengths.
            inside: requests that K/V memory holds.
        """
        most = min(getattr(plan.policy, self.load), int(inside))
        return self.estimate(model, plan.policy.model_copy(update={self.load: most}))

    # Bounds ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def placement_terms(self, steps: LeastSteps) -> BoundTerms:
        """What bounds the throughput of placements, whatever the settings."""

    def box_throughput(
        self, model: M, low: Performance, high: Performance, floor: Performance, microbatches: Array, latency_s: float
    ) -> Array:
        """Requests a second that no settings of each box exceed, where no corner of it is the fastest.

        Args:
            model: on the tables below the profile's.
            low, high: the corners of each box with all values at their lowest and at their highest, as predicted.
            floor: the lowest ones on the tables below.
            latency_s: that settings are to keep; infinite without a bound.
        """
        return high.encode_batch / floor.cycle

    def box_latencies(
        self, model: M, floor: Performance, corners: int, microbatches: float
    ) -> tuple[Array, Array, Array] | None:
        """Latency, time to first token and time per output token that no settings of each box fall below.

        None where they are those of the corner with each variable at its slow end.

        Args:
            model: on the tables below the profile's; floor: the corners of boxes on it, the same number for each box,
                side by side.
        """
        return None


def column(columns: Columns, name: str) -> Array:
    """A column, of ones where it is not named."""
    found = columns.get(name)
    return np.ones(len(next(iter(columns.values())))) if found is None else found
