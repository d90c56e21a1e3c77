"""Predict waa: some devices encode, and the others decode asynchronously."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from xgpt.core.schema import PlanDraft, WaaSettings
from xsimulator.costs.curves import Array
from xsimulator.forecast.base import Columns, Forecast, Ints, Performance, PlacementLimits, Stations, column
from xsimulator.forecast.lane_balance import as_interpolated
from xsimulator.forecast.placements import BoundTerms, LeastSteps
from xsimulator.forecast.two_lanes import TwoLaneModel, is_tight

MOST_TOKENS = 8192
"""Largest mean number of tokens that one of several groups encodes together."""


class Waa(Forecast[TwoLaneModel]):
    settings = WaaSettings
    model = TwoLaneModel
    line = "encode_batch"
    load = "max_decode_batch"
    # Under light load, an encode batch contains the requests that arrived since the last batch.
    follows = ("encode_batch",)
    num_curves = 8
    stations = Stations(admits_each_step=False, frees_together=False, has_encode_lane=True)

    def __init__(self, allocation: str | None = None) -> None:
        self._allocation = allocation

    def takes(self, fixed: Mapping[str, Any]) -> bool:
        return self._allocation in (None, fixed["allocation"])

    def values(self, name: str, room: PlacementLimits) -> Ints:
        if name != "encode_batch":
            return super().values(name, room)
        found = super().values(name, room._replace(least=1))
        return found if room.groups == 1 else found[: max(1, int(MOST_TOKENS / room.lengths.mean_input))]

    def line_counts(self, outer: Ints, inner: Ints, room: PlacementLimits) -> Ints:
        return outer - inner[0] + 1  # an encode batch larger than the cap never enters

    def curve_values(self, values: Ints) -> Ints:
        return values[: max(1, len(values) // 2)]  # a cap below two encode batches would make batches static

    def is_allowed(self, found: Performance) -> npt.NDArray[np.bool_]:
        return found.encode_batch <= found.peak_requests

    def filled(self, columns: Mapping[str, Any], capacity: float) -> Mapping[str, Any]:
        # Requests that wait for memory enter one by one, but those that wait for the cap only as a whole batch.
        cap, batch = columns["max_decode_batch"], columns["encode_batch"]
        return {**columns, "max_decode_batch": np.where(cap > capacity - 1, cap + batch / 2, cap)}

    def promises_too_little(self, found: Performance) -> npt.NDArray[np.bool_]:
        return is_tight(found.peak_requests, found.encode_batch)

    def predict(self, model: TwoLaneModel, columns: Columns) -> Performance:
        microbatches = column(columns, "decode_microbatches")
        return model.evaluate(columns["encode_batch"], columns["max_decode_batch"], microbatches)

    def reestimate(self, plan: PlanDraft, model: TwoLaneModel, inside: float) -> dict[str, float]:
        settings = plan.policy
        assert isinstance(settings, WaaSettings)
        cap = min(settings.max_decode_batch, int(inside))
        batch = min(plan.estimate.encode_tokens / model.lengths.mean_input, cap)
        columns = {"max_decode_batch": cap, "decode_microbatches": settings.decode_microbatches}
        return self.evaluate(model, encode_batch=batch, **columns).at(0)

    def placement_terms(self, steps: LeastSteps) -> BoundTerms:
        # The closed form has a fixed batch size, and interpolates times on its grid.
        at_grid = as_interpolated(steps.iterations.batches)
        steady, passing = (np.minimum(curve, curve @ at_grid) for curve in (steps.steady, steps.steady_passing))
        working = [steps.each * steady, passing]
        return BoundTerms(
            working,
            working,
            before_s=steps.alone,  # every step of the encode lane takes at least as long as a step for a single prompt
            most_rps=1 / steps.encode_lane.max(axis=1),
            at_least_one=True,  # a decode lane may have less than one request on average
        )

    def box_throughput(
        self,
        model: TwoLaneModel,
        low: Performance,
        high: Performance,
        floor: Performance,
        microbatches: Array,
        latency_s: Array,
    ) -> Array:
        return model.most(low.encode_batch, high.encode_batch, high.peak_requests, microbatches, latency_s)

    def box_latencies(
        self,
        model: TwoLaneModel,
        lesser: Callable[[], Performance],
        floor: Performance,
        corners: int,
        microbatches: float,
    ) -> tuple[Array, Array, Array]:
        # Fewer requests decode if larger encode batches take more of the cap, so no corner is the slow corner. The
        # bound combines the shortest times of the encode lane with the shortest times of the decode lane.
        least = lesser()
        low, high = least.encode_batch[::corners], floor.encode_batch[corners - 1 :: corners]
        batch = least.decode_batch.reshape(-1, corners).min(axis=1)
        return model.least(low, high, batch, np.full(len(low), microbatches))
