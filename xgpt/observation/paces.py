"""Remember how long served steps took on this machine, compared with the profiles that predicted them.

A profile is measured in a minute. The neighbours of a virtual machine, or a GPU's power limit, change its speed for
longer than that, so the variation within a profile does not show by how much the next load will differ from it. Earlier
loads do: `xgpt bench` and servers record their paces in the cache, and plans take ranges and headroom from them.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from xgpt.core.errors import MachineError
from xgpt.core.io import cache_dir, write_atomic
from xgpt.core.schema import PACES_AT_REST, SERVED, Plan

KEPT = 200
"""Number of loads that are remembered for each kind of device."""
ENOUGH = 8
"""Number of recorded loads from which their paces are representative."""
KEPT_S = 30 * 86400.0
"""Loads are forgotten after this time."""
INSIDE = (0.05, 0.95)
"""Quantiles of the paces between which nine of ten loads lie."""
NARROWEST = (0.97, 1.05)
"""Narrowest range that recorded loads can show."""


def record(plan: Plan, pace: float) -> None:
    """Remember a load's pace. Do nothing if the cache cannot be written.

    Args:
        plan: the plan that was served. It counts only if its profile is fitted to a served engine, since other profiles
            have a known error of their own.
        pace: measured time of its steps divided by their time in the profile.
    """
    if SERVED not in plan.profile.provenance:
        return
    path = _path(plan.cluster.device.name)
    entries = [*_recent(path), {"time_s": round(time.time()), "pace": round(pace, 4)}]
    with suppress(MachineError):
        write_atomic(path, "".join(json.dumps(entry) + "\n" for entry in entries[-KEPT:]))


def usual(device: str) -> tuple[float, float]:
    """Return the fastest and the slowest pace that loads on this machine usually have, relative to their profiles.

    Until enough loads are remembered, these are the paces of idle virtual machines (`PACES_AT_REST`). Afterwards, nine
    tenths of the remembered paces lie between the two.

    Args:
        device: name of the kind of device.
    """
    paces = [entry["pace"] for entry in _recent(_path(device))]
    if len(paces) < ENOUGH:
        return PACES_AT_REST
    # Weibull's positions: the next of few loads is outside of their extremes more often than a quantile says.
    low, high = np.quantile(paces, INSIDE, method="weibull")
    return min(NARROWEST[0], float(low)), max(NARROWEST[1], float(high))


def _path(device: str) -> Path:
    return cache_dir() / "paces" / f"{device}.jsonl"


def _recent(path: Path) -> list[dict[str, float]]:
    """Return the recent entries of a record. Those of other versions, or of a damaged file, are left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    found = []
    for line in lines:
        with suppress(ValueError, TypeError, KeyError):
            entry = json.loads(line)
            if time.time() - KEPT_S <= entry["time_s"] and entry["pace"] > 0:
                found.append(entry)
    return found
