"""Replay a user's whole log on a plan, and state what the plan keeps, in all and in each window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xgpt.core.errors import InputError
from xgpt.core.schema import Plan, Profile
from xgpt.core.schema.recommendation import AtLoad
from xgpt.core.workload import TraceLengths
from xgpt.deciding.ranges import confidence
from xsimulator.measures import RequestTimes
from xsimulator.run import replay_by_counts

NUM_WINDOWS = 24
"""Number of windows into which a log is divided."""
LEAST_REQUESTS = 100
"""A window with fewer requests is not judged by itself."""


@dataclass(frozen=True)
class CarriedLoad:
    """The load that a deployment must carry.

    Attributes:
        rate_per_s: requests a second: as the user stated, or of the busiest minute of a log.
        mean_per_s: mean rate of the log, or the stated rate.
        window: the busiest window, in words. "" means that the user stated the rate.
        log: the whole log with its times, or None.
    """

    rate_per_s: float
    mean_per_s: float
    window: str = ""
    log: TraceLengths | None = None


def load_of(trace: TraceLengths | None, stated_per_s: float | None) -> CarriedLoad | None:
    """Return the load that a request states by its rate or its log, or None if it states none."""
    is_timed = trace is not None and trace.timestamp_s is not None and len(trace.input) > 1
    log = trace if is_timed and trace is not None and float(_times_of(trace)[-1]) > 0 else None
    if stated_per_s is not None:
        return CarriedLoad(stated_per_s, stated_per_s, log=log)
    if log is None:
        return None
    times, count = _times_of(log), len(log.input)
    mean, span_s = (count - 1) / float(times[-1]), float(times[-1])
    minutes = np.bincount((times // 60).astype(np.int64))
    peak = max(mean, float(minutes.max()) / min(60.0, span_s))
    return CarriedLoad(peak, mean, f"busiest minute of {count:,} requests", log)


def at_load(plan: Plan, profile: Profile, load: CarriedLoad) -> AtLoad:
    """Return what a plan keeps at a load: over the whole log, in its worst window, and how probable it is."""
    likely = confidence(plan, profile, load.rate_per_s) if plan.constraint.bounds_latency else None
    found = AtLoad(rate_per_s=load.rate_per_s, window=load.window, confidence=likely)
    if load.log is None or not plan.constraint.bounds_latency or (times := replayed(plan, profile, load.log)) is None:
        return found
    late, at = times.excess(plan.constraint.all_bounds) > 1, _times_of(load.log)
    edges = np.linspace(0, float(at[-1]), NUM_WINDOWS + 1)
    window = np.minimum(np.searchsorted(edges, at, side="right") - 1, NUM_WINDOWS - 1)
    number, num_late = (np.bincount(window, weights=each, minlength=NUM_WINDOWS) for each in (None, late))
    enough = number >= min(LEAST_REQUESTS, number.max())
    kept = np.where(enough, 1 - num_late / np.maximum(number, 1), 2.0)
    worst = int(kept.argmin())
    return found.but(
        share_kept=1 - float(late.mean()),
        worst_window=f"{_clock(edges[worst])} to {_clock(edges[worst + 1])}",
        worst_share_kept=float(kept[worst]),
    )


def replayed(plan: Plan, profile: Profile, log: TraceLengths) -> RequestTimes | None:
    """Return the times of all requests of a log at their own times, or None if a fast simulation is not possible.
    Replicas take requests in turn.
    """
    count, parts = len(log.input), list[RequestTimes]()
    for replica in range(plan.replicas):
        part = log.take(np.arange(replica, count, plan.replicas)) if plan.replicas > 1 else log
        one = plan.but(replicas=1)
        try:
            run = replay_by_counts(one, profile, plan.workload, part, len(part.input))
        except InputError:
            return None
        if run is None or run.times is None or len(run.times.whole_s) != len(part.input):
            return None
        parts.append(run.times)
    ttft_s, tpot_s, whole_s = (np.empty(count) for _ in range(3))
    for replica, times in enumerate(parts):
        ttft_s[replica :: plan.replicas] = times.ttft_s
        tpot_s[replica :: plan.replicas] = times.tpot_s
        whole_s[replica :: plan.replicas] = times.whole_s
    return RequestTimes(ttft_s, tpot_s, whole_s)


def _times_of(log: TraceLengths) -> np.ndarray:
    assert log.timestamp_s is not None
    return np.asarray(log.timestamp_s, float)


def _clock(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02d} h" if minutes >= 60 else f"{seconds:.0f} s"
