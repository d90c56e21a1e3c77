"""Closed forms of every policy for the search; the simulated engine (xsimulator.events) checks them."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable
from typing import Any

from xgpt.core.schema import PolicySettings
from xsimulator.forecast.base import Forecast
from xsimulator.forecast.mixed import Chunked, Orca
from xsimulator.forecast.one_lane import OneLaneModel
from xsimulator.forecast.performance import Performance
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
"""Choices for planning: policies, and policies restricted to some of their placements."""


TUNED: dict[str, Any] = {"slack": "chunked"}
"""Choices whose settings only simulation can compare (`xscheduler.objectives.tuning`), with the policies that they
extend."""


def choice_of(settings: PolicySettings, among: Iterable[str]) -> str:
    """Return the first choice that covers these settings."""
    return next(name for name in among if CHOICES[name].covers(settings))


def estimate(model: Any, settings: PolicySettings) -> dict[str, float]:
    """Return the predictions for one plan's settings on a model of its lanes, by name."""
    return FORECASTS[settings.kind].estimate(model, settings)


__all__ = [
    "CHOICES",
    "FORECASTS",
    "TUNED",
    "Forecast",
    "OneLaneModel",
    "Performance",
    "TwoLaneModel",
    "choice_of",
    "estimate",
]
