"""Find the settings of all placements that keep the bounds at the highest arrival rate, in closed form.

Every placement is searched along load curves. The settings on a curve differ only in the batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from xgpt.core.schema import PolicySettings
from xscheduler.search.optuna_search import sample_points
from xscheduler.space import Ints, Space, columns_of
from xsimulator.forecast import Forecast
from xsimulator.queueing import NUM_LOADS, Array

STEP = 1.35
"""Factor between a value of a variable and its neighbours in `one_step_from`."""
NUM_FAR = 6
"""Number of values on an axis in `far_from`."""
TIGHTER = 0.8
MOST_TIGHTER = 6
"""The search also tries the best settings under up to `MOST_TIGHTER` tighter bounds, each `TIGHTER` times the one
before.
"""
NEARLY_BEST = 0.85
"""A placement is searched on a finer grid if its best rate reaches this share of the policy's best rate."""
MOST_PLACEMENTS = 48
"""Largest number of a policy's placements that are searched. Those with the highest bounds come first."""
NUM_TRIALS = 150
MOST_DRAWN = 4


class Rated(NamedTuple):
    rate: float
    space: Space
    settings: PolicySettings


def by_rate(spaces: Sequence[Space], known: dict[Space, Rated | None] | None = None) -> list[Rated]:
    """Return the best settings of each promising placement, sorted by arrival rate, highest first."""
    found: list[Rated] = []
    at_least = 0.0
    ordered = sorted(spaces, key=lambda space: -space.bound)
    for space in ordered[:MOST_PLACEMENTS]:
        if space.bound < at_least:
            break
        best = _best_on_a_grid(space, at_least)
        if known is not None:
            known[space] = best
        if best is not None:
            found.append(best)
            at_least = max(at_least, 0.9 * best.rate)
    top = max((rated.rate for rated in found), default=0.0)
    for i, rated in enumerate(found):
        if rated.rate >= NEARLY_BEST * top:
            found[i] = _best_nearby(rated)
            if known is not None:
                known[rated.space] = found[i]
    found.sort(key=lambda rated: -rated.rate)
    return found


def best_of(space: Space) -> Rated | None:
    best = _best_on_a_grid(space, 0.0)
    return None if best is None else _best_nearby(best)


def _best_on_a_grid(space: Space, at_least: float) -> Rated | None:
    return _best_on(space, _outer_values(space, space.forecast.num_curves), at_least)


def _best_nearby(best: Rated) -> Rated:
    outer = _outer_values(best.space, best.space.forecast.num_curves)
    if len(outer) == 1:
        return best
    other = _best_on(best.space, _finer(best.space, outer, best.settings), best.rate)
    return best if other is None or other.rate <= best.rate else other


def closed_rate(space: Space, settings: PolicySettings) -> float:
    last = np.arange(NUM_LOADS)[None] == NUM_LOADS - 1
    return float(space.evaluate(curves_of(columns_of(settings), space.forecast)).max_rates(0.0, last)[0, -1])


def sampled(spaces: Sequence[Space]) -> list[Rated]:
    """Optuna needs no valid bound, and proves nothing."""
    found: dict[tuple[int, PolicySettings], float] = {}

    def score(_: object, number: int, columns: dict[str, Ints]) -> float:
        space = spaces[number]
        if not space.evaluate(columns).fits[0]:
            return 0.0
        settings = space.settings(columns, 0)
        found[number, settings] = rate = closed_rate(space, settings)
        return rate

    sample_points(spaces, score, num_trials=NUM_TRIALS)
    rated = [Rated(rate, spaces[number], settings) for (number, settings), rate in found.items() if rate > 0]
    return sorted(rated, key=lambda one: -one.rate)[:MOST_DRAWN]


def one_step_from(space: Space, settings: PolicySettings) -> list[PolicySettings]:
    found = []
    for axis in space.axes:
        name, value = axis.variable.name, getattr(settings, axis.variable.name)
        above = np.searchsorted(axis.values, value * STEP)
        below = np.searchsorted(axis.values, value / STEP, "right") - 1
        for index in (above, below):
            other = int(axis.values[np.clip(index, 0, len(axis.values) - 1)])
            if other != value:
                found.append(settings.but(**{name: other}))
    return found


def far_from(space: Space, settings: PolicySettings) -> list[PolicySettings]:
    """Return the settings with other values on one axis: its largest, about half of it, and so on."""
    found: list[PolicySettings] = []
    for axis in space.axes:
        name = axis.variable.name
        far = axis.values[np.searchsorted(axis.values, [axis.values[-1] / 2**n for n in range(NUM_FAR)])]
        found += [settings.but(**{name: int(each)}) for each in np.unique(far) if each != getattr(settings, name)]
    return found


def best_under_tighter(space: Space) -> list[PolicySettings]:
    """Return the best settings of a placement under each of several tighter bounds, without repetitions.

    The tighter the bounds, the smaller the batches. Under the original bounds, all these settings may have about the
    same rate in closed form, although their simulated rates differ.
    """
    found: list[PolicySettings] = []
    for n in range(1, MOST_TIGHTER + 1):
        best = best_of(space.tightened(TIGHTER**n))
        if best is None:
            break
        if best.settings not in found:
            found.append(best.settings)
    return found


def _best_on(space: Space, outer: Ints, at_least: float) -> Rated | None:
    largest = {space.forecast.load: _largest(space, outer)}
    name = _outer_name(space)
    if name is not None:
        largest[name] = outer
    columns = curves_of(largest, space.forecast)
    evaluation = space.evaluate(columns)
    wanted = evaluation.fits.reshape(-1, NUM_LOADS).copy()
    if not space.fixed.keys().isdisjoint((space.forecast.load, *space.forecast.follows)):
        wanted[:, :-1] = False  # if the batch size is fixed, only the last point of a curve has this size
    rates = evaluation.max_rates(at_least, wanted, only_best=True)
    index = int(rates.argmax())
    rate = float(rates.ravel()[index])
    return Rated(rate, space, space.settings(columns, index)) if rate > 0 else None


def curves_of(largest: dict[str, Ints], forecast: Forecast[Any]) -> dict[str, Ints]:
    load = forecast.load
    share: Array = np.maximum(largest[load], 1.0)[:, None] ** np.linspace(0.0, 1.0, NUM_LOADS) / largest[load][:, None]
    columns = {name: np.repeat(values, NUM_LOADS) for name, values in largest.items()}
    for name in (load, *forecast.follows):
        columns[name] = np.maximum(np.round(share * largest[name][:, None]), 1).astype(int).ravel()
    return columns


def _outer_name(space: Space) -> str | None:
    names = [axis.variable.name for axis in space.axes if axis.variable.name != space.forecast.load]
    return names[0] if names else None


def _outer_values(space: Space, count: int) -> Ints:
    name = _outer_name(space)
    if name is None:
        return np.zeros(1, int)
    values = next(axis.values for axis in space.axes if axis.variable.name == name)
    values = space.forecast.curve_values(values)
    picked: Ints = np.unique(values[np.round(np.geomspace(1, len(values), count)).astype(int) - 1])
    return picked


def _finer(space: Space, outer: Ints, settings: PolicySettings) -> Ints:
    name = _outer_name(space)
    assert name is not None
    values = next(axis.values for axis in space.axes if axis.variable.name == name)
    at = int(np.searchsorted(outer, getattr(settings, name)))
    low, high = outer[max(at - 1, 0)], outer[min(at + 1, len(outer) - 1)]
    between = values[(values > low) & (values < high)]
    if not len(between):
        return outer[at : at + 1]
    picked: Ints = between[np.unique(np.round(np.linspace(0, len(between) - 1, 6)).astype(int))]
    return picked


def _largest(space: Space, outer: Ints) -> Ints:
    most = space.fixed.get(space.forecast.load, max(int(space.capacity), 1))
    axis, inner, counts = space.lines
    if axis is None or inner.variable.name != space.forecast.load or space.forecast.load in space.fixed:
        return np.full(len(outer), most)
    lines = np.searchsorted(axis.values, outer)
    least = space.least_requests
    return np.maximum(counts[lines] + least - 1, least).astype(int)
