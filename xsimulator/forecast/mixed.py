"""Forecast of orca and chunked: every step decodes all running requests and encodes into free slots."""

from __future__ import annotations

import numpy as np

from xgpt.schema import ChunkedSettings, OrcaSettings
from xsimulator.forecast.base import Columns, Forecast, Ints, Room, Stations, column
from xsimulator.forecast.mixes import MixedSteps, most_displaced
from xsimulator.forecast.one_lane import OneLaneModel
from xsimulator.forecast.performance import Performance
from xsimulator.forecast.placements import BoundTerms, LeastSteps

TOKEN_BUDGETS = tuple(sorted({round(2 ** (e / 4) / 8) * 8 for e in range(4 * 5, 4 * 13 + 1)}))
"""Budgets worth telling apart, 32 to 8192 tokens: four to an octave, in multiples of 8."""


class Mixed(Forecast[OneLaneModel]):
    """Policies whose every step may encode and decode."""

    model = OneLaneModel
    line = load = "max_batch"
    stations = Stations(admits_each_step=True, frees_together=False)
    swaps_between_steps = True

    def predict(self, model: OneLaneModel, columns: Columns) -> Performance:
        microbatches = column(columns, "microbatches")
        return model.part(MixedSteps).evaluate(columns["max_batch"], columns.get("token_budget"), microbatches)

    def placement_terms(self, steps: LeastSteps) -> BoundTerms:
        # Steps that encode decode hardly fewer requests than the mean, and a request costs no more in a larger batch.
        least = np.maximum(1 - most_displaced(steps.of.lengths) / steps.of.batches, 0.0)
        steady = [steps.each * steps.steady * least, steps.steady_passing * least]
        working = [steps.each * steps.mixed, steps.passing, *steady]
        return BoundTerms(working, [steps.each * steps.met, steps.passing, *steady])


class Orca(Mixed):
    settings = OrcaSettings


class Chunked(Mixed):
    settings = ChunkedSettings
    num_curves = 12
    cuts_prompts = True

    def values(self, name: str, room: Room) -> Ints:
        if name == "token_budget":
            most = 2 * room.max_batch * room.lengths.max_input
            return np.asarray([budget * room.microbatches for budget in TOKEN_BUDGETS if budget <= most])
        return super().values(name, room)
