"""Closed-form estimates: what the search calls. The simulated engine (xsimulator.events) is their judge."""

from xsimulator.analytic.one_lane import OneLaneModel
from xsimulator.analytic.performance import Performance
from xsimulator.analytic.waa import TwoLaneModel

__all__ = ["OneLaneModel", "Performance", "TwoLaneModel"]
