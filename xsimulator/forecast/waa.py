"""waa: some devices encode, the others decode, neither waiting for the other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xgpt.schema import WaaSettings
from xsimulator.forecast.base import Columns, Forecast, Ints, Room, Stations, column
from xsimulator.forecast.performance import Performance
from xsimulator.forecast.two_lanes import TwoLaneModel


class Waa(Forecast[TwoLaneModel]):
    settings = WaaSettings
    model = TwoLaneModel
    line = "encode_batch"
    load = "max_decode_batch"
    follows = ("encode_batch",)  # under light load an encode batch is what has come since the last one
    num_curves = 8
    stations = Stations(admits_each_step=False, frees_together=False)

    def values(self, name: str, room: Room) -> Ints:
        return super().values(name, room._replace(least=1) if name == "encode_batch" else room)

    def line_counts(self, outer: Ints, inner: Ints, room: Room) -> Ints:
        return outer  # a batch larger than the cap never enters

    def curve_values(self, values: Ints) -> Ints:
        return values[: max(1, len(values) // 2)]  # a cap of fewer than two encode batches makes static batches

    def is_allowed(self, found: Performance) -> npt.NDArray[np.bool_]:
        return found.encode_batch <= found.peak_requests

    def predict(self, model: TwoLaneModel, columns: Columns) -> Performance:
        microbatches = column(columns, "decode_microbatches")
        return model.evaluate(columns["encode_batch"], columns["max_decode_batch"], microbatches)
