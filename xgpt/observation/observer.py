"""Decide when to re-plan a running engine, and for which request lengths and pace of steps.

Callers add finished requests and steps, and get an Observation when it is time to re-plan. Times are arguments and not
read from a clock, so a server (`xrunner.server.observe.watch`) and a simulation behave in the same way.
"""

from __future__ import annotations

from collections import deque
from math import exp, fsum, inf, log, sqrt
from typing import NamedTuple

from xgpt.core.schema import LEAST_HEADROOM, Observation, Plan, ProfileRef
from xgpt.core.schema.plan import rate_of
from xgpt.observation.reuse import Common, ReuseWindow, changed, observed_reuse, share_of
from xgpt.observation.windows import CERTAIN, ChangeDetector, Goodput, LengthWindow, Sample, Seen, observe

LOOK_EVERY = 16
"""Request lengths are examined again after this many ended requests, or twice as many arrivals. Arrivals count too,
since few requests end under overload.
"""
LOOK_INTERVAL_S = 0.5

PACE_MEMORY_S = 10.0
"""After this time, the comparison of a step with its prediction has the weight 1/e. Means over shorter times are not
representative, since the clock rate of a shared machine changes every second.
"""
PACE_MEMORY_STEPS = 50
ENOUGH_STEPS = 24
STRETCH_S = 0.5
ENOUGH_STRETCHES = 4
SURE = 2.0
LEAST_GAIN = 0.1
"""A faster pace counts as a change if steps are shorter than planned by this share. Running slightly slow costs less
than breaking a bound, so speed-ups need more evidence than slow-downs.
"""
COMPARED_SHARE = 1 / 8
"""At least this share of all steps are compared with their predictions."""
COMPARED_EVERY_S = 0.05
RISE = 1.25
"""The arrival rate counts as changed if it exceeds both the rate at the last observation and the plan's highest rate by
this factor. The factor exceeds 1 by two relative standard errors of a rate computed from `RATE_REQUESTS` Poisson
arrivals.
"""
_GOLDEN = (5**0.5 - 1) / 2


def is_slower(slowdown: float, other: float, spread: float) -> bool:
    """Return whether steps with this `slowdown` are too slow for a plan made for the slowdown `other`, headroom
    included.
    """
    return slowdown > other * (1 + max(spread, LEAST_HEADROOM))


def differs(slowdown: float, other: float, spread: float) -> bool:
    return is_slower(slowdown, other, spread) or slowdown * (1 + max(spread, LEAST_GAIN)) < other


def slowdown_to_plan_with(profile: ProfileRef, measured: float | None) -> float:
    """Return the slowdown for which to plan. This is the measured one if it is known and differs from the profile's.
    Otherwise it is the profile's.
    """
    if measured is None or not differs(measured, profile.slowdown, profile.spread):
        return profile.slowdown
    return measured


class MeasuredPace:
    """Computes the ratio of measured to predicted time over the latest steps.

    The ratio is the sum of measured times divided by the sum of predicted times, so that a long step counts as much as
    several short steps.
    """

    def __init__(self) -> None:
        self._measured_s = self._predicted_s = self._num_compared = 0.0
        self._num_steps, self._step_s = 0, 0.0
        self._first_s = self._last_s = 0.0
        self._stretch_s = self._stretch_measured_s = self._stretch_predicted_s = 0.0
        self._stretches: deque[float] = deque(maxlen=round(PACE_MEMORY_S / STRETCH_S))

    def wants_step(self, step_s: float) -> bool:
        """The choice does not follow a policy's cycle, so all kinds of steps are compared equally often."""
        self._num_steps += 1
        self._step_s += (step_s - self._step_s) / min(self._num_steps, PACE_MEMORY_STEPS)
        return self._num_steps * _GOLDEN % 1 < max(COMPARED_SHARE, self._step_s / COMPARED_EVERY_S)

    def note(self, end_s: float, measured_s: float, predicted_s: float) -> None:
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
        """Multiply earlier predictions by a factor. Later predictions contain it already."""
        self._predicted_s *= factor
        self._stretch_predicted_s *= factor
        self._stretches = deque((ratio - log(factor) for ratio in self._stretches), self._stretches.maxlen)

    @property
    def ratio(self) -> float | None:
        """The ratio of measured to predicted time. None means that no step has been compared."""
        return self._measured_s / self._predicted_s if self._predicted_s else None

    @property
    def is_known(self) -> bool:
        return self._num_compared >= ENOUGH_STEPS and self._last_s - self._first_s >= PACE_MEMORY_S

    @property
    def least_ratio(self) -> float:
        """Lower confidence limit of the ratio. It is computed from the ratios of several periods, and is 0 if there are
        too few.
        """
        count = len(self._stretches)
        if count < ENOUGH_STRETCHES:
            return 0.0
        mean = fsum(self._stretches) / count
        # The event loop calls this often, and statistics.stdev takes thirty times as long for a few more correct
        # digits.
        error = sqrt(fsum((ratio - mean) ** 2 for ratio in self._stretches) / (count * (count - 1)))
        return exp(mean - SURE * error)


class Snapshot(NamedTuple):
    """An engine's requests and pace at one moment. Creating it is quick, and any thread may read it.

    Attributes:
        requests: at least one request. Their token counts continue to grow.
        common: requests with the keys of their K/V blocks. Equal keys mean a shared prefix.
        step_ratio, slowdown, goodput: see `Observation`.
    """

    requests: list[Seen]
    common: list[Common]
    plan: Plan
    step_ratio: float | None
    slowdown: float | None
    goodput: float | None = None
    is_missed: bool = False

    def observation(self) -> Observation | None:
        sample = Sample.of(self.requests)
        return self.observe(sample) if sample.num_finished else None

    def observe(self, sample: Sample) -> Observation:
        found = observe(sample, self.plan.workload, self.step_ratio, self.slowdown)
        reuse = observed_reuse(self.common, self.plan.block_size)
        return found.but(reuse=reuse, goodput=self.goodput)


class Observer:
    """Compares what an engine serves with its plan: request lengths, arrival rate, pace of steps, prefix reuse and
    goodput.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.window = LengthWindow()
        self.reuse = ReuseWindow(plan)
        self.pace = MeasuredPace()
        self.goodput = Goodput()
        self._has_judged_missed = False
        self._detector = ChangeDetector(plan.workload)
        self._judged_slowdown = plan.profile.slowdown
        """The slowdown in the last observation. Only a different slowdown leads to a new observation."""
        self._since_s = -inf
        self._judged_share = 0.0 if plan.estimate.reuse is None else plan.estimate.reuse.share
        self._judged_common: list[Common] | None = None
        """The requests from which `_judged_share` was computed. None means that `_judged_share` is the plan's own
        share.
        """
        self._judged_rate_per_s = 0.0
        """The arrival rate in the last observation. If the plan maximises the rate, a higher rate leads to a new
        observation.
        """
        self._looked_at_arrival = 0
        self._num_ended = 0
        self._looked_s = -inf

    @property
    def slowdown(self) -> float | None:
        """Ratio of the latest steps' times to their times in the profile. None means that too few steps have been
        compared.

        A slowdown beyond the plan's headroom is returned as soon as it is significant, even after few steps.
        """
        ratio, spread = self.pace.ratio, self.plan.profile.spread
        is_known = self.pace.is_known or is_slower(self.pace.least_ratio, 1.0, spread)
        return ratio * self.plan.profile.slowdown if ratio and is_known else None

    def end(self, seen: Seen) -> None:
        seen.has_ended = True
        self._num_ended += 1

    def is_due(self, now_s: float) -> bool:
        """Return whether it is time to call `look` with a new `snapshot`. If True, the time to the next examination
        starts.
        """
        if now_s - self._looked_s <= LOOK_INTERVAL_S:
            return False
        num_arrived = self.window.num_arrived
        if self._num_ended < LOOK_EVERY and num_arrived - self._looked_at_arrival < 2 * LOOK_EVERY:
            slowdown, spread = self.slowdown, self.plan.profile.spread
            if slowdown is None or not is_slower(slowdown, self._judged_slowdown, spread):
                return False
        self._num_ended, self._looked_s, self._looked_at_arrival = 0, now_s, num_arrived
        return True

    def snapshot(self) -> Snapshot | None:
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
        """Examine a snapshot. Return the observation for which to re-plan, or None if nothing has changed
        significantly.

        Later snapshots are compared with the returned observation, whether or not the plan changes. This method may run
        in another thread than the other methods, but not in two threads at the same time.
        """
        sample = Sample.of(now.requests)
        others = self._detector.look(sample)
        slowdown, reference = now.slowdown, now.plan.profile
        common = self._look_at_reuse(now.common)
        if common is not None:
            now = now._replace(common=common)
        is_newly_missed, self._has_judged_missed = now.is_missed and not self._has_judged_missed, now.is_missed
        is_other_pace = slowdown is not None and differs(slowdown, self._judged_slowdown, reference.spread)
        is_risen = self._is_risen(now.plan, sample.arrival_rate_per_s())
        causes = {"reuse": common is not None, "pace": is_other_pace, "arrivals": is_risen, "goodput": is_newly_missed}
        if others is not None:
            self._since_s = float(others.arrival_s[0])
            found = now.observe(others).but(cause="lengths")
            self._detector = ChangeDetector(found.workload, found.weight)
        elif any(causes.values()) and sample.num_finished:
            # Lengths are unchanged, and the earlier ones were computed from more requests than the window contains.
            found = now.observe(sample)
            found = found.but(
                cause=next(name for name, holds in causes.items() if holds),
                workload=self._detector.planned,
                weight=self._detector.weight or CERTAIN,
                lengths="planned" if self._detector.planned == now.plan.workload else "observed",
                recent_input_mean=found.workload.input.mean,
                recent_output_mean=found.workload.output.mean,
            )
        else:
            return None
        if slowdown is not None:
            self._judged_slowdown = slowdown
        self._judged_rate_per_s = found.arrival_rate_per_s or self._judged_rate_per_s
        return found

    def _is_risen(self, plan: Plan, rate_per_s: float | None) -> bool:
        if rate_per_s is None or not plan.constraint.maximises_arrivals:
            return False
        return rate_per_s > RISE * max(self._judged_rate_per_s, rate_of(plan))

    def _look_at_reuse(self, common: list[Common]) -> list[Common] | None:
        """A share that was computed from few requests is computed again once there are twice as many."""
        since = changed(common, self._judged_share)
        if since is None and self._judged_common is not None and len(common) >= 2 * len(self._judged_common):
            since = common
        if since is None:
            return None
        self._judged_common = list(since)
        self._judged_share, _ = share_of(since)
        return self._judged_common

    def go_over_to(self, plan: Plan) -> None:
        self.reuse.go_over_to(plan)
        self.goodput, self._has_judged_missed = Goodput(), False
        self.pace.predict_longer(plan.profile.slowdown / self.plan.profile.slowdown)
        self.plan = plan
