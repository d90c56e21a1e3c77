"""Explain which bound no plan keeps with waiting counted, and find the nearest one that a plan keeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from xgpt.core.errors import InfeasibleError
from xgpt.core.progress import Progress
from xgpt.core.schema import Constraint
from xscheduler.objectives.base import BOUNDS, MOST_SECONDS
from xscheduler.schedule import Scheduler
from xscheduler.why_not import why_slow

GROWTH = 1.5
"""Factor by which a bound is loosened until a plan keeps it."""
MOST_GROWN = 24
NEAR = 1.04
"""The bound named in the error is at most this factor above one that no plan keeps."""
Keeps = Callable[[Constraint], bool]
"""Whether planning under other bounds finds a plan."""


def never_kept(
    scheduler: Scheduler, kinds: Sequence[str], keeps: Keeps, progress: Progress | None = None
) -> InfeasibleError:
    """Return the error that no plan keeps the bounds at any rate; it names the nearest bounds that a plan keeps.

    If a single bound is the cause, the error names only this bound; otherwise it names all of them.
    """
    constraint = scheduler.problem.constraint
    given = {name: bound for name in BOUNDS if (bound := getattr(constraint, name)) is not None}
    binding, base, reason = next(iter(given)), 1.0, ""
    try:
        scheduler.best_of_each(kinds)
    except InfeasibleError as error:  # even requests that do not wait break the bounds
        if error.binding not in given:
            return error
        binding, reason = error.binding, error.reason
        base = max(1.0, (error.nearest_bound_s or 0.0) / given[binding])
    names = sorted(given, key=lambda name: name != binding)
    one = next((name for name in names if len(names) > 1 and keeps(constraint.model_copy(update={name: None}))), None)
    loosened = {one: given[one]} if one else given
    factor = _nearest(constraint, loosened, base if one in (None, binding) else 1.0, keeps, progress)
    asked = " and ".join(_named(given))
    where = f"no schedule of {', '.join(kinds)} keeps {asked} with waiting counted on {scheduler.problem.cluster.name}"
    if factor is None:
        return InfeasibleError(f"{binding}: {where}", nearest_bound_s=None, binding=binding)
    nearest = _times(loosened, factor)
    binding = next(iter(nearest))
    kept = " and ".join(_named(nearest)) if len(given) > 1 else f"{nearest[binding]:g} s"
    bound, one_keeps = ("bounds", "one keeps together are") if len(nearest) > 1 else ("bound", "one keeps is")
    reason = (reason or why_slow(scheduler.candidates, kinds)) if "latency_bound_s" in nearest else ""
    return InfeasibleError(
        f"{binding}: {where}, at however low an arrival rate; the nearest {bound} that {one_keeps} {kept}{reason}",
        nearest_bound_s=nearest[binding] if len(nearest) == 1 else None,
        binding=binding,
    )


def _nearest(
    constraint: Constraint, bounds: Mapping[str, float], low: float, keeps: Keeps, progress: Progress | None
) -> float | None:
    """Return the least factor by which some bounds must be loosened so that a plan keeps them; None: no such factor was
    found.
    """
    started, high, tried = time.perf_counter(), low, 0

    def is_kept(factor: float) -> bool:
        nonlocal tried
        tried += 1
        if progress is not None:
            named = " and ".join(_named(_times(bounds, factor)))
            progress(tried, tried + 1, f"no plan keeps the bounds; looking for the nearest that one keeps: {named}")
        return keeps(constraint.model_copy(update=_times(bounds, factor)))

    for step in range(MOST_GROWN):
        high = low * GROWTH if step else max(low, 1.0) * NEAR
        if is_kept(high):
            break
        low = high
        if time.perf_counter() - started > MOST_SECONDS / 2:
            return None
    else:
        return None
    while high > NEAR * low and time.perf_counter() - started < MOST_SECONDS / 2:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_kept(middle) else (middle, high)
    return high


def _times(bounds: Mapping[str, float], factor: float) -> dict[str, float]:
    """Return the bounds times a factor, rounded as they are printed, so that a user can ask for the printed values."""
    return {name: float(f"{factor * bound:.4g}") for name, bound in bounds.items()}


def _named(bounds: Mapping[str, float]) -> list[str]:
    return [f"`{name}={bound:g}`" for name, bound in bounds.items()]
