"""Explain which bound no plan keeps, waiting included, and find the nearest bound that a plan keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from xgpt.core.errors import InfeasibleError
from xgpt.core.numbers import rounded_up
from xgpt.core.progress import Progress
from xgpt.core.schema import Constraint
from xgpt.core.schema.constraint import BOUND_NAMES
from xscheduler.schedule import Scheduler
from xscheduler.why_not import why_slow

STEP = 1.01
"""Ratio of neighbouring bounds to try. The bounds are powers of this ratio, so the result does not depend on the
requested bound.
"""
STRIDES = (4, 12, 41, 123, 369, 1107)
"""Powers of `STEP` by which a bound is loosened, in this order, until a plan keeps the bound."""
Keeps = Callable[[Constraint], bool]


def never_kept(
    scheduler: Scheduler, kinds: Sequence[str], keeps: Keeps, progress: Progress | None = None
) -> InfeasibleError:
    """If a single bound is the cause, the error names the nearest value of this bound. Otherwise it names all bounds
    times the smallest factor with which they can be kept; one alone may then be tighter.
    """
    constraint = scheduler.problem.constraint
    given = constraint.bounds.given
    binding, base, reason = next(iter(given)), 1.0, ""
    try:
        scheduler.found(kinds)
    except InfeasibleError as error:  # requests break the bounds even if they do not wait
        if error.binding not in given:
            return error
        binding, reason = error.binding, error.because
        base = max(1.0, (error.nearest_bound_s or 0.0) / given[binding])
    names = sorted(given, key=lambda name: name != binding)
    one = next((name for name in names if len(names) > 1 and keeps(constraint.but(**{name: None}))), None)
    loosened = {one: given[one]} if one else given
    found = _nearest(constraint, loosened, base if one in (None, binding) else 1.0, keeps, progress)
    asked = " and ".join(_named(given))
    where = f"no schedule of {', '.join(kinds)} keeps {asked} on {scheduler.problem.cluster.name}, waiting included"
    if found is None:
        return InfeasibleError(f"{binding}: {where}", binding=binding)
    nearest = found.bounds
    binding = next(iter(nearest))
    kept = " and ".join(_named(nearest)) if len(given) > 1 else f"{nearest[binding]:g} s"
    can_be = "the nearest bound found that can be kept is"
    if len(nearest) > 1:
        can_be = f"each bound {max(nearest[name] / given[name] for name in nearest):.3g} times as long can be kept:"
    kept += f" (to within {100 * (found.ratio - 1):.1g}%)"
    reason = (reason or why_slow(scheduler.candidates, kinds)) if "latency_bound_s" in nearest else ""
    refusal = InfeasibleError(
        f"{binding}: {where}, at any arrival rate; {can_be} {kept}{reason}",
        nearest_bound_s=nearest[binding] if len(nearest) == 1 else None,
        binding=binding,
        reason=f"no schedule keeps the bounds at any rate; {can_be} {_said(nearest)}",
    )
    refusal.nearest = dict(nearest)
    return refusal


def _said(bounds: Mapping[str, float]) -> str:
    return " and ".join(f"{BOUND_NAMES.get(name, name)} {value:.3g} s" for name, value in bounds.items())


def rate_not_kept(scheduler: Scheduler, kinds: tuple[str, ...], highest: float) -> InfeasibleError:
    problem, num_devices = scheduler.problem, scheduler.candidates.placements.num_devices
    error = InfeasibleError(
        f"arrival_rate_per_s: no schedule of {', '.join(kinds)} on {num_devices} of the {problem.cluster.num_devices} "
        f"devices of {problem.cluster.name} keeps the bounds at {problem.constraint.arrival_rate_per_s:g} requests/s, "
        f"waiting included; the best one keeps them up to {highest:.4g} requests/s: take more devices or a lower rate",
        binding="arrival_rate_per_s",
        reason=f"the best schedule found on {num_devices} device{'s' * (num_devices > 1)} keeps the bounds only up to "
        f"{highest:.3g} requests/s",
    )
    error.kept_per_s = highest
    error.nearest = {"arrival_rate_per_s": None}
    return error


def never_kept_closed(scheduler: Scheduler, kinds: Sequence[str]) -> InfeasibleError:
    constraint = scheduler.problem.constraint
    given = constraint.bounds.given
    return InfeasibleError(
        f"{next(iter(given))}: no schedule of {', '.join(kinds)} keeps {' and '.join(_named(given))} when requests "
        f"also wait for admission (by the closed-form estimate); loosen {'a bound' if len(given) > 1 else 'it'}",
        binding=next(iter(given)),
    )


class _Nearest(NamedTuple):
    bounds: dict[str, float]
    ratio: float


def _nearest(
    constraint: Constraint, bounds: Mapping[str, float], low: float, keeps: Keeps, progress: Progress | None
) -> _Nearest | None:
    tried = 0
    unit = 1.0 if len(bounds) > 1 else 1 / next(iter(bounds.values()))  # s, for a single bound

    def at(power: int) -> dict[str, float]:
        # Bounds are rounded as they are printed, so that the printed values can be kept.
        return {name: rounded_up(unit * STEP**power * bound) for name, bound in bounds.items()}

    def is_kept(power: int) -> bool:
        nonlocal tried
        tried += 1
        if progress is not None:
            named = " and ".join(_named(at(power)))
            progress(tried, tried + 1, f"no plan keeps the bounds; looking for the nearest that can be kept: {named}")
        return keeps(constraint.but(**at(power)))

    first = below = math.floor(math.log(low / unit) / math.log(STEP))
    for stride in STRIDES:
        if is_kept(above := first + stride):
            break
        below = above
    else:
        return None
    while above > below + 1:
        middle = (below + above) // 2
        below, above = (below, middle) if is_kept(middle) else (middle, above)
    kept, broken = at(above), at(below)
    return _Nearest(kept, max(kept[name] / broken[name] for name in bounds))


def _named(bounds: Mapping[str, float]) -> list[str]:
    return [f"`{name}={bound:g}`" for name, bound in bounds.items()]
