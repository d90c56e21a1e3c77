"""Judge how surely a fleet holds a day, by the errors of earlier predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xgpt.core.schema import Profile
from xgpt.core.schema.fleet import FleetPlan
from xgpt.core.schema.plan import rate_of
from xgpt.deciding.ranges import confidence


def with_confidence(fleet: FleetPlan, profiles: Mapping[str, Profile]) -> FleetPlan:
    """Return the fleet with how surely it, and the cheapest constant one, keep the bounds.

    Args:
        profiles: the profile of each cluster, by its name.
    """
    constant, planned = fleet.constant, [each.replicas for each in fleet.intervals]
    figures = constant.figures.but(confidence=_confidence(fleet, [constant.replicas] * len(planned), profiles))
    return fleet.but(
        planned=fleet.planned.but(confidence=_confidence(fleet, planned, profiles)),
        constant=constant.but(figures=figures),
    )


def _confidence(fleet: FleetPlan, replicas: Sequence[tuple[int, ...]], profiles: Mapping[str, Profile]) -> float | None:
    """Return `FleetFigures.confidence`. Each replica gets the same share of its highest rate."""
    loads = []
    for counts, each in zip(replicas, fleet.intervals, strict=True):
        held = sum(n * kind.rates_per_s[each.lengths] for n, kind in zip(counts, fleet.kinds, strict=True))
        loads.append((each.rate_per_s / max(held, 1e-9), counts))
    load, counts = max(loads)
    used = (kind.plan for n, kind in zip(counts, fleet.kinds, strict=True) if n)
    likely = [confidence(plan, profiles[plan.cluster.name], load * rate_of(plan)) for plan in used]
    known = [one for one in likely if one is not None]
    return min(known) if known and len(known) == len(likely) else None
