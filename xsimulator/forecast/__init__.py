"""Predict every policy in closed form, for the search. The simulated engine checks the predictions."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable
from typing import Any

from xgpt.core.schema import PolicySettings
from xsimulator.forecast.base import Forecast, Performance
from xsimulator.forecast.mixes import Chunked, Orca
from xsimulator.forecast.one_lane import OneLaneModel
from xsimulator.forecast.rra import Rra
from xsimulator.forecast.static import Static
from xsimulator.forecast.two_lanes import TwoLaneModel
from xsimulator.forecast.waa import Waa

FORECASTS: dict[str, Forecast[Any]] = {
    "rra": Rra(),
    "chunked": Chunked(),
    "orca": Orca(),
    "static": Static(),
    "waa": Waa(),
}
"""The forecast of every policy, in the order of printed tables."""

CHOICES: ChainMap[str, Forecast[Any]] = ChainMap(FORECASTS, {"waa-c": Waa("compute"), "waa-m": Waa("memory")})
"""By name: the choices for planning. Each is a policy, or a policy restricted to some placements."""


TUNED: dict[str, Any] = {"slack": "chunked"}
"""Choices whose settings only simulation can compare (`xscheduler.objectives.tuning`), and the policy of each."""


def choice_of(settings: PolicySettings, among: Iterable[str]) -> str:
    """Return the name of the first choice in `among` that includes these settings."""
    return next(name for name in among if CHOICES[name].covers(settings))


def estimate(model: Any, settings: PolicySettings) -> dict[str, float]:
    """Return the predictions for the settings of one plan, by name."""
    return FORECASTS[settings.kind].estimate(model, settings)
