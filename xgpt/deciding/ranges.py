"""Compute the ranges of a plan's figures from the errors of earlier predictions, and how probable it is that the plan
sustains a load.

The error of a prediction is a pace: the factor by which steps take longer than predicted. Figures are simulated at both
ends of the range of paces, since a bound that is kept with little margin breaks at once if steps are slower.
"""

from __future__ import annotations

from math import exp, log
from statistics import NormalDist
from typing import Any, NamedTuple

from xgpt.core.schema import FittedLoads, PlanDraft, Profile
from xgpt.core.schema.plan import rate_of
from xgpt.observation.paces import usual
from xprofiler.ranges import Quantity, beyond, cell_of, likely
from xsimulator.capacity import capacity, sustains

INSIDE = 0.9
"""Probability that a measured value lies within its range."""
LEAST_ERROR = 0.03
"""Error of a prediction that was fitted to its load: loads of the same kind differ by more than a fit's rest."""
ALMOST_NONE = 0.01
"""Rates below this share of throughput at saturation are none in a range."""
HALVINGS = 8
"""Number of paces that are simulated to find the one at which a plan just sustains a load."""


class PaceRange(NamedTuple):
    """The likely range of pace: steps take `fast` to `slow` times as long as predicted in nine of ten cases, and up to
    `middle` times in half of the cases. The logarithm of pace is normal on each side of its median, with two spreads.
    """

    fast: float
    slow: float
    middle: float

    def share_below(self, pace: float) -> float:
        """Return the probability that steps are not slower than this."""
        if self.slow <= self.fast:
            return float(pace >= self.slow)
        return NormalDist().cdf(log(pace / self.middle) / self._spread(is_slow=pace > self.middle))

    def at(self, share: float) -> float:
        """Return the pace than which steps are not slower with this probability."""
        deviations = NormalDist().inv_cdf(min(max(share, 1e-6), 1 - 1e-6))
        return self.middle * exp(deviations * self._spread(is_slow=share > 0.5))

    def _spread(self, *, is_slow: bool) -> float:
        side = self.slow / self.middle if is_slow else self.middle / self.fast
        return log(side) / NormalDist().inv_cdf((1 + INSIDE) / 2)


def paces_of(plan: PlanDraft, profile: Profile) -> PaceRange | None:
    """Return the likely paces of a plan's steps, or None if no earlier predictions are known."""
    if profile.is_served:
        fast, slow = usual(plan.cluster.device.name, plan.profile.engine)
        return PaceRange(fast, slow, (fast * slow) ** 0.5)
    if profile.fitted is not None:
        factor = _after_fit(profile.fitted, plan, "throughput")
        return PaceRange(1 / factor, factor, 1.0)
    if (cell := cell_of(plan)) is None:
        return None
    found = likely(cell, "throughput", borrowed=is_borrowed(plan))
    return PaceRange(1 / found.high, 1 / found.low, 1 / found.middle)


def _after_fit(fitted: FittedLoads, plan: PlanDraft, quantity: Quantity) -> float:
    beyond_fit = beyond(quantity, fitted.times_beyond(plan.estimate.decode_batch))
    return (1 + max(fitted.error, LEAST_ERROR)) * beyond_fit


def is_borrowed(plan: PlanDraft) -> bool:
    """Return whether a plan's times belong to another engine or version, or use another device's efficiencies."""
    efficiency = plan.cluster.device.efficiency
    borrowed = plan.profile.source == "analytic" and (efficiency is None or efficiency.like is not None)
    return borrowed or (plan.engine is not None and bool(plan.engine.borrowed))


def rate_at(plan: PlanDraft, profile: Profile, pace: float) -> float:
    """Return the highest arrival rate within the bounds if steps take `pace` times as long as predicted. A plan without
    bounds reaches its saturated throughput.
    """
    slowed = _slowed(plan, pace)
    throughput = slowed.estimate.throughput_rps
    predicted = rate_of(plan) / pace or None
    found = capacity(slowed, profile.slowed(pace), predicted, edges=False, least_share=ALMOST_NONE)
    if found is not None and plan.workload.sessions is not None:
        return found.rate_per_s  # what turns find, and so the throughput at saturation, depends on the rate
    return throughput if found is None else min(found.rate_per_s, throughput)


def _slowed(plan: PlanDraft, pace: float) -> PlanDraft:
    # The headroom allows for slower steps. Here the pace is known, so the bounds themselves must be kept.
    bounds_alone = plan.but(constraint=plan.constraint.but(headroom=0.0))
    return bounds_alone.with_estimate(throughput_rps=plan.estimate.throughput_rps / pace)


def _sustains(plan: PlanDraft, profile: Profile, pace: float, load_per_s: float) -> bool:
    """Return whether `rate_at` is at least the load, without a search for the rate."""
    if not plan.constraint.bounds_latency or plan.workload.sessions is not None:
        return rate_at(plan, profile, pace) >= load_per_s
    return sustains(_slowed(plan, pace), profile.slowed(pace), load_per_s)


def ranges_of(plan: PlanDraft, profile: Profile) -> dict[str, Any]:
    """Return the fields of an estimate with the ranges of its figures. They are empty if no errors of earlier
    predictions are known.

    If the profile was fitted to a served engine, the errors are those on this machine. Otherwise they are those of
    predictions of published measurements.
    """
    paces = paces_of(plan, profile)
    if paces is None:
        return {"ranges": {}, "ranges_from": {}}
    estimate, rows = plan.estimate, dict[str, str]()
    ranges = {"throughput_rps": (estimate.throughput_rps / paces.slow, estimate.throughput_rps / paces.fast)}
    if estimate.capacity is not None and rate_of(plan) > 0:
        rates = rate_at(plan, profile, paces.slow), rate_at(plan, profile, paces.fast)
        ranges["rate_per_s"] = min(rates[0], rate_of(plan)), max(rates[1], rate_of(plan))
    if profile.is_served:
        for name in ("latency_s", "ttft_s", "itl_p99_s"):
            ranges[name] = paces.fast * getattr(estimate, name), paces.slow * getattr(estimate, name)
        return {"ranges": ranges, "ranges_from": {}}
    quantities = dict[str, Quantity](throughput_rps="throughput", ttft_s="TTFT", tpot_s="TPOT")
    if profile.fitted is not None:
        for name, quantity in quantities.items():
            factor, value = _after_fit(profile.fitted, plan, quantity), getattr(estimate, name)
            ranges[name] = value / factor, value * factor
        return {"ranges": ranges, "ranges_from": dict.fromkeys(ranges, _fit_in_words(profile.fitted, plan))}
    cell = cell_of(plan)
    assert cell is not None
    for name, quantity in quantities.items():
        found, value = likely(cell, quantity, borrowed=is_borrowed(plan)), getattr(estimate, name)
        ranges[name] = found.low * value, found.high * value
        rows[name] = f"from {found.rows} measurements{found.shared}" if found.rows else "nothing similar was measured"
    if "rate_per_s" in ranges:
        rows["rate_per_s"] = "from the errors of throughput"
    return {"ranges": ranges, "ranges_from": rows}


def _fit_in_words(fitted: FittedLoads, plan: PlanDraft) -> str:
    low, high = fitted.running
    loads = f"{low:.2g}" if f"{low:.2g}" == f"{high:.2g}" else f"{low:.2g} to {high:.2g}"
    text = f"fitted to loads with {loads} requests at once"
    times = fitted.times_beyond(plan.estimate.decode_batch)
    if times <= 1.5:
        return text
    apart = f"this plan runs {plan.estimate.decode_batch:.2g}, for which such predictions were off by up to "
    return f"{text}; {apart}{beyond('throughput', times):.2g} times: measure a load like it"


def confidence(plan: PlanDraft, profile: Profile, load_per_s: float) -> float | None:
    """Return the probability that a plan keeps its bounds at a load, or None if the errors of its predictions are not
    known.
    """
    paces = paces_of(plan, profile)
    if paces is None:
        return None
    low, high = (log(paces.at(share)) for share in (0.01, 0.99))
    if not _sustains(plan, profile, exp(low), load_per_s):
        return 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _sustains(plan, profile, exp(middle), load_per_s):
            low = middle
        else:
            high = middle
    return round(paces.share_below(exp((low + high) / 2)), 3)
