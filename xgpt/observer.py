"""When to have a running plan judged, and under what: lengths that have changed, or steps that last longer.

Requests and steps enter as they end; an Observation leaves where the plan is to be judged. Reads no clock: times are
given. What a real server does (`xrunner.server.watch`) and what is simulated are the same. May be imported by every
package.
"""

from __future__ import annotations

from math import exp, inf, log
from typing import NamedTuple

from xgpt.observation import CERTAIN, ChangeDetector, LengthWindow, Sample, Seen, observe
from xgpt.schema import Observation, Plan, ProfileRef

PACE_MEMORY_S = 10.0
"""Time after which a comparison of a step with its prediction counts 1/e. The clock of a shared machine changes every
second: means over less tell which second it was."""
PACE_MEMORY_STEPS = 50
"""Comparisons that count at least, however long they took to come."""
ENOUGH_STEPS = 24
"""Comparisons without which the pace is not known."""
LEAST_SPREAD = 0.1
"""Share by which the pace may differ from the planned one before that means something, where the profile's own spread
is smaller."""
COMPARED_SHARE = 1 / 8
"""Of the steps, that are compared with their prediction at least."""
COMPARED_EVERY_S = 0.05
"""Comparisons come no more often than that where it leaves the share: one takes a tenth of a millisecond."""
_GOLDEN = (5**0.5 - 1) / 2


def differs(slowdown: float, other: float, spread: float) -> bool:
    """Whether two paces are further apart than a profile's own measurements, or chance."""
    return abs(log(slowdown / other)) > log(1 + max(spread, LEAST_SPREAD))


def slowdown_to_plan_with(profile: ProfileRef, measured: float | None) -> float:
    """The measured slowdown where it is known and another than the plan rests on, else the plan's."""
    if measured is None or not differs(measured, profile.slowdown, profile.spread):
        return profile.slowdown
    return measured


class Pace:
    """Measured over predicted time of the steps of late.

    Whole sums are compared: a long step counts as much as several short ones.
    """

    def __init__(self) -> None:
        self._measured_s = self._predicted_s = self._num_compared = 0.0
        self._num_steps, self._step_s = 0, 0.0
        self._first_s = self._last_s = 0.0

    def wants_step(self, step_s: float) -> bool:
        """Whether the step that has just ended shall be compared: a share of them, in step with no cycle of a policy.

        Source: multiples of the golden ratio are spread evenly over [0, 1), whichever of them one takes (Weyl).
        """
        self._num_steps += 1
        self._step_s += (step_s - self._step_s) / min(self._num_steps, PACE_MEMORY_STEPS)
        return self._num_steps * _GOLDEN % 1 < max(COMPARED_SHARE, self._step_s / COMPARED_EVERY_S)

    def note(self, end_s: float, measured_s: float, predicted_s: float) -> None:
        """A step has ended that was compared."""
        if not self._num_compared:
            self._first_s = self._last_s = end_s
        keep = max(1 - 1 / PACE_MEMORY_STEPS, exp(-max(0.0, end_s - self._last_s) / PACE_MEMORY_S))
        self._last_s = end_s
        self._measured_s = keep * self._measured_s + measured_s
        self._predicted_s = keep * self._predicted_s + predicted_s
        self._num_compared = keep * self._num_compared + 1

    def predict_longer(self, factor: float) -> None:
        """Predictions are so many times as long from now on."""
        self._predicted_s *= factor

    @property
    def ratio(self) -> float | None:
        """None: nothing has been compared."""
        return self._measured_s / self._predicted_s if self._predicted_s else None

    @property
    def is_known(self) -> bool:
        """Whether what has been compared is more than one moment of the machine."""
        return self._num_compared >= ENOUGH_STEPS and self._last_s - self._first_s >= PACE_MEMORY_S


class Snapshot(NamedTuple):
    """An engine's requests and its pace at one moment. Quick to take, to be read in whichever thread has the time.

    Attributes:
        requests: at least one; their tokens go on being counted.
        step_ratio, slowdown: see `Observation`.
    """

    requests: list[Seen]
    plan: Plan
    step_ratio: float | None
    slowdown: float | None

    def observation(self) -> Observation | None:
        """All of it, beside what was planned; None: nobody has ended yet."""
        sample = Sample.of(self.requests)
        return self.observe(sample) if sample.num_finished else None

    def observe(self, sample: Sample) -> Observation:
        """Some of its requests."""
        return observe(sample, self.plan.workload, self.step_ratio, self.slowdown)


class Observer:
    """What an engine does beside what its plan foresaw.

    Attributes:
        plan: the running one.
        window: of its requests.
        pace: of its steps, against the plan's predictions.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.window = LengthWindow()
        self.pace = Pace()
        self._detector = ChangeDetector(plan.workload)
        self._judged_slowdown = plan.profile.slowdown
        """The pace at which a plan was last looked for: it is looked for again at another one only."""
        self._since_s = -inf
        """Arrival of the first request with the lengths of now."""

    @property
    def slowdown(self) -> float | None:
        """Measured time of the steps of late over the profile's; None: too few have been compared."""
        ratio = self.pace.ratio
        return ratio * self.plan.profile.slowdown if ratio and self.pace.is_known else None

    def snapshot(self) -> Snapshot | None:
        """How things stand; None: no request has come."""
        self.window.forget_before(self._since_s)
        requests = self.window.requests()
        return Snapshot(requests, self.plan, self.pace.ratio, self.slowdown) if requests else None

    def look(self, now: Snapshot) -> Observation | None:
        """What the plan is to be judged under; None: nothing has changed for certain since it was last judged.

        Whatever is decided, these lengths and this pace are what further ones are compared with from now on. May be
        called from another thread than the rest, once at a time.
        """
        sample = Sample.of(now.requests)
        changed = self._detector.look(sample)
        slowdown, reference = now.slowdown, now.plan.profile
        if changed is not None:
            self._since_s = float(changed.arrival_s[0])
            found = now.observe(changed)
            self._detector = ChangeDetector(found.workload, found.weight)
        elif slowdown is not None and differs(slowdown, self._judged_slowdown, reference.spread):
            # Lengths are still those of before, which more requests tell of than the window holds.
            lengths = {"workload": self._detector.planned, "weight": self._detector.weight or CERTAIN}
            found = now.observe(sample).model_copy(update=lengths)
        else:
            return None
        if slowdown is not None:
            self._judged_slowdown = slowdown
        return found

    def go_over_to(self, plan: Plan) -> None:
        """The running plan is another one from now on."""
        self.pace.predict_longer(plan.profile.slowdown / self.plan.profile.slowdown)
        self.plan = plan
