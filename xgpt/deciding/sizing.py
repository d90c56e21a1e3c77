"""Judge numbers of devices by a user's load: search plans, and replay the log on those that are likely to hold it."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from xgpt.core.progress import Progress
from xgpt.core.schema import PlanDraft, Profile
from xgpt.core.schema.plan import rate_of
from xgpt.deciding.load import CarriedLoad
from xgpt.deciding.phrases import tenths
from xgpt.deciding.recommend import own_first
from xgpt.deciding.verified import unverified, unverified_shape
from xscheduler.found import Found
from xscheduler.objectives.reusing import FindEach
from xscheduler.objectives.sizing import Judged
from xscheduler.problem import Problem


class Sizing:
    """Searches the best plan on each number of devices, and judges how surely it sustains a load.

    Args:
        wanted: probability with which a plan must sustain the load.
    """

    def __init__(
        self, problem: Problem, load: CarriedLoad, find: FindEach, wanted: float, progress: Progress | None = None
    ) -> None:
        self.problem = problem.under(problem.constraint.but(arrival_rate_per_s=load.rate_per_s))
        self._load, self._find, self._wanted, self._progress = load, find, wanted, progress
        self._found: dict[int, tuple[dict[str, Found], Found]] = {}

    def judge(self, number: int) -> Judged:
        """Judge the best plan on so many devices."""
        if self._progress is not None:
            of = f"{self.problem.cluster.num_devices} x {self.problem.cluster.device.name}"
            self._progress(0, 1, f"searching plans on {number} of {of}")
        found = own_first(self._find(replace(self.problem, max_devices=number)))
        first = next(iter(found.values()))
        found, judged = verified_first(found, self.problem.profile, self._load, self._wanted)
        self._found[number] = found, first
        rate, chosen = rate_of(first.draft), next(iter(found.values())).draft
        needed = ceil(number * self._load.rate_per_s / rate) if rate else 0
        return judged._replace(needed=needed, unverified=unverified(chosen))

    def of(self, number: int) -> tuple[dict[str, Found], PlanDraft | None]:
        """Return the schedules on a number of devices that was judged, and the one that stands beside the first."""
        chosen, beside = self._both(number)
        if unverified_shape(chosen):  # then all devices show what verified plans can do
            drafts = (*self._both(max(self._found)), beside)
            beside = next((draft for draft in drafts if draft is not None and not unverified_shape(draft)), beside)
        return self._found[number][0], beside

    def _both(self, number: int) -> tuple[PlanDraft, PlanDraft | None]:
        found, first = self._found[number]
        chosen = next(iter(found.values()))
        return chosen.draft, first.at_side if chosen is first else first.draft


def _judge(found: Found, profile: Profile, load: CarriedLoad, wanted: float) -> Judged:
    """Judge how surely a schedule holds a load. A log is replayed."""
    draft, likely = found.draft, load.confidence(found.draft, profile)
    likely = 1.0 if likely is None else likely  # without known errors, predictions are believed
    if likely > 0 and (kept := load.kept(draft, profile)) and not kept.holds(draft.constraint.quantile):
        worst = "" if kept.worst is None else f", {kept.worst_share:.1%} of those in its worst window"
        return Judged(0.0, f"only {kept.share:.1%} of the log's requests keep the bounds{worst}")
    return Judged(likely, "" if likely >= wanted else f"they sustain the load in {tenths(likely)}")


def verified_first(
    found: dict[str, Found], profile: Profile, load: CarriedLoad, wanted: float
) -> tuple[dict[str, Found], Judged]:
    """Return the schedules and the judgement of the first one. If measurements do not verify its placement, the best
    one that they verify comes first, if it holds the load as surely as wanted, or as the first one.
    """
    kind, first = next(iter(found.items()))
    judged = _judge(first, profile, load, wanted)
    other = first.at_side if unverified_shape(first.draft) else None
    if other is not None and not unverified_shape(other):
        beside = replace(first, draft=other)
        also = _judge(beside, profile, load, wanted)
        if also.confidence >= min(wanted, max(judged.confidence, 1e-9)):
            return {kind: beside, **{name: one for name, one in found.items() if name != kind}}, also
    return found, judged
