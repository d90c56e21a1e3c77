"""orca and chunked: every step decodes all that run and encodes into free slots."""

from __future__ import annotations

from xgpt.schema import ChunkedSettings, OrcaSettings
from xsimulator.forecast.base import Columns, Forecast, column
from xsimulator.forecast.mixes import MixedSteps
from xsimulator.forecast.one_lane import OneLaneModel
from xsimulator.forecast.performance import Performance


class _Mixed(Forecast[OneLaneModel]):
    model = OneLaneModel

    def predict(self, model: OneLaneModel, columns: Columns) -> Performance:
        microbatches = column(columns, "microbatches")
        return model.part(MixedSteps).evaluate(columns["max_batch"], columns.get("token_budget"), microbatches)


class Orca(_Mixed):
    settings = OrcaSettings


class Chunked(_Mixed):
    settings = ChunkedSettings
