"""Lower a profile's tables so that times never fall with size and the cost per unit never rises.

Measured times are uneven. A schedule's time on the lowered tables is a lower bound on its time on the measured tables,
and it is monotone: a larger batch never takes less time and never costs more per request. The search proves its bounds
on these tables.

Beyond its last point, a table is extrapolated along its last segment. There, a lowered table could rise faster than the
original and exceed it. Such a lowered table gets one more point, at twice the last size. Up to this point it rises no
faster than the original.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from xgpt.core.schema import Curve, EncoderLayerTimes, Frozen, LayerTimes, Profile, Surface
from xsimulator.costs.curves import rising

Array = npt.NDArray[np.float64]


def lowered(profile: Profile) -> Profile:
    """Return the profile with every table lowered, or the same object if lowering changes no table."""
    floor: Profile = _floor(profile)
    return floor


def _floor(value: Any) -> Any:
    match value:
        case Curve():
            return _floor_of_curve(value)
        case Surface():
            return _floor_of_surface(value)
        case LayerTimes() if (attention := rising(value.encode_attention)) is not value.encode_attention:
            return _floor(value.but(encode_attention=attention))
        case EncoderLayerTimes() if (attention := rising(value.attention)) is not value.attention:
            return _floor(value.but(attention=attention))
        case tuple():
            items = tuple(map(_floor, value))
            return value if all(a is b for a, b in zip(items, value, strict=True)) else items
    if isinstance(value, Frozen):
        changed = {name: _floor(item) for name, item in value}
        return value if all(changed[name] is item for name, item in value) else value.but(**changed)
    return value


def _floor_of_curve(value: Curve) -> Curve:
    points, table = np.asarray(value.points, float), np.asarray(value.seconds)
    floor = _never_falls(_ever_cheaper(points, _never_falls(table)))
    slope = np.minimum(_last_slope(points, table), _last_slope(points, floor))
    if _is_steeper(points, floor, slope):
        floor, points = _one_more(points, floor, slope), np.append(points, 2 * points[-1])
    elif np.allclose(floor, table, rtol=1e-12, atol=0):
        return value
    return Curve(points=tuple(points.astype(int).tolist()), seconds=tuple(floor.tolist()))


def _floor_of_surface(value: Surface) -> Surface:
    batches, lengths = np.asarray(value.batches, float), np.asarray(value.lengths, float)
    table = np.asarray(value.seconds)  # [batches, lengths]
    floor = _never_falls(_never_falls(table, axis=1), axis=0)
    floor = np.stack([_ever_cheaper(batches, column) for column in floor.T], axis=1)
    floor = _never_falls(floor, axis=1)
    same = np.allclose(floor, table, rtol=1e-12, atol=0)
    # In larger batches, times rise at least as fast with length, but no faster per request.
    measured = _last_slope(lengths, table.T)
    slope = _ever_cheaper(batches, _never_falls(np.minimum(measured, _last_slope(lengths, floor.T))))
    if _is_steeper(lengths, floor.T, slope):
        same = False
        table = np.hstack([table, _one_more(lengths, table.T, measured)[-1][:, None]])
        floor = np.hstack([floor, _one_more(lengths, floor.T, slope)[-1][:, None]])
        lengths = np.append(lengths, 2 * lengths[-1])
    if len(batches) > 1:
        slope = _never_falls(np.minimum(_last_slope(batches, table), _last_slope(batches, floor)))
        # A request must cost no more in a larger batch beyond the last batch and the last length, too.
        rise = (lengths[-1] - lengths[-2]) * _last_slope(lengths, floor.T)[-1] / batches[-1]
        slope[-1] = min(slope[-1], slope[-2] + rise)
        if _is_steeper(batches, floor, slope):
            same = False
            floor, batches = _one_more(batches, floor, slope), np.append(batches, 2 * batches[-1])
    if same:
        return value
    return Surface(
        batches=tuple(batches.astype(int).tolist()),
        lengths=tuple(lengths.astype(int).tolist()),
        seconds=tuple(map(tuple, floor.tolist())),
    )


def _never_falls(seconds: Array, axis: int = 0) -> Array:
    return np.flip(np.minimum.accumulate(np.flip(seconds, axis), axis), axis)


def _ever_cheaper(sizes: Array, seconds: Array) -> Array:
    positive = sizes > 0
    result = seconds.copy()
    per_unit = np.minimum.accumulate(seconds[positive] / sizes[positive])
    result[positive] = np.minimum(seconds[positive], per_unit * sizes[positive])
    return result


def _last_slope(points: Array, seconds: Array) -> Array:
    slope: Array = np.maximum((seconds[-1] - seconds[-2]) / (points[-1] - points[-2]), 0.0)
    return slope


def _is_steeper(points: Array, floor: Array, slope: Array) -> bool:
    more = (_last_slope(points, floor) - slope) * points[-1]
    return bool((more > 1e-9 * floor[-1]).any())


def _one_more(points: Array, seconds: Array, slope: Array) -> Array:
    return np.concatenate([seconds, (seconds[-1] + points[-1] * slope)[None]])
