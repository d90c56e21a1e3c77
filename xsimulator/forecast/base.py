"""The interface of a policy's forecast, for planning, the queueing model and re-planning.

A forecast has no state. It reads a model of the steps of a placement's lanes under one workload
(`one_lane.OneLaneModel`, `two_lanes.TwoLaneModel`), which policies with the same lanes share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from xgpt.core.schema import EngineSpec, Plan, PolicySettings
from xsimulator.costs.curves import Array
from xsimulator.forecast.performance import Performance
from xsimulator.forecast.placements import BoundTerms, LeastSteps
from xsimulator.lengths import Lengths

Columns = Mapping[str, Array]
"""Candidate settings: a column of values for each control variable, micro-batches included."""
Ints = npt.NDArray[np.int_]
M = TypeVar("M")


class PlacementLimits(NamedTuple):
    """The limits of control variables on a placement.

    Attributes:
        least: least number of requests: one for each micro-batch.
        capacity: number of requests whose K/V fits at once.
        max_batch: largest number of requests in a micro-batch.
        engine: the engine that runs the plan. None means any.
    """

    lengths: Lengths
    microbatches: int
    least: int
    capacity: float
    max_batch: int
    engine: EngineSpec | None = None


class Stations(NamedTuple):
    """A policy as a queueing system.

    Attributes:
        admits_each_step: whether every step may admit requests; otherwise once a cycle.
        frees_together: whether slots become free together, after a phase or a batch.
    """

    admits_each_step: bool
    frees_together: bool


class Forecast(ABC, Generic[M]):
    """The closed form of one policy, with the properties of the policy that planning needs.

    Attributes:
        settings: the type of its settings, which declares its control variables.
        model: creates the model that predictions read from the lanes' costs (`LaneCost`), the lengths, the quantile and
            `all_requests`.
        line: the variable along which settings are numbered. Its values are consecutive integers, and latency rises or
            falls with it. A policy has at most two variables; the other one selects the line.
        load: the variable that grows along a load curve, starting at one request.
        follows: variables that grow in proportion to the load variable.
        num_curves: number of values of the other variable for which there is a load curve.
        stations: the policy as a queueing system.
        swaps_between_steps: whether an engine can switch, between two steps, from this policy to another policy with
            this property, and back.
        reserves_kv: whether K/V memory is always reserved in full.
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
        """Return the fixed settings for each of these numbers of micro-batches."""
        return [{"microbatches": count} for count in counts]

    def takes(self, fixed: Mapping[str, Any]) -> bool:
        """Return whether the policy allows these fixed settings of a placement."""
        return True

    def covers(self, settings: PolicySettings) -> bool:
        """Return whether this forecast is for plans of these settings."""
        return settings.kind == self.settings.model_fields["kind"].default and self.takes(vars(settings))

    def values(self, name: str, room: PlacementLimits) -> Ints:
        """Return the values of a control variable; by default it counts requests."""
        return np.arange(room.least, max(room.least, int(room.capacity)) + 1)

    def line_counts(self, outer: Ints, inner: Ints, room: PlacementLimits) -> npt.NDArray[Any]:
        """Return how many values of the line variable are allowed with each value of the other variable."""
        return np.full(len(outer), len(inner))

    def curve_values(self, values: Ints) -> Ints:
        """Return values of the other variable at which load curves may begin."""
        return values

    def is_allowed(self, found: Performance) -> npt.NDArray[np.bool_]:
        """Return which predicted settings the policy allows, regardless of memory."""
        return np.ones(len(found.throughput), bool)

    # Predictions -------------------------------------------------------------------------------------------------

    def evaluate(self, model: M, **columns: npt.ArrayLike) -> Performance:
        """Return the predictions for candidates, given a column for each control variable. Micro-batches default to
        1."""
        return self.predict(model, {name: np.atleast_1d(np.asarray(values, float)) for name, values in columns.items()})

    @abstractmethod
    def predict(self, model: M, columns: Columns) -> Performance:
        """Return the predictions at saturation for candidates, one for each entry of the columns."""

    def estimate(self, model: M, settings: PolicySettings) -> dict[str, float]:
        """Return the predictions for the settings of one plan, by name."""
        searched = {variable.name for variable in settings.variables}
        columns = {name: value for name, value in vars(settings).items() if name in searched or "microbatches" in name}
        return self.evaluate(model, **columns).at(0)

    def reestimate(self, plan: Plan, model: M, inside: float) -> dict[str, float]:
        """Return the predictions for a plan under other lengths, with its resolved numbers unchanged.

        Args:
            model: the model under these lengths.
            inside: number of requests that K/V memory holds.
        """
        most = min(getattr(plan.policy, self.load), int(inside))
        return self.estimate(model, plan.policy.model_copy(update={self.load: most}))

    def promises_too_little(self, found: Performance) -> npt.NDArray[np.bool_]:
        """Return which settings may have a throughput that exceeds its prediction by more than chance. For these, the
        search uses bounds instead of predictions.
        """
        return np.zeros(len(found.throughput), bool)

    # Bounds ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def placement_terms(self, steps: LeastSteps) -> BoundTerms:
        """Return the terms that bound the throughput of placements, for any settings."""

    def box_throughput(
        self, model: M, low: Performance, high: Performance, floor: Performance, microbatches: Array, latency_s: float
    ) -> Array:
        """Return, for each box, the requests a second that none of its settings exceed, if no corner is known to be the
        fastest.

        Args:
            model: the model on the lower tables.
            low, high: predictions of each box's corners with all values at their lowest, and at their highest.
            floor: predictions of the lowest corners on the lower tables.
            latency_s: the latency that settings must keep; infinite without a bound.
        """
        return high.encode_batch / floor.cycle

    def box_latencies(
        self, model: M, lesser: Callable[[], Performance], floor: Performance, corners: int, microbatches: float
    ) -> tuple[Array, Array, Array] | None:
        """Return lower bounds on latency, time to first token and time per output token of each box.

        Return None if the bounds are simply the predictions for the corner with each variable at its slow end.

        Args:
            model: the model on the lower tables.
            lesser, floor: the model's predictions for the corners of all boxes, box by box, with `corners` entries for
                each box. `floor` is for the corner's own batch; `lesser` (a function, since few policies need it) is
                for the smallest batch that the corner represents.
        """
        return None


def column(columns: Columns, name: str) -> Array:
    """Return a column of settings; a column of ones if it is not given."""
    found = columns.get(name)
    return np.ones(len(next(iter(columns.values())))) if found is None else found
