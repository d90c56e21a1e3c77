"""Find plans that keep a bound for a quantile of all requests (sla "request"), in closed form and then by simulation.

The latency of a quantile of all requests depends on whole distributions of times. Closed forms predict this latency
with an error that differs from plan to plan, so plans are simulated until one keeps the bound. A policy's plans form a
ladder that does not depend on the bound. Each rung is a latency with the best plan that keeps it in closed form. The
search finds the highest rung whose plan keeps the bound in simulation, always by the same bisection of the same ladder.
A rung that keeps a tighter bound also keeps a looser one, so with the looser bound the search ends at the same rung or
above. Therefore no bound that can be kept is called infeasible, and throughput never falls when a bound is loosened.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, floor, log

import numpy as np

from xgpt.core.errors import InfeasibleError
from xgpt.core.progress import Progress
from xgpt.core.schema import Ceiling, PlanDraft, Profile, Workload
from xscheduler.found import Found
from xscheduler.objectives.base import simulating
from xscheduler.schedule import Scheduler
from xsimulator.capacity import SEED
from xsimulator.request_law import RequestLaw
from xsimulator.run import is_drawn, request_latencies

NUM_REQUESTS = 500
"""Number of simulated admissions. Each admission represents requests of every length. With fewer admissions, the
longest prompts might be missing, and the error estimate would not show that.
"""
MOST_REQUESTS = 2000
MOST_TOKENS = 40_000
"""If `MOST_REQUESTS` outputs have fewer tokens than this on average, more admissions are simulated."""
NUM_DRAWN = 20_000
"""Number of simulated requests if each represents only its own drawn length. The simulation takes about 15 ms."""
MOST_STEPS = 250_000
"""If `NUM_DRAWN` requests would take more decode steps than this, fewer are simulated, but at least `MOST_REQUESTS`."""
BATCHES_BEYOND = 3
"""More requests are simulated if fewer encode batches than this have requests beyond the quantile."""
GOOD_ERROR = 0.01
"""If the relative standard error of a simulated latency is larger than this, more admissions are simulated."""
RUNG = 1.01
"""Ratio of the latencies of neighbouring rungs, in closed form."""
BLOCK = 8
"""Number of rungs that the search skips in one step."""
LOWEST = -2000
REACH = 1.15
"""Largest factor by which the closed form may overestimate latencies. The search starts at this multiple of the bound.
"""
ROUNDING = 1e-9
"""Two throughputs count as equal if they differ relatively by less than this. Equal settings of two policies have such
throughputs.
"""


def request_law(plan: PlanDraft, profile: Profile, workload: Workload | None = None, seed: int = SEED) -> RequestLaw:
    """Return the simulated distribution of latency over all requests at saturation.

    If all outputs have one length, requests that begin together stay together. So requests with drawn lengths are
    simulated twice, once with a common start and once spread out, and the slower result counts.
    """
    from xsimulator.counts.counted_run import is_counted

    lengths, quantile = workload or plan.workload, plan.constraint.quantile
    num_requests, most = NUM_REQUESTS, max(MOST_REQUESTS, MOST_TOKENS / lengths.output.mean)
    if is_drawn(plan):
        in_steps = ceil(MOST_STEPS * max(plan.estimate.decode_batch, 1.0) / lengths.output.mean)
        is_fast = is_counted(plan) and plan.estimate.reuse is None
        num_requests = min(NUM_DRAWN, max(MOST_REQUESTS, in_steps)) if is_fast else MOST_REQUESTS
        most = 4 * num_requests
    while True:
        law = request_latencies(plan, profile, lengths, num_requests, np.random.default_rng(seed))
        settled = law.error(quantile) <= GOOD_ERROR and law.batches_beyond(quantile) >= BATCHES_BEYOND
        if num_requests >= most or settled or law.is_constant:
            break
        num_requests = min(4 * num_requests, ceil(most))
    if not is_drawn(plan):
        return law
    other = request_latencies(plan, profile, lengths, num_requests, np.random.default_rng(seed), at_once=True)
    return max(law, other, key=lambda law: law.quantile(quantile))


def request_latency(plan: PlanDraft, profile: Profile, workload: Workload | None = None) -> float:
    return request_law(plan, profile, workload).quantile(plan.constraint.planned_quantile)


@dataclass(frozen=True, slots=True)
class _Simulated:
    """A plan's simulated latencies. `guarded_s` is their quantile in s, with headroom."""

    law: RequestLaw
    guarded_s: float


class Ladder:
    """A policy's plans, indexed by a latency bound (a rung) that each meets according to the closed-form estimate. The
    bound of rung k is `RUNG**k` seconds.
    """

    def __init__(self, search: Scheduler, kind: str, progress: Progress | None = None) -> None:
        self._of, self._kind, self._progress = search, kind, progress
        self._longer = 1 + search.problem.constraint.headroom
        self._simulated: dict[tuple[object, object], _Simulated] = {}
        self.plan = cache(self._plan)

    def top(self, bound_s: float) -> Found | None:
        """Return the plan of the highest rung that is searched under a bound, or None if no rung has a plan. No rung
        below this one has a higher throughput.
        """
        return self.plan((_top(bound_s) + 1) * BLOCK)

    def highest(self, bound_s: float, rival_rps: float = 0.0) -> Found | None:
        """Return the plan of the highest rung that keeps the bound in simulation, or None if no rung keeps it.

        If no rung's throughput exceeds the rival's, the plan that keeps the bound in closed form is returned without a
        simulation.
        """
        started = time.perf_counter()
        above = (_top(bound_s) + 1) * BLOCK
        while (top := self.plan(above)) is not None and top.draft.estimate.throughput_rps > rival_rps * (1 + ROUNDING):
            low = above - BLOCK
            if self.keeps(low, bound_s):
                break
            above = low
        else:
            return None if top is None and not rival_rps else self._in_closed_form(bound_s)
        while above - low > 1:
            middle = (low + above) // 2
            if self.keeps(middle, bound_s):
                low = middle
            else:
                above = middle
        plan = self.plan(low)
        return None if plan is None else self._settled(plan, low, bound_s, time.perf_counter() - started)

    def keeps(self, rung: int, bound_s: float) -> bool:
        plan = self.plan(rung)
        return plan is None or self.simulated(plan.draft).guarded_s <= bound_s

    def nearest_s(self) -> float | None:
        rung = self.lowest()
        plan = None if rung is None else self.plan(rung)
        return None if plan is None or rung is None else max(self.simulated(plan.draft).guarded_s, RUNG**rung / REACH)

    def lowest(self) -> int | None:
        try:
            self._best_under(RUNG**LOWEST)
        except InfeasibleError as error:
            if error.nearest_bound_s is None:
                return None
            rung = floor(log(error.nearest_bound_s) / log(RUNG))
            return next((k for k in range(rung, rung + BLOCK) if self.plan(k) is not None), None)
        return LOWEST

    def simulated(self, plan: PlanDraft) -> _Simulated:
        key = plan.policy, plan.stages
        if key not in self._simulated:
            if self._progress is not None:
                self._progress(len(self._simulated), len(self._simulated) + 1, simulating(self._kind))
            law = request_law(plan, self._of.problem.profile)
            guarded_s = self._longer * law.quantile(plan.constraint.planned_quantile)
            self._simulated[key] = _Simulated(law, guarded_s)
        return self._simulated[key]

    def _plan(self, rung: int) -> Found | None:
        return self._in_closed_form(RUNG**rung)

    def _in_closed_form(self, bound_s: float) -> Found | None:
        try:
            return self._best_under(bound_s)
        except InfeasibleError:
            return None

    def _best_under(self, bound_s: float) -> Found:
        constraint = self._of.problem.constraint.but(latency_bound_s=bound_s)
        return self._of.under(constraint).found((self._kind,))[self._kind]

    def _settled(self, plan: Found, rung: int, bound_s: float, seconds: float) -> Found:
        seen = with_law(plan, self.simulated(plan.draft).law, closed_s=RUNG**rung)
        effort = seen.draft.search.but(simulations=len(self._simulated), seconds=round(seconds, 4))
        constraint = plan.draft.constraint.but(latency_bound_s=bound_s)
        return replace(seen, draft=seen.draft.but(constraint=constraint, search=effort))


def _top(bound_s: float) -> int:
    return floor(log(REACH * bound_s) / log(RUNG) / BLOCK)


def with_law(found: Found, law: RequestLaw, closed_s: float | None = None) -> Found:
    """Return the schedule with its simulated latency. Of the closed form's ceiling, only a remark is left."""
    gap = found.plan.search.gap
    proven = ""
    if gap is not None:
        under = "" if closed_s is None else f" under a bound of {closed_s:.3g} s"
        proven = f"; in closed form the plan is at most {100 * gap:.1f}% below the best{under}"
    ceiling = Ceiling(None, f"none: the latencies of all requests are simulated{proven}")
    return Found(seen_by(law, found.draft).but(search=found.draft.search.but(simulations=1)), ceiling)


def seen_by(law: RequestLaw, plan: PlanDraft) -> PlanDraft:
    quantile = plan.constraint.quantile
    return plan.with_estimate(latency_s=law.quantile(quantile), latency_error=law.error(quantile))
