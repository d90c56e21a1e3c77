"""Replay a user's whole log on a plan, and state what the plan keeps, in all and in each window."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from xgpt.core.load import Growth, KeptByWindow, LogLoad
from xgpt.core.numbers import level_of
from xgpt.core.schema import Offer, Plan, PlanDraft, Profile
from xgpt.core.schema.plan import rate_of
from xgpt.core.schema.recommendation import AtLoad
from xgpt.deciding.ranges import confidence, paces_of, rate_at
from xsimulator.replay import replay

MOST_COPIES = 4
"""Largest number of copies of a plan, beyond those that its rate asks for, of which a replay is tried."""
GROWTHS = (1.02, 1.05, 1.1, 1.2, 1.5, 2.0)
"""Factors on a log's rate at which a plan is replayed, to say which growth it no longer holds."""

Known = TypeVar("Known")


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
    _known: dict[tuple[str, str], Any] = field(default_factory=dict, compare=False)

    def _once(self, what: str, of: tuple[object, ...], find: Callable[[], Known]) -> Known:
        if (key := (what, repr(of))) not in self._known:
            self._known[key] = find()
        return cast(Known, self._known[key])

    def confidence(self, plan: PlanDraft, profile: Profile) -> float | None:
        """Return the probability that a plan keeps its bounds at the load's rate, or None if it is not known."""
        e = plan.estimate
        figures = e.throughput_rps, e.latency_s, e.encode_batch, e.encode_tokens, e.decode_batch, e.step_times, e.reuse
        of = *_run(plan), plan.cluster, plan.workload, plan.constraint, figures, rate_of(plan)
        return self._once("confidence", of, lambda: confidence(plan, profile, self.rate_per_s))

    def kept(self, plan: PlanDraft, profile: Profile) -> KeptByWindow | None:
        """Return what a plan keeps of the log, or None without a log or a replay."""
        late = self.late(plan, profile)
        return None if late is None or self.log is None else self.log.kept(~late)

    def late(self, plan: PlanDraft, profile: Profile) -> NDArray[np.bool_] | None:
        """Return which of the log's requests are late under a plan, or None without a log or a replay."""
        log, bounds = self.log, plan.constraint.all_bounds
        if log is None or not plan.constraint.bounds_latency:
            return None

        def find() -> NDArray[np.bool_] | None:
            times = replay(plan, profile, log)
            return None if times is None else times.excess(bounds) > 1

        return self._once("late", (*_run(plan), bounds), find)

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
        late = self.late_alone(plan, profile)
        return None if late is None else float(1 - late.mean())

    def late_alone(self, plan: PlanDraft, profile: Profile) -> NDArray[np.bool_] | None:
        """Return which of the log's requests are late if none waits for another, or None without a log or a replay."""
        log = self.log
        if log is None or log.requests.timestamp_s is None:
            return None

        def find() -> NDArray[np.bool_] | None:
            number = len(log.requests.input)
            apart = log.requests._replace(timestamp_s=np.arange(number, dtype=float) * min(1e3, 1e9 / number))
            return CarriedLoad(self.rate_per_s, self.window, replace(log, requests=apart)).late(plan, profile)

        return self._once("alone", (*_run(plan), plan.constraint.all_bounds), find)


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
    busiest, minute, holds = log.busiest, log.busiest_minute, kept.holds(quantile)
    longer = None if holds or kept.worst is None else log.longer_in(kept.worst)
    return AtLoad(
        rate_per_s=1.0 if busiest is None else busiest.rate_per_s,
        window="" if busiest is None else busiest.name,
        minute_per_s=minute and minute[0],
        minute=minute[1] if minute else "",
        num_requests=len(log.requests.input),
        share_kept=kept.share,
        worst_window="" if kept.worst is None else kept.worst.name,
        worst_share_kept=kept.worst_share,
        num_late=round((1 - kept.share) * len(log.requests.input)),
        lost=tuple(log.lost(kept, quantile)),
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
    """Several replicas of a plan that hold a load together, and the probability that they do (None: not known)."""

    num_devices: int
    replicas: int
    confidence: float | None

    def rank(self, wanted: float) -> tuple[bool, float, float]:
        """Return a key that puts fewer devices first, of as many the surest as far as words say it, and last those that
        hold the load less surely than wanted, of these the surest first.
        """
        likely = 1.0 if self.confidence is None else self.confidence
        if not self.is_sure(wanted):
            return True, -likely, self.num_devices
        return False, self.num_devices, -level_of(likely)

    def is_sure(self, wanted: float) -> bool:
        return self.confidence is None or self.confidence >= wanted


def enough(plan: Plan, profile: Profile, load: CarriedLoad, wanted: float, than: Copies | None = None) -> Copies | None:
    """Return the fewest replicas of a plan, more than it has, that hold a load with the wanted probability or, if none
    do, with a smaller one. Return None if no number is known, or if they take more devices than others that do.
    """
    rate = rate_of(plan) or plan.estimate.throughput_rps  # a log may keep bounds that no steady load keeps
    groups = plan.replicas // plan.sharing_replicas
    asked = load.rate_per_s * groups
    least, paces, surely = max(groups + 1, ceil(asked / rate)), paces_of(plan, profile), 0.0
    if paces is not None and (surely := rate_at(plan, profile, paces.at(wanted))) > 0:
        least = max(least, ceil(asked / surely))
    devices = plan.sharing_replicas * plan.devices_per_replica
    if than is not None and than.is_sure(wanted) and least * devices > than.num_devices:
        return None
    if not rate_of(plan) and ((alone := load.alone(plan, profile)) is None or alone < plan.constraint.quantile):
        return None  # no number of replicas serves requests faster than one at a time

    def is_held(number: int) -> bool:
        kept = load.kept(plan.but(replicas=number * plan.sharing_replicas), profile)
        return kept is None or kept.holds(plan.constraint.quantile)

    numbers = range(least, least + MOST_COPIES * groups)
    # what holds it holds it with more replicas, and each replay takes seconds
    at = 0 if is_held(groups) or is_held(least) else bisect_left(numbers, True, lo=1, key=is_held)
    if at == len(numbers):
        return None
    likely = confidence(plan, profile, asked / numbers[at])
    if likely is not None and numbers[at] * surely >= asked:
        likely = max(likely, wanted)
    return Copies(numbers[at] * devices, numbers[at] * plan.sharing_replicas, likely)
