"""The figures that plans are compared by."""

from __future__ import annotations

from xgpt.core.schema import Plan


def rate_of(plan: Plan) -> float:
    """Return the arrival rate up to which a plan keeps its bounds, as simulated; without bounds, its throughput."""
    found = plan.estimate.capacity
    return plan.estimate.throughput_rps if found is None else found.rate_per_s
