"""Decide when a running plan is to be judged, and under which lengths and pace.

Requests and steps enter as they end; an Observation leaves where the plan is to be judged. Reads no clock: times are
given. What a real server does (`xrunner.server.observe.watch`) and what is simulated are the same. May be imported by
every package.
"""

from __future__ import annotations

from collections import deque
from math import exp, fsum, inf, log, sqrt
from typing import NamedTuple

from xgpt.core.schema import LEAST_HEADROOM, Observation, Plan, ProfileRef
from xgpt.observation.reuse import Common, ReuseWindow, changed, observed_reuse, share_of
from xgpt.observation.windows import CERTAIN, ChangeDetector, Goodput, LengthWindow, Sample, Seen, observe

LOOK_EVERY = 16
"""Ended requests between two looks at their lengths."""
LOOK_INTERVAL_S = 0.5
"""Time between two looks, at least."""

PACE_MEMORY_S = 10.0
"""Time after which a comparison of a step with its prediction counts 1/e. The clock of a shared machine changes every
second: means over less tell which second it was."""
PACE_MEMORY_STEPS = 50
"""Comparisons that count at least, however long they took."""
ENOUGH_STEPS = 24
"""Comparisons that it takes to know the pace."""
STRETCH_S = 0.5
"""The pace of such stretches, one after the other, tells how sure its mean is."""
ENOUGH_STRETCHES = 4
"""Stretches that it takes to tell the error of the mean."""
SURE = 2.0
"""Standard errors that tell a slower machine from chance."""
LEAST_GAIN = 0.1
"""Share by which steps must be shorter than planned before that means something. To be a little slower than one could
be costs less than a broken bound, so that a machine's good moment does not count as soon as its bad one."""
COMPARED_SHARE = 1 / 8
"""Of the steps, that are compared with their prediction at least."""
COMPARED_EVERY_S = 0.05
"""Least time between two comparisons; one takes a tenth of a millisecond."""
_GOLDEN = (5**0.5 - 1) / 2


def is_slower(slowdown: float, other: float, spread: float) -> bool:
    """Whether that pace uses up the headroom of a plan for the other."""
    return slowdown > other * (1 + max(spread, LEAST_HEADROOM))


def differs(slowdown: float, other: float, spread: float) -> bool:
    """Whether two paces are further apart than a profile's own measurements, or chance."""
    return is_slower(slowdown, other, spread) or slowdown * (1 + max(spread, LEAST_GAIN)) < other


def slowdown_to_plan_with(profile: ProfileRef, measured: float | None) -> float:
    """Return the measured slowdown if it is known and differs from the plan's, otherwise the plan's."""
    if measured is None or not differs(measured, profile.slowdown, profile.spread):
        return profile.slowdown
    return measured


class MeasuredPace:
    """Measured over predicted time of the latest steps.

    Whole sums are compared: a long step counts as much as several short ones.
    """

    def __init__(self) -> None:
        self._measured_s = self._predicted_s = self._num_compared = 0.0
        self._num_steps, self._step_s = 0, 0.0
        self._first_s = self._last_s = 0.0
        self._stretch_s = self._stretch_measured_s = self._stretch_predicted_s = 0.0
        """Beginning and sums of the present stretch."""
        self._stretches: deque[float] = deque(maxlen=round(PACE_MEMORY_S / STRETCH_S))
        """Logarithms of the ratios of those before it."""

    def wants_step(self, step_s: float) -> bool:
        """Whether to compare the step that has just ended: a share of all steps, in phase with no cycle of a policy.

        Source: multiples of the golden ratio are spread evenly over [0, 1), whichever of them one takes (Weyl).
        """
        self._num_steps += 1
        self._step_s += (step_s - self._step_s) / min(self._num_steps, PACE_MEMORY_STEPS)
        return self._num_steps * _GOLDEN % 1 < max(COMPARED_SHARE, self._step_s / COMPARED_EVERY_S)

    def note(self, end_s: float, measured_s: float, predicted_s: float) -> None:
        """Add a step and its prediction."""
        if not self._num_compared:
            self._first_s = self._last_s = self._stretch_s = end_s
        keep = max(1 - 1 / PACE_MEMORY_STEPS, exp(-max(0.0, end_s - self._last_s) / PACE_MEMORY_S))
        self._last_s = end_s
        self._measured_s = keep * self._measured_s + measured_s
        self._predicted_s = keep * self._predicted_s + predicted_s
        self._num_compared = keep * self._num_compared + 1
        self._stretch_measured_s += measured_s
        self._stretch_predicted_s += predicted_s
        if end_s - self._stretch_s >= STRETCH_S:
            self._stretches.append(log(self._stretch_measured_s / self._stretch_predicted_s))
            self._stretch_s, self._stretch_measured_s, self._stretch_predicted_s = end_s, 0.0, 0.0

    def predict_longer(self, factor: float) -> None:
        """Multiply the predictions by a factor from now on."""
        self._predicted_s *= factor
        self._stretch_predicted_s *= factor
        self._stretches = deque((ratio - log(factor) for ratio in self._stretches), self._stretches.maxlen)

    @property
    def ratio(self) -> float | None:
        """None: nothing has been compared."""
        return self._measured_s / self._predicted_s if self._predicted_s else None

    @property
    def is_known(self) -> bool:
        """Whether what has been compared is more than one moment of the machine."""
        return self._num_compared >= ENOUGH_STEPS and self._last_s - self._first_s >= PACE_MEMORY_S

    @property
    def least_ratio(self) -> float:
        """What the ratio is at least, as far as its stretches tell; 0: they are too few."""
        count = len(self._stretches)
        if count < ENOUGH_STRETCHES:
            return 0.0
        mean = fsum(self._stretches) / count
        # By hand: the event loop asks often, and statistics.stdev takes thirty times as long for its last digits.
        error = sqrt(fsum((ratio - mean) ** 2 for ratio in self._stretches) / (count * (count - 1)))
        return exp(mean - SURE * error)


class Snapshot(NamedTuple):
    """An engine's requests and its pace at one moment. Quick to take, to be read in whichever thread has the time.

    Attributes:
        requests: at least one; their tokens go on being counted.
        common: what they had in common.
        step_ratio, slowdown, goodput: see `Observation`.
        is_missed: whether the goodput is below the plan's quantile, and not by chance.
    """

    requests: list[Seen]
    common: list[Common]
    plan: Plan
    step_ratio: float | None
    slowdown: float | None
    goodput: float | None = None
    is_missed: bool = False

    def observation(self) -> Observation | None:
        """Return all requests compared with what was planned; None: no request has finished yet."""
        sample = Sample.of(self.requests)
        return self.observe(sample) if sample.num_finished else None

    def observe(self, sample: Sample) -> Observation:
        """Return some of the requests compared with what was planned."""
        found = observe(sample, self.plan.workload, self.step_ratio, self.slowdown)
        reuse = observed_reuse(self.common, self.plan.block_size)
        return found.model_copy(update={"reuse": reuse, "goodput": self.goodput})


class Observer:
    """Compares what an engine does with what its plan predicts.

    Attributes:
        plan: the running one.
        window: of its requests.
        reuse: what these had in common.
        pace: of its steps, against the plan's predictions.
        goodput: of its requests, by bounds of their own or the plan's.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.window = LengthWindow()
        self.reuse = ReuseWindow(plan)
        self.pace = MeasuredPace()
        self.goodput = Goodput()
        self._has_judged_missed = False
        """Whether a plan has been looked for since the goodput fell below the quantile."""
        self._detector = ChangeDetector(plan.workload)
        self._judged_slowdown = plan.profile.slowdown
        """The pace at which a plan was last looked for: it is looked for again at another one only."""
        self._since_s = -inf
        """Arrival of the first request with the lengths of now."""
        self._judged_share = 0.0 if plan.estimate.reuse is None else plan.estimate.reuse.share
        """Share of prompt tokens found under which a plan was last looked for."""
        self._judged_common: list[Common] | None = None
        """The requests that this share is of; None: the plan's own."""
        self._num_ended = 0
        """Since the last look."""
        self._looked_s = -inf

    @property
    def slowdown(self) -> float | None:
        """Measured time of the latest steps over the profile's; None: too few have been compared.

        A pace that uses up the plan's headroom is returned as soon as chance hardly explains it.
        """
        ratio, spread = self.pace.ratio, self.plan.profile.spread
        is_known = self.pace.is_known or is_slower(self.pace.least_ratio, 1.0, spread)
        return ratio * self.plan.profile.slowdown if ratio and is_known else None

    def end(self, seen: Seen) -> None:
        """Count a request of the window as finished."""
        seen.has_ended = True
        self._num_ended += 1

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to take a `snapshot` and `look` at it; if so, it counts as taken."""
        if now_s - self._looked_s <= LOOK_INTERVAL_S:
            return False
        if self._num_ended < LOOK_EVERY:
            slowdown, spread = self.slowdown, self.plan.profile.spread
            if slowdown is None or not is_slower(slowdown, self._judged_slowdown, spread):
                return False
        self._num_ended, self._looked_s = 0, now_s
        return True

    def snapshot(self) -> Snapshot | None:
        """Return the requests and the pace of this moment; None: no request has arrived."""
        self.window.forget_before(self._since_s)
        if self._judged_common:
            self.reuse.forget_before(self._judged_common[0])
        requests = self.window.requests()
        common = self.reuse.requests()
        if not requests:
            return None
        is_missed = self.goodput.is_below(self.plan.constraint.quantile)
        return Snapshot(requests, common, self.plan, self.pace.ratio, self.slowdown, self.goodput.share, is_missed)

    def look(self, now: Snapshot) -> Observation | None:
        """Return what the plan is to be judged under; None: nothing has certainly changed since it was last judged.

        Whatever is decided, these lengths and this pace are what further ones are compared with from now on. May be
        called from another thread than the rest, once at a time.
        """
        sample = Sample.of(now.requests)
        others = self._detector.look(sample)
        slowdown, reference = now.slowdown, now.plan.profile
        common = self._look_at_reuse(now.common)
        if common is not None:
            now = now._replace(common=common)
        is_newly_missed, self._has_judged_missed = now.is_missed and not self._has_judged_missed, now.is_missed
        is_other_pace = slowdown is not None and differs(slowdown, self._judged_slowdown, reference.spread)
        if others is not None:
            self._since_s = float(others.arrival_s[0])
            found = now.observe(others)
            self._detector = ChangeDetector(found.workload, found.weight)
        elif (is_other_pace or is_newly_missed or common is not None) and sample.num_finished:
            # Lengths are still those of before, which were learnt from more requests than the window holds.
            lengths = {"workload": self._detector.planned, "weight": self._detector.weight or CERTAIN}
            found = now.observe(sample).model_copy(update=lengths)
        else:
            return None
        if slowdown is not None:
            self._judged_slowdown = slowdown
        return found

    def _look_at_reuse(self, common: list[Common]) -> list[Common] | None:
        """Return the requests that find more or less than those of the last look for a plan; None if that is not
        certain.

        A change that was seen in few requests is looked at again once there are twice as many.
        """
        since = changed(common, self._judged_share)
        if since is None and self._judged_common is not None and len(common) >= 2 * len(self._judged_common):
            since = common
        if since is None:
            return None
        self._judged_common = list(since)
        self._judged_share, _ = share_of(since)
        return self._judged_common

    def go_over_to(self, plan: Plan) -> None:
        """Observe another plan from now on."""
        self.reuse.go_over_to(plan)
        self.goodput, self._has_judged_missed = Goodput(), False
        self.pace.predict_longer(plan.profile.slowdown / self.plan.profile.slowdown)
        self.plan = plan
