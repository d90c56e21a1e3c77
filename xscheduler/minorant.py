"""Tables below a profile's own that never fall with a size and cost ever less per unit of it.

Measured times are uneven. What a schedule takes on these tables is a floor under what it takes on the measured ones,
and it is monotone by construction: a larger batch never ends sooner, and never costs more per request. The search
proves its bounds on them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from xgpt.schema import Curve, Profile, Surface

Array = npt.NDArray[np.float64]


def minorant(profile: Profile) -> Profile:
    """The profile with every table replaced; the same object where that changes nothing."""
    changed = {name: _floor(value) for name, value in profile}
    return profile if all(changed[name] is value for name, value in profile) else profile.model_copy(update=changed)


def _floor(value: Any) -> Any:
    """Tables anywhere inside; everything else, and tables that are as they should be, stay the same object."""
    match value:
        case Curve():
            seconds = _never_falls(
                _ever_cheaper(np.asarray(value.points, float), _never_falls(np.asarray(value.seconds)))
            )
            return _replaced(value, seconds)
        case Surface():
            batches, table = np.asarray(value.batches, float), np.asarray(value.seconds)  # [batches, lengths]
            table = _never_falls(_never_falls(table, axis=1), axis=0)
            table = np.stack([_ever_cheaper(batches, column) for column in table.T], axis=1)
            return _replaced(value, _never_falls(table, axis=1))
        case tuple():
            items = tuple(map(_floor, value))
            return value if all(a is b for a, b in zip(items, value, strict=True)) else items
    if hasattr(value, "model_copy"):
        changed = {name: _floor(item) for name, item in value}
        return value if all(changed[name] is item for name, item in value) else value.model_copy(update=changed)
    return value


def _never_falls(seconds: Array, axis: int = 0) -> Array:
    """The largest table below that never falls: each entry is the least of what follows."""
    return np.flip(np.minimum.accumulate(np.flip(seconds, axis), axis), axis)


def _ever_cheaper(sizes: Array, seconds: Array) -> Array:
    """The largest table below whose time per unit never rises; size 0 is left as it is."""
    positive = sizes > 0
    result = seconds.copy()
    per_unit = np.minimum.accumulate(seconds[positive] / sizes[positive])
    result[positive] = np.minimum(seconds[positive], per_unit * sizes[positive])
    return result


def _replaced(table: Curve | Surface, seconds: Array) -> Any:
    if np.allclose(seconds, np.asarray(table.seconds), rtol=1e-12, atol=0):
        return table
    return table.model_copy(
        update={"seconds": tuple(map(tuple, seconds.tolist())) if seconds.ndim == 2 else tuple(seconds.tolist())}
    )
