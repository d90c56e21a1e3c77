"""Predict orca and chunked, with which every step decodes all running requests and encodes prompts for free slots."""

from __future__ import annotations

import numpy as np

from xgpt.core.schema import ChunkedSettings, OrcaSettings
from xsimulator.forecast.base import Columns, Forecast, Ints, PlacementLimits, Stations, column
from xsimulator.forecast.mixes import MixedSteps, most_displaced
from xsimulator.forecast.one_lane import OneLaneModel
from xsimulator.forecast.performance import Performance
from xsimulator.forecast.placements import BoundTerms, LeastSteps

TOKEN_BUDGETS = tuple(sorted({round(2 ** (e / 4) / 8) * 8 for e in range(4 * 5, 4 * 13 + 1)}))
"""Token budgets to try: multiples of 8 from 32 to 8192, about four for each doubling."""


class Mixed(Forecast[OneLaneModel]):
    """A policy in which every step may both encode and decode."""

    model = OneLaneModel
    line = load = "max_batch"
    stations = Stations(admits_each_step=True, frees_together=False)
    swaps_between_steps = True

    def predict(self, model: OneLaneModel, columns: Columns) -> Performance:
        microbatches, most = column(columns, "microbatches"), model.lane.token_budget
        budget = columns.get("token_budget")
        if budget is None and most is not None:
            budget = most * microbatches
        return model.part(MixedSteps).evaluate(columns["max_batch"], budget, microbatches)

    def placement_terms(self, steps: LeastSteps) -> BoundTerms:
        # Steps with prompts decode only slightly fewer requests than the mean step, and a request takes no longer in a
        # larger batch.
        least = np.maximum(1 - most_displaced(steps.iterations.lengths) / steps.iterations.batches, 0.0)
        steady = [steps.each * steps.steady * least, steps.steady_passing * least]
        working = [steps.each * steps.mixed, steps.passing, *steady]
        return BoundTerms(working, [steps.each * steps.met, steps.passing, *steady])


def _budgets(room: PlacementLimits) -> list[int]:
    """Return the token budgets to try.

    If the engine cuts no prompts, these are the budgets that suffice for the longest prompt and all decodes. If no
    budget suffices, this is the largest budget.
    """
    longest, engine = room.lengths.max_input, room.engine
    least, most = 0, 2 * room.max_batch * longest
    if engine is not None:
        most = min(most, engine.token_budget or most)
        least = 0 if engine.cuts_prompts else longest + room.max_batch
    return [budget for budget in TOKEN_BUDGETS if least <= budget <= most] or [min(most, max(least, TOKEN_BUDGETS[0]))]


class Orca(Mixed):
    settings = OrcaSettings


class Chunked(Mixed):
    settings = ChunkedSettings
    num_curves = 12
    cuts_prompts = True

    def values(self, name: str, room: PlacementLimits) -> Ints:
        if name == "token_budget":
            return room.microbatches * np.asarray(_budgets(room))
        return super().values(name, room)
