"""Record the pace of served loads on this machine: measured step times divided by the times in the profile.

A profile is measured in a minute. The neighbours of a virtual machine, or a GPU's power limit, change the speed for
longer than a minute. So the next load may be slower than the variation within a profile shows.
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
ENOUGH = 8
KEPT_S = 30 * 86400.0
INSIDE = (0.05, 0.95)
"""Quantiles of the recorded paces that bound the usual range. Nine of ten loads are inside."""
NARROWEST = (0.97, 1.05)


def record(plan: Plan, pace: float) -> None:
    """Record the pace of a load in the cache. Do nothing if the cache cannot be written.

    Args:
        plan: the served plan. Nothing is recorded unless its profile was fitted to a served engine. Other profiles have
            a known error.
    """
    if SERVED not in plan.profile.provenance:
        return
    path = _path(plan.cluster.device.name, plan.profile.engine)
    entries = [*_recent(path), {"time_s": round(time.time()), "pace": round(pace, 4)}]
    with suppress(MachineError):
        write_atomic(path, "".join(json.dumps(entry) + "\n" for entry in entries[-KEPT:]))


def usual(device: str, engine: str | None) -> tuple[float, float]:
    """Return the usual range of pace on this machine, lowest and highest, from earlier loads.

    The next pace is in this range with a probability of about nine tenths. If too few loads were recorded, the range is
    that of idle virtual machines (`PACES_AT_REST`).
    """
    paces = [entry["pace"] for entry in _recent(_path(device, engine))]
    if len(paces) < ENOUGH:
        return PACES_AT_REST
    # Weibull's plotting positions allow for the fact that the next load is often outside the range of few loads.
    low, high = np.quantile(paces, INSIDE, method="weibull")
    return min(NARROWEST[0], float(low)), max(NARROWEST[1], float(high))


def _path(device: str, engine: str | None) -> Path:
    name = f"{device}.vllm" if engine == "vllm" else device
    return cache_dir() / "paces" / f"{name}.jsonl"


def _recent(path: Path) -> list[dict[str, float]]:
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
