"""Find the plans with the highest throughput at saturation (requests are always waiting), and check them by simulation.

Closed forms describe a steady state: running requests are at different points of their outputs. If outputs have nearly
equal lengths, there is another steady state: requests that began together end together. So each plan is simulated. If
throughput disagrees or a bound is broken, the plans that are best in closed form under several tighter bounds are also
simulated. The tighter bounds come from a fixed sequence, so a looser bound adds plans and removes none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import ceil, floor, inf, log
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InfeasibleError
from xgpt.core.numbers import rounded_up
from xgpt.core.schema import Ceiling, Constraint, PlanDraft, Profile
from xgpt.core.schema.plan import rate_of
from xgpt.core.workload import Ints, quantile, sample
from xscheduler.expression import objective_value
from xscheduler.found import Found
from xscheduler.objectives.base import TOGETHER, Objective, Ranked, simulating
from xscheduler.objectives.ladder import Ladder, request_law, seen_by, with_law
from xscheduler.tolerances import TOLERANCES
from xsimulator.capacity import SEED, endings, in_order_of_arrival
from xsimulator.run import check_fits, encode_emits, outstanding_requests, seen_at_once, warm_up_requests

MORE = 2.0
"""If the plan with the highest predicted throughput exceeds its prediction in simulation, other plans may exceed theirs
by up to this factor.
"""
LEAST_REQUESTS = 1000
LIFETIMES = 16
"""Number of simulated requests for each request of the decode batch. At least `LEAST_REQUESTS` are simulated."""
ABOUT = 1.25
"""The time per token at the quantile's length is averaged over outputs whose length differs by at most this factor."""
LEAST_ALIKE = 30
"""Smallest number of requests of about the quantile's length from which their latency is computed."""
MOST_REQUESTS = 5000
"""Largest number of requests to simulate if few have about the quantile's length."""
RUNG = 1.2

PASSED_OVER = f"{TOGETHER}; plans with a higher prediction serve less in simulation, or break a bound"


class SaturatedFigures(NamedTuple):
    throughput_rps: float
    latency_s: float | None
    ttft_s: float
    tpot_s: float | None

    def other_than(self, plan: PlanDraft) -> dict[str, float]:
        """Return the figures that disagree with the plan's. Latency is left out under sla "request", since the plan's
        latency is already simulated.
        """
        found = self._asdict()
        if plan.constraint.sla == "request":
            del found["latency_s"]
        return {
            name: seen
            for name, seen in found.items()
            if seen is not None and not _agree(seen, getattr(plan.estimate, name))
        }

    def excess(self, plan: PlanDraft, constraint: Constraint) -> float:
        bounds = {"latency_s": constraint.latency_bound_s, "ttft_s": constraint.ttft_s, "tpot_s": constraint.tpot_s}
        over = [seen / (bounds.get(name) or inf) for name, seen in self.other_than(plan).items()]
        return (1 + constraint.headroom) * max(over, default=0.0)

    def refutes(self, plan: PlanDraft) -> bool:
        return not _agree(self.throughput_rps, plan.estimate.throughput_rps) or self.excess(plan, plan.constraint) > 1


def _agree(seen: float, predicted: float) -> bool:
    return predicted <= (1 + TOLERANCES.simulated) * seen and seen <= (1 + TOLERANCES.simulated) * predicted


def saturated_figures(plan: PlanDraft, profile: Profile) -> SaturatedFigures:
    """Simulate a plan at saturation, with all requests present at the start and admitted in order of arrival."""
    check_fits(plan, plan.workload)
    plan = in_order_of_arrival(plan)
    skipped = warm_up_requests(plan)
    length = quantile(plan.workload.output, plan.constraint.planned_quantile)
    share = float(_about(plan.workload.output.lengths, length) @ np.asarray(plan.workload.output.probabilities))
    for_alike = min(1.5 * LEAST_ALIKE / max(share, 1e-9), MOST_REQUESTS)
    count = ceil(max(LEAST_REQUESTS, LIFETIMES * plan.estimate.decode_batch, for_alike))
    total = skipped + count + outstanding_requests(plan)
    inputs, outputs = sample(plan.workload, total, np.random.default_rng(SEED))
    longest = np.full(total, plan.workload.output.lengths[-1])
    for needed in (skipped + count, None):  # None: to the end, if no further request has ended
        seen = seen_at_once(plan, profile, inputs, outputs, longest, needed)
        ends = np.sort(seen.end_s[seen.last_token[seen.last_token >= 0]])
        if len(ends) > skipped + count:
            break
    ended, span_s = endings(ends, skipped, min(skipped + count, len(ends) - 1))
    chosen = np.flatnonzero(seen.first_token >= 0)[skipped : skipped + count]
    first_s = seen.first_output_s(chosen, encode_emits=encode_emits(plan))
    ttft_s = float((first_s - seen.start_s[seen.admitted[chosen]]).mean())
    about = _about(outputs[chosen], length)
    gaps = (seen.end_s[seen.last_token[chosen]] - first_s)[about] / (outputs[chosen][about] - 1)
    rps = plan.replicas * ended / span_s
    if length == 1:
        return SaturatedFigures(rps, ttft_s, ttft_s, None)
    tpot_s = float(gaps.mean()) if len(gaps) >= LEAST_ALIKE else None
    return SaturatedFigures(rps, None if tpot_s is None else ttft_s + (length - 1) * tpot_s, ttft_s, tpot_s)


def _about(lengths: Ints | Sequence[int], length: int) -> npt.NDArray[np.bool_]:
    values = np.asarray(lengths)
    return (values >= max(2, length / ABOUT)) & (values <= ABOUT * length)


def with_simulated_figures(plan: PlanDraft, profile: Profile) -> PlanDraft:
    return _simulated(plan, saturated_figures(plan, profile))


class Saturated(Objective[Found]):
    """The objective `saturated`: the highest throughput at saturation, with latency counted from admission."""

    def rank(self, kinds: Sequence[str]) -> Ranked[Found]:
        constraint, self._ladders = self.scheduler.problem.constraint, {}
        self._beyond: dict[str, tuple[float, float]] = {}
        if constraint.sla == "length" or constraint.latency_bound_s is None:
            return {kind: [_valued(plan)] for kind, plan in self.scheduler.found(kinds).items()}
        self._ladders = {kind: Ladder(self.scheduler, kind, self.progress) for kind in kinds}
        tops = {kind: ladder.top(constraint.latency_bound_s) for kind, ladder in self._ladders.items()}
        return {kind: [] if plan is None else [_valued(plan)] for kind, plan in tops.items()}

    def verify(self, ranked: Ranked[Found]) -> dict[str, Found]:
        constraint, profile = self.scheduler.problem.constraint, self.scheduler.problem.profile
        if constraint.sla == "request" and constraint.latency_bound_s is not None:
            plans = self._kept_by_all(ranked, constraint.latency_bound_s)
        else:
            plans = {kind: plan for kind, ((plan, _),) in ranked.items()}
            if constraint.sla == "request":
                plans = {kind: with_law(plan, request_law(plan.draft, profile)) for kind, plan in plans.items()}
        return plans if self.scheduler.problem.reused is not None else self._confirmed(plans)

    def certify(self, plans: dict[str, Found]) -> dict[str, Found]:
        rate = self.scheduler.problem.constraint.arrival_rate_per_s or 0.0  # set only without bounds
        ordered = sorted(plans.items(), key=lambda item: -objective_value(item[1].draft))
        stable = {
            kind: replace(
                found,
                draft=self.finish(found.draft),
                ceiling=self.scheduler.ceiling_of(found, kind, *self._beyond.get(kind, (1.0, 1.0))),
            )
            for kind, found in ordered
            if found.draft.estimate.throughput_rps > rate
        }
        if not stable:
            says = f"arrival_rate_per_s: no schedule serves {rate:g} requests/s; take more devices or a lower rate"
            raise InfeasibleError(says, binding="arrival_rate_per_s")
        return stable

    def _kept_by_all(self, ranked: Ranked[Found], bound_s: float) -> dict[str, Found]:
        """A policy is not simulated if even its closed-form throughput under a looser bound is below the best policy's
        throughput. Its plan then keeps the bound only in closed form.
        """
        plans: dict[str, Found] = {}
        best_rps = 0.0
        for kind in sorted(ranked, key=lambda kind: -ranked[kind][0][1] if ranked[kind] else 0.0):
            plan = self._ladders[kind].highest(bound_s, best_rps)
            if plan is not None:
                plans[kind], draft = plan, plan.draft
                best_rps = max(best_rps, draft.estimate.throughput_rps if draft.search.simulations else 0.0)
        if not best_rps:
            raise self._never_kept_by_all(bound_s)
        return plans

    def _confirmed(self, plans: dict[str, Found]) -> dict[str, Found]:
        found: dict[str, Found] = {}
        nearest_s = inf
        for kind, closed in plans.items():
            plan = closed.draft
            seen = saturated_figures(plan, self.scheduler.problem.profile)
            cannot_win = plan.constraint.sla == "request" and plan.estimate.latency_error is None
            if cannot_win or not seen.refutes(plan):
                found[kind] = _seen(closed, seen)
                slower = plan.estimate.latency_s / seen.latency_s if seen.latency_s else 1.0
                self._beyond[kind] = max(1.0, seen.throughput_rps / plan.estimate.throughput_rps), max(1.0, slower)
            else:
                if self.progress is not None:
                    self.progress(0, 1, simulating(kind))
                best, least = self._best_in_simulation(kind, plan, seen)
                nearest_s = min(nearest_s, least * (plan.constraint.latency_bound_s or inf))
                if best is not None:
                    found[kind] = best
        if not found:
            raise self._never_kept(nearest_s)
        return found

    def _best_in_simulation(self, kind: str, plan: PlanDraft, seen: SaturatedFigures) -> tuple[Found | None, float]:
        least, simulated, profile = inf, dict[object, SaturatedFigures](), self.scheduler.problem.profile
        best: PlanDraft | None = None
        more = MORE if seen.throughput_rps > plan.estimate.throughput_rps else 1.0
        # As bounds tighten, throughput falls, but a user's own objective need not fall.
        has_own = plan.constraint.maximise is not None
        for other in chain((plan,), self._rungs(kind, plan)):
            if (
                not has_own
                and best is not None
                and more * other.estimate.throughput_rps <= best.estimate.throughput_rps
            ):
                break
            key = other.policy, other.stages
            if key in simulated:
                continue
            found = simulated[key] = seen if other is plan else saturated_figures(other, profile)
            excess = found.excess(other, plan.constraint)
            if other is not plan and other.constraint.sla == "request":
                law = request_law(other, profile)
                guarded_s = (1 + plan.constraint.headroom) * law.quantile(plan.constraint.planned_quantile)
                excess = max(excess, guarded_s / (plan.constraint.latency_bound_s or inf))
                other = seen_by(law, other)
            least = min(least, excess)
            if excess <= 1:
                shown = _simulated(other, found)
                if best is None or objective_value(shown) > objective_value(best):
                    best = shown
        if best is None:
            return None, least
        effort = best.search.but(simulations=len(simulated))
        return Found(best.but(constraint=plan.constraint, search=effort), Ceiling(None, PASSED_OVER)), least

    def _rungs(self, kind: str, plan: PlanDraft) -> Iterator[PlanDraft]:
        constraint = self.scheduler.problem.constraint
        rung = floor(log(plan.estimate.latency_s * (1 + constraint.headroom)) / log(RUNG))
        while True:
            under = constraint.but(latency_bound_s=RUNG**rung)
            try:
                yield self.scheduler.under(under).found((kind,))[kind].draft
            except InfeasibleError:
                return
            rung -= 1

    def _never_kept(self, nearest_s: float) -> InfeasibleError:
        constraint = self.scheduler.problem.constraint
        bounds = constraint.bounds.given
        name = next(iter(bounds))
        known = len(bounds) == 1 and name == "latency_bound_s"
        nearest = f"; the nearest bound that can be kept is {rounded_up(nearest_s):g} s" if known else ""
        return InfeasibleError(
            f"{name}: no schedule keeps {' and '.join(f'{bound:g} s' for bound in bounds.values())} in simulation: "
            "closed forms assume that running requests are at different points of their outputs, but requests that "
            f"begin together here also end together{nearest}",
            nearest_bound_s=nearest_s if known else None,
            binding=name,
        )

    def _never_kept_by_all(self, bound_s: float) -> InfeasibleError:
        nearest = [least for ladder in self._ladders.values() if (least := ladder.nearest_s()) is not None]
        if not nearest:
            self.scheduler.found(tuple(self._ladders))  # raises an error that states why
        nearest_s = min(nearest)
        return InfeasibleError(
            f"latency_bound_s: in simulation, no schedule keeps {bound_s:g} s for the required share of all requests; "
            f"the nearest bound that can be kept is {rounded_up(nearest_s):g} s",
            nearest_bound_s=nearest_s,
            binding="latency_bound_s",
        )


def _valued(found: Found) -> tuple[Found, float]:
    return found, objective_value(found.draft)


def _seen(found: Found, seen: SaturatedFigures) -> Found:
    draft = _simulated(found.draft, seen)
    return Found(draft, Ceiling(None, TOGETHER) if "throughput_rps" in draft.estimate.simulated else found.ceiling)


def _simulated(plan: PlanDraft, seen: SaturatedFigures) -> PlanDraft:
    e, search, figures = plan.estimate, plan.search, seen.other_than(plan)
    rps = figures.get("throughput_rps")
    if rps is not None:
        figures["throughput_rps"] = rps = max(rps, 0.0 if e.capacity is None else rate_of(plan))
        figures["output_tokens_per_s"] = e.output_tokens_per_s * rps / e.throughput_rps
        if e.cost_per_million_tokens is not None:
            figures["cost_per_million_tokens"] = e.cost_per_million_tokens * e.throughput_rps / rps
        if not plan.constraint.maximises_arrivals:
            search = search.but(simulations=max(1, search.simulations))
    return plan.but(estimate=e.but(**figures, simulated=tuple(figures)), search=search)
