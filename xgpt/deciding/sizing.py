"""Judge numbers of devices by a user's load: search plans, and replay the log on those that are likely to hold it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil, inf

from xgpt.core.errors import InfeasibleError
from xgpt.core.numbers import level_of, rounded_down
from xgpt.core.progress import Progress
from xgpt.core.schema import PlanDraft, Profile
from xgpt.core.schema.plan import rate_of
from xgpt.deciding.keeping import in_larger_batches, share_kept
from xgpt.deciding.load import CarriedLoad
from xgpt.deciding.phrases import tenths
from xgpt.deciding.recommend import own_first
from xgpt.deciding.verified import unverified, unverified_class, unverified_shape
from xscheduler.found import Found
from xscheduler.objectives.reusing import FindEach
from xscheduler.objectives.sizing import Judged, fewest_devices
from xscheduler.problem import Problem

NEAR = 0.85
"""Share of a log that a schedule must keep to be tried with larger batches, which keep up to a tenth more."""


class Sizing:
    """Searches the best plan on each number of devices, and judges how surely it sustains a load.

    Args:
        wanted: probability with which a plan must sustain the load.
    """

    def __init__(
        self, problem: Problem, load: CarriedLoad, find: FindEach, wanted: float, progress: Progress | None = None
    ) -> None:
        # a log's replay overrules the rate of its busiest window
        rate = None if load.window else load.rate_per_s
        self.problem = problem.under(problem.constraint.but(arrival_rate_per_s=rate, objective="arrivals"))
        self._load, self._find, self._wanted, self._progress = load, find, wanted, progress
        self._found: dict[int, tuple[dict[str, Found], Found]] = {}
        self._too_few = 0

    def judge(self, number: int) -> Judged:
        """Judge the best plan on so many devices."""
        if self._progress is not None:
            of = f"{self.problem.cluster.num_devices} x {self.problem.cluster.device.name}"
            self._progress(0, 1, f"searching plans on {number} of {of}")
        too_few, self._too_few = self._too_few, max(self._too_few, number)
        found = own_first(self._find(replace(self.problem, max_devices=number)))
        first = next(iter(found.values()))
        found, judged = surest_first(found, self.problem, self._load, self._wanted)
        self._found[number] = found, first
        if judged.confidence >= self._wanted:
            self._too_few = too_few
        rate, chosen = rate_of(first.draft), next(iter(found.values())).draft
        needed = ceil(number * self._load.rate_per_s / rate) if rate else 0
        return judged._replace(needed=needed, unverified=unverified(chosen))

    def found(self, number: int) -> dict[str, Found] | None:
        """Return the schedules on a number of devices, or None if they were not searched with their final draft."""
        return self._found[number][0] if number in self._found and self.problem.speculation is None else None

    def beside(self, number: int) -> PlanDraft | None:
        """Return the schedule that stands beside the first on a number of devices that was judged."""
        chosen, beside = self._both(number)
        # all devices show what verified plans can do
        known = self._verified_shape(max(self._found)) if unverified_shape(chosen) else None
        return known or beside

    def fewest_verified(self, most: int) -> int | None:
        """Return the smallest number of devices, at most `most`, on which a plan that measurements verify sustains the
        load as surely as wanted, or None.
        """
        first = next(iter(self._found.values()))[1].draft
        if most <= self._too_few or unverified_class(first):
            return None
        try:
            fewest = fewest_devices(most, self._judge_verified, self._wanted)
        except InfeasibleError:
            return None
        return fewest.number if fewest.judged.confidence >= self._wanted else None

    def verified(self, number: int) -> PlanDraft | None:
        """Return the best schedule on a number of devices that was judged, of those that measurements verify."""
        draft = next(iter(self._found[number][0].values())).draft
        if unverified(draft):  # the others may take a search
            found = self._verified_shape(number)
            return None if found is None or unverified(found) else found
        return draft

    def _verified_shape(self, number: int) -> PlanDraft | None:
        first = self._found[number][1]
        return of_verified_shape(first, self._both(number), self.problem, self._load, self._wanted)

    def _judge_verified(self, number: int) -> Judged:
        if number not in self._found and number > self._too_few:
            self.judge(number)
        if number <= self._too_few or (draft := self.verified(number)) is None:
            return Judged(0.0)
        needed = ceil(number * self._load.rate_per_s / rate_of(draft))
        return _judge(draft, self.problem.profile, self._load, self._wanted)._replace(needed=needed)

    def _both(self, number: int) -> tuple[PlanDraft, PlanDraft | None]:
        found, first = self._found[number]
        chosen = next(iter(found.values()))
        return chosen.draft, first.at_side if chosen is first else first.draft


def cheapest_verified(sizings: Iterable[Sizing]) -> tuple[Sizing, PlanDraft] | None:
    """Return the cheapest plan that measurements verify and that sustains the load as surely as wanted, or None.

    Args:
        sizings: the clusters that sustain it, each with a price.
    """
    found, least = None, inf
    for sizing in sizings:
        cluster = sizing.problem.cluster
        assert cluster.price_per_device_hour is not None
        cheaper = min(float(cluster.num_devices), least / cluster.price_per_device_hour - 1e-9)
        if (number := sizing.fewest_verified(int(cheaper))) is not None and (draft := sizing.verified(number)):
            found, least = (sizing, draft), number * cluster.price_per_device_hour
    return found


def _judge(draft: PlanDraft, profile: Profile, load: CarriedLoad, wanted: float) -> Judged:
    """Judge how surely a schedule holds a load. A log is replayed if its rate is likely to be sustained at all."""
    likely, rate = load.confidence(draft, profile), rate_of(draft)
    likely = 1.0 if likely is None else likely  # without known errors, predictions are believed
    if not likely:
        why = f"the best schedule found keeps the bounds only up to {rate:.3g} requests/s"
        return Judged(0.0, why, kept_per_s=rate)
    if (kept := load.kept(draft, profile)) and not kept.holds(draft.constraint.quantile):
        worst = "" if kept.worst is None else f", {kept.worst_share:.1%} of those in its worst window"
        only = f"only {kept.share:.1%} of the log's requests{worst}"
        why = f"of the plans of the highest rates, the best keeps the bounds for {only}"
        return Judged(0.0, why, kept_per_s=rate)
    return Judged(likely, "" if likely >= wanted else f"they sustain the load in {tenths(likely)}")


def surest_first(
    found: dict[str, Found], problem: Problem, load: CarriedLoad, wanted: float
) -> tuple[dict[str, Found], Judged]:
    """Return the schedules and the judgement of the first one. A schedule of another shape comes first if it holds the
    load more surely, up to what is wanted, or as surely if measurements verify only its placement. None that they do
    not verify comes before one that they do. If none holds a log, each is tried with larger batches.
    """
    profile = problem.profile
    kind, first = next(iter(found.items()))
    best, judged = first.draft, _judge(first.draft, profile, load, wanted)

    def try_also(others: Iterable[PlanDraft | None]) -> None:
        nonlocal best, judged
        for other in others:
            if other is None or bool(unverified_shape(other)) > bool(unverified_shape(best)):
                continue
            is_known = bool(unverified_shape(best)) and not unverified_shape(other)
            least = _level(judged.confidence, wanted), -int(is_known)
            if (_level(load.confidence(other, profile), wanted), 0) > least:  # a replay takes longer
                also = _judge(other, profile, load, wanted)
                if also.confidence and (_level(also.confidence, wanted), 0) > least:
                    best, judged = other, also

    is_near = judged.confidence < wanted and load.confidence(best, profile) != 0
    others = [first.at_side] if unverified_shape(best) else []
    others += first.other_shapes if is_near else []
    try_also(others)
    if not judged.confidence and is_near:
        tried = [first.draft, *(each for each in others if each is not None)]
        near = (draft for draft in tried if share_kept(draft, problem, load) >= NEAR)
        larger = [in_larger_batches(draft, problem, load) for draft in near]
        try_also(larger)
        if not judged.confidence:
            most = max((*tried, *larger), key=lambda draft: share_kept(draft, problem, load))
            judged = judged._replace(why_not=_judge(most, profile, load, wanted).why_not)
    if best is first.draft:
        return found, judged
    return found | {kind: replace(first, draft=best)}, judged


def of_verified_shape(
    first: Found, known: Iterable[PlanDraft | None], problem: Problem, load: CarriedLoad, wanted: float
) -> PlanDraft | None:
    """Return the schedule that holds a load most surely or else keeps most of it, of those whose placement measurements
    verify.

    Args:
        known: schedules that have been found. Unless the first of them that is verified holds the load as surely as
            wanted, the best one of each further shape is searched.
    """
    profile = problem.profile

    def sure(draft: PlanDraft) -> float:
        return _level(_judge(draft, profile, load, wanted).confidence, wanted)

    def rank(draft: PlanDraft) -> tuple[float, float, float]:
        kept = load.kept(draft, profile)
        return sure(draft), 0.0 if kept is None else kept.share, rate_of(draft)

    drafts = [draft for draft in known if draft is not None and not unverified_shape(draft)]
    if not drafts or sure(drafts[0]) < wanted:
        drafts += [draft for draft in first.other_shapes if not unverified_shape(draft)]
    if drafts and not any(map(sure, drafts)):
        drafts = [in_larger_batches(draft, problem, load) for draft in drafts]
    return max(drafts, key=rank, default=None)


def comes_first(other: PlanDraft, best: PlanDraft, profile: Profile, load: CarriedLoad | None) -> bool:
    """Return whether a schedule of another shape is better than the one that a search ranks first: whether it keeps the
    bounds at a higher rate on as many devices, is as well verified, and holds a load as surely in words.
    """
    is_known = bool(unverified_shape(other)) <= bool(unverified_shape(best))
    if other.num_devices != best.num_devices or rate_of(other) <= rate_of(best) or not is_known:
        return False
    if load is None:
        return True
    sure, known = (_judge(draft, profile, load, 0.0).confidence for draft in (other, best))
    return known > 0 and level_of(sure) == level_of(known)


def _level(confidence: float | None, wanted: float) -> float:
    """Return a probability as far as words tell it, up to what is wanted."""
    sure = 1.0 if confidence is None else confidence
    return wanted if sure >= wanted else rounded_down(sure)
