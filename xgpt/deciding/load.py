"""Replay a user's whole log on a plan, and state what the plan keeps, in all and in each window."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xgpt.core.load import Growth, KeptByWindow, LogLoad
from xgpt.core.schema import Offer, Plan, PlanDraft, Profile
from xgpt.core.schema.plan import rate_of
from xgpt.core.schema.recommendation import AtLoad
from xgpt.deciding.ranges import confidence, paces_of, rate_at
from xsimulator.replay import replay

MOST_COPIES = 4
"""Largest number of deployments of a plan, beyond those that its rate asks for, of which a replay is tried."""
GROWTHS = (1.02, 1.05, 1.1, 1.2, 1.5, 2.0)
"""Factors on a log's rate at which a plan is replayed, to say which growth it no longer holds."""


@dataclass(frozen=True)
class CarriedLoad:
    """The load that a deployment must carry.

    Attributes:
        rate_per_s: requests a second: as the user stated, or of the busiest window of a log.
        window: the busiest window, in words. "" means that the user stated the rate.
        log: the whole log with its times, or None.
    """

    rate_per_s: float
    window: str = ""
    log: LogLoad | None = None
    _late: dict[str, NDArray[np.bool_] | None] = field(default_factory=dict, compare=False)
    _sure: dict[str, float | None] = field(default_factory=dict, compare=False)
    _alone: dict[str, float | None] = field(default_factory=dict, compare=False)

    def confidence(self, plan: PlanDraft, profile: Profile) -> float | None:
        """Return the probability that a plan keeps its bounds at the load's rate, or None if it is not known."""
        e, rate = plan.estimate, rate_of(plan)
        figures = e.throughput_rps, e.latency_s, e.encode_batch, e.encode_tokens, e.decode_batch, e.step_times, e.reuse
        if (name := repr((*_run(plan), plan.cluster, plan.workload, plan.constraint, figures, rate))) not in self._sure:
            self._sure[name] = confidence(plan, profile, self.rate_per_s)
        return self._sure[name]

    def kept(self, plan: PlanDraft, profile: Profile) -> KeptByWindow | None:
        """Return what a plan keeps of the log, or None without a log or a replay."""
        late = self.late(plan, profile)
        return None if late is None or self.log is None else self.log.kept(~late)

    def late(self, plan: PlanDraft, profile: Profile) -> NDArray[np.bool_] | None:
        """Return which of the log's requests are late under a plan, or None without a log or a replay."""
        if self.log is None or not plan.constraint.bounds_latency:
            return None
        if (name := repr(_run(plan))) not in self._late:
            times = replay(plan, profile, self.log)
            self._late[name] = None if times is None else times.excess(plan.constraint.all_bounds) > 1
        return self._late[name]

    def too_much(self, plan: PlanDraft, profile: Profile) -> float | None:
        """Return the least of `GROWTHS` at which a plan no longer holds the log, or None if it holds all."""
        if (log := self.log) is None or log.requests.timestamp_s is None:
            return None

        def is_lost(factor: float) -> bool:
            grown = replace(log, requests=Growth(rate=factor).trace(log.requests))
            kept = CarriedLoad(self.rate_per_s, self.window, grown).kept(plan, profile)
            return kept is not None and not kept.holds(plan.constraint.quantile)

        at = bisect_left(GROWTHS, True, key=is_lost)
        return GROWTHS[at] if at < len(GROWTHS) else None

    def sure_up_to(self, plan: PlanDraft, profile: Profile, wanted: float) -> float | None:
        """Return the factor on the load's rate up to which a plan keeps its bounds with a probability, or None if that
        is not known.
        """
        paces = paces_of(plan, profile)
        return None if paces is None else rate_at(plan, profile, paces.at(wanted)) / self.rate_per_s

    def alone(self, plan: PlanDraft, profile: Profile) -> float | None:
        """Return the share of the log's requests that keep the bounds if none waits for another, or None without a log
        or a replay.
        """
        if self.log is None or self.log.requests.timestamp_s is None:
            return None
        if (name := repr(_run(plan))) not in self._alone:
            number = len(self.log.requests.input)
            apart = self.log.requests._replace(timestamp_s=np.arange(number, dtype=float) * min(1e3, 1e9 / number))
            found = CarriedLoad(self.rate_per_s, self.window, replace(self.log, requests=apart)).late(plan, profile)
            self._alone[name] = None if found is None else float(1 - found.mean())
        return self._alone[name]


def _run(plan: PlanDraft) -> tuple[object, ...]:
    """What decides how a plan runs given requests."""
    return plan.policy, plan.stages, plan.replicas, plan.admission, plan.speculation, plan.engine, plan.profile


def carried(log: LogLoad | None, stated_per_s: float | None) -> CarriedLoad | None:
    """Return the load that a request states by its rate or its log, or None if it states none."""
    log = log if log is not None and log.busiest is not None else None
    if stated_per_s is not None:
        return CarriedLoad(stated_per_s, log=log)
    if log is None or log.busiest is None or log.rate_per_s is None:
        return None
    return CarriedLoad(max(log.busiest.rate_per_s, log.rate_per_s), log.busiest.name, log)


def at_load(plan: Plan, profile: Profile, load: CarriedLoad) -> AtLoad:
    """Return what a plan keeps at a load: over the whole log, in its windows, and how probable it is."""
    if not plan.constraint.bounds_latency:
        return AtLoad(rate_per_s=load.rate_per_s, window=load.window, holds=rate_of(plan) >= load.rate_per_s)
    holds, kept = rate_of(plan) >= load.rate_per_s, load.kept(plan, profile)
    of: dict[str, Any] = {"rate_per_s": load.rate_per_s, "window": load.window}
    if kept is None or load.log is None:
        return AtLoad(**of, confidence=load.confidence(plan, profile), holds=holds)
    seen = of_log(load.log, kept, plan.constraint.quantile)
    if not seen.holds:  # then the probability, which takes ten runs, is 0
        return seen.but(**of, confidence=None if paces_of(plan, profile) is None else 0.0)
    # The replay overrules the rate of the log's busiest window, but not a rate that the user states.
    return seen.but(**of, confidence=load.confidence(plan, profile), holds=holds or bool(load.window))


def of_log(log: LogLoad, kept: KeptByWindow, quantile: float) -> AtLoad:
    """Return what a replay of a log kept."""
    busiest, holds = log.busiest, kept.holds(quantile)
    longer = None if holds or kept.worst is None else log.longer_in(kept.worst)
    return AtLoad(
        rate_per_s=1.0 if busiest is None else busiest.rate_per_s,
        window="" if busiest is None else busiest.name,
        minute_per_s=log.minute_per_s,
        num_requests=len(log.requests.input),
        share_kept=kept.share,
        worst_window="" if kept.worst is None else kept.worst.name,
        worst_share_kept=kept.worst_share,
        worst_input_ratio=longer and longer[0],
        worst_output_ratio=longer and longer[1],
        holds=holds,
        is_short_by_chance=holds and kept.worst_share is not None and kept.worst_share < quantile,
    )


def is_better(offer: Offer, than: Offer) -> bool:
    """Return whether an offer is better than another: it keeps more of a log that the other one does not hold, or else
    the bounds at a higher rate.
    """
    mine, other = offer.at_load, than.at_load
    if mine is None or other is None or mine.share_kept is None or other.share_kept is None or other.holds:
        return offer.rate_per_s.value > than.rate_per_s.value
    return mine.share_kept > other.share_kept


class Copies(NamedTuple):
    """Several deployments of a plan that hold a load together, and the probability that they do (None: not known)."""

    num_devices: int
    confidence: float | None

    def rank(self, wanted: float) -> tuple[bool, float, float]:
        """Return a key that puts fewer devices first, of as many the surest, and last those that hold the load less
        surely than wanted, of these the surest first.
        """
        likely = 1.0 if self.confidence is None else self.confidence
        return (True, -likely, self.num_devices) if likely < wanted else (False, self.num_devices, -likely)


def enough(plan: Plan, profile: Profile, load: CarriedLoad, wanted: float) -> Copies | None:
    """Return the fewest deployments of a plan that hold a load with the wanted probability or, if none do, with a
    smaller one. Return None if no number is known.
    """
    rate = rate_of(plan) or plan.estimate.throughput_rps  # a log may keep bounds that no steady load keeps
    least, paces, surely = max(2, ceil(load.rate_per_s / rate)), paces_of(plan, profile), 0.0
    if paces is not None and (surely := rate_at(plan, profile, paces.at(wanted))) > 0:
        least = max(least, ceil(load.rate_per_s / surely))
    if not rate_of(plan) and ((alone := load.alone(plan, profile)) is None or alone < plan.constraint.quantile):
        return None  # no number of copies serves requests faster than one at a time
    for copies in range(least, least + MOST_COPIES):
        kept = load.kept(plan.but(replicas=copies * plan.replicas), profile)
        if kept is None or kept.holds(plan.constraint.quantile):
            likely = confidence(plan, profile, load.rate_per_s / copies)
            if likely is not None and copies * surely >= load.rate_per_s:
                likely = max(likely, wanted)
            return Copies(copies * plan.num_devices, likely)
    return None
