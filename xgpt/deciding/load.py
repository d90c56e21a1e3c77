"""Replay a user's whole log on a plan, and state what the plan keeps, in all and in each window."""

from __future__ import annotations

from dataclasses import dataclass

from xgpt.core.load import LogLoad
from xgpt.core.numbers import duration
from xgpt.core.schema import Plan, Profile
from xgpt.core.schema.recommendation import AtLoad
from xgpt.deciding.ranges import confidence
from xsimulator.replay import replay


@dataclass(frozen=True)
class CarriedLoad:
    """The load that a deployment must carry.

    Attributes:
        rate_per_s: requests a second: as the user stated, or of the busiest window of a log.
        mean_per_s: mean rate of the log, or the stated rate.
        window: the busiest window, in words. "" means that the user stated the rate.
        log: the whole log with its times, or None.
    """

    rate_per_s: float
    mean_per_s: float
    window: str = ""
    log: LogLoad | None = None


def carried(log: LogLoad | None, stated_per_s: float | None) -> CarriedLoad | None:
    """Return the load that a request states by its rate or its log, or None if it states none."""
    log = log if log is not None and log.busiest is not None else None
    if stated_per_s is not None:
        return CarriedLoad(stated_per_s, stated_per_s, log=log)
    if log is None or log.busiest is None or log.rate_per_s is None:
        return None
    busiest = log.busiest
    of = f"busiest {duration(busiest.seconds)} of {len(log.requests.input):,} requests ({busiest.name})"
    return CarriedLoad(max(busiest.rate_per_s, log.rate_per_s), log.rate_per_s, of, log)


def at_load(plan: Plan, profile: Profile, load: CarriedLoad) -> AtLoad:
    """Return what a plan keeps at a load: over the whole log, in its worst window, and how probable it is."""
    likely = confidence(plan, profile, load.rate_per_s) if plan.constraint.bounds_latency else None
    found = AtLoad(rate_per_s=load.rate_per_s, window=load.window, confidence=likely)
    if load.log is None or not plan.constraint.bounds_latency or (run := replay(plan, profile, load.log)) is None:
        return found
    kept, worst = run.kept, run.kept.worst
    return found.but(
        share_kept=kept.share,
        worst_window="" if worst is None else worst.name,
        worst_share_kept=kept.worst_share,
    )
