"""Compute the rate by which plans are compared."""

from __future__ import annotations

from xgpt.core.schema import Plan


def rate_of(plan: Plan) -> float:
    """Return the simulated arrival rate up to which a plan keeps its bounds, or its throughput if there are no
    bounds.
    """
    found = plan.estimate.capacity
    return plan.estimate.throughput_rps if found is None else found.rate_per_s
