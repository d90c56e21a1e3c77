"""waa: some devices encode, the others decode, neither waiting for the other."""

from __future__ import annotations

from xgpt.schema import WaaSettings
from xsimulator.forecast.base import Columns, Forecast, column
from xsimulator.forecast.performance import Performance
from xsimulator.forecast.two_lanes import TwoLaneModel


class Waa(Forecast[TwoLaneModel]):
    settings = WaaSettings
    model = TwoLaneModel

    def predict(self, model: TwoLaneModel, columns: Columns) -> Performance:
        microbatches = column(columns, "decode_microbatches")
        return model.evaluate(columns["encode_batch"], columns["max_decode_batch"], microbatches)
