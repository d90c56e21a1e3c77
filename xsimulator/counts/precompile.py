"""Compile the run by counts, and store it on disk: `python -m xsimulator.counts.precompile`."""

from __future__ import annotations

from xgpt.core.policies.lane_settings import LaneSettings
from xgpt.core.schema import Curve, LayerTimes, Profile, Surface
from xgpt.resolve import load_model
from xsimulator.costs.step_cost import LaneCost
from xsimulator.counts.arrivals import Kv, Stream
from xsimulator.counts.counted_run import is_compiled
from xsimulator.counts.one_lane_arrivals import OneLaneRun
from xsimulator.stages import whole


def main() -> None:
    """Compile the run of one lane, by running one request of one token with an invented profile."""
    if is_compiled():
        return
    spec = load_model("opt-125m")[0]
    curve = Curve(points=(1, 2), seconds=(1e-3, 2e-3))
    surface = Surface(batches=(1, 2), lengths=(1, 2), seconds=((1e-3, 2e-3), (2e-3, 4e-3)))
    profile = Profile(
        source="analytic",
        model=spec.shape,
        dtype="float32",
        device="cpu",
        layers=(LayerTimes(rest=curve, encode_attention=surface, decode_attention=surface),),
        embedding=curve,
        head=curve,
        overhead=curve,
        spread=0.0,
    )
    cost = LaneCost(spec, profile, whole(spec))
    OneLaneRun(LaneSettings(mix=True, max_batch=1), cost, Kv(8, 16), Stream([1], [1], 1, [0])).run()


if __name__ == "__main__":
    main()
