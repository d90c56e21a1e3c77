"""What a simulation of single requests says of plans that closed forms found, and plans that keep their bound in it.

The latency that a quantile of all requests keeps (sla "request") rests on whole distributions of times, which closed
forms only come near: it is searched for in closed form and settled by simulation. Arrival rates: `xgpt.app.arrivals`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from xgpt.errors import InfeasibleError
from xgpt.schema import Constraint, KvPromise, Observation, Plan, Profile, Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from xgpt.app.planning import Subject
    from xscheduler.regret import Terms, Verdict
    from xsimulator.curves import Array

NUM_REQUESTS = 4000
"""Simulated requests whose quantile is read, at saturation."""
MOST_ROUNDS = 4
"""Searches under ever other bounds for the closed form, until the simulation keeps the real one."""
UNUSED = 0.02
"""A plan that leaves no more of its bound unused is not searched for again."""
SEED = 0


@dataclass(frozen=True, slots=True)
class Settled:
    """A plan, and the latency that it has in simulation."""

    plan: Plan
    seen_s: float


def request_latency(plan: Plan, profile: Profile, workload: Workload | None = None) -> float:
    """The quantile over all requests of the time from admission to the last token, simulated at saturation, s.

    Args:
        workload: other lengths than the plan's own.
    """
    import numpy as np

    from xgpt.app.simulating import simulate

    measured, _ = simulate(plan, profile, workload or plan.workload, NUM_REQUESTS, np.random.default_rng(SEED))
    return upper_quantile(measured.latencies_s, plan.constraint.quantile)


def upper_quantile(times: Array, quantile: float) -> float:
    """What the quantile lies below with 95% confidence, by the normal approximation of the binomial distribution.

    A finite simulation knows a quantile in the tail to within some places in the order, and where a request more a
    phase meets another encode pass, a place more is a jump.
    """
    import numpy as np

    upper = quantile + 1.645 * np.sqrt(quantile * (1 - quantile) / len(times))
    return float(np.quantile(times, min(upper, 1.0)))


def settle(find: Callable[[float], Plan], seen: Callable[[Plan], float], bound_s: float, *, loosen: bool) -> Settled:
    """The plan of the highest throughput found that keeps a bound in simulation.

    Args:
        find: the best plan that keeps a bound in closed form.
        seen: the latency of a plan in simulation, headroom included.
        loosen: search again where simulation leaves some of the bound unused, too.

    Raises:
        InfeasibleError: the closed form keeps no such bound, or the simulation broke it every time.
    """
    best: Settled | None = None
    closed_s, last_s, policy = bound_s, 0.0, None
    for _ in range(MOST_ROUNDS):
        try:
            plan = find(closed_s)
        except InfeasibleError:
            if best is not None or not last_s:
                break
            raise
        if plan.policy == policy:
            break  # nothing better is left under a looser bound
        policy, last_s = plan.policy, seen(plan)
        kept = last_s <= bound_s
        if kept and (best is None or plan.estimate.throughput_rps > best.plan.estimate.throughput_rps):
            best = Settled(plan, last_s)
        if kept and (not loosen or last_s >= (1 - UNUSED) * bound_s):
            break
        # What the search keeps in closed form moves as what the simulation sees; a little further where it broke.
        closed_s *= bound_s / last_s * (1.0 if kept else 1 - UNUSED / 4)
    if best is not None:
        return best
    if not last_s:
        find(closed_s)  # says why not
    raise InfeasibleError(
        f"latency_bound_s: in simulation, no schedule that was tried keeps {bound_s:g} s; the nearest took "
        f"{last_s:.4g} s; take that as the bound",
        nearest_bound_s=last_s,
        binding="latency_bound_s",
    )


def best_of_each(
    subject: Subject,
    constraint: Constraint,
    kinds: tuple[str, ...],
    search: str,
    kv: KvPromise,
    max_devices: int | None,
    *,
    uniform: bool = False,
) -> dict[str, Plan]:
    """Each policy's plan of the highest saturated throughput; a bound on all requests is kept in simulation.

    Args:
        uniform: only replicas of equal stages, to compare throughputs with.

    Raises:
        InfeasibleError: no policy has one.
    """
    from xgpt.app.planning import scheduler

    bound_s = constraint.latency_bound_s
    if constraint.sla == "length":
        return scheduler(subject, constraint, search, kv, max_devices, uniform=uniform).best_of_each(kinds)
    slack = 1 + subject.profile.headroom

    def find(kind: str, closed_s: float | None) -> Plan:
        under = constraint.model_copy(update={"latency_bound_s": closed_s})
        plan = scheduler(subject, under, search, kv, max_devices, uniform=uniform).best_of_each((kind,))[kind]
        real = plan.constraint.model_copy(update={"latency_bound_s": bound_s})
        return plan.model_copy(update={"constraint": real})

    def seen(plan: Plan) -> float:
        return slack * request_latency(plan, subject.profile)

    plans: dict[str, Plan] = {}
    failure: InfeasibleError | None = None
    for kind in kinds:
        try:
            if bound_s is None:
                plan = find(kind, None)
                plans[kind] = _seen(plan, seen(plan) / slack)
                continue
            kept = settle(partial(find, kind), seen, bound_s, loosen=True)
        except InfeasibleError as error:
            failure = error
            continue
        plans[kind] = _seen(kept.plan, kept.seen_s / slack)
    if not plans:
        # Of several policies, what the closed form says of all of them together.
        scheduler(subject, constraint, search, kv, max_devices, uniform=uniform).best_of_each(kinds)
        assert failure is not None
        raise failure
    return plans


def judged(
    plan: Plan, profile: Profile, observation: Observation, terms: Terms | None, slowdown: float | None
) -> Verdict:
    """A running plan beside the best one under the observed lengths, by simulation where the bound is all requests'.

    The running plan is simulated, and what is to take over; where that breaks the bound, another is looked for under a
    tighter one.
    """
    from xscheduler.regret import judge
    from xscheduler.under import at_pace, under, within_context

    workload, weight = observation.workload, observation.weight
    constraint, bound_s = plan.constraint, plan.constraint.latency_bound_s
    if constraint.sla == "length":
        return judge(plan, profile, workload, weight, terms, slowdown=slowdown)
    running, lengths = at_pace(plan, slowdown), within_context(workload, plan.model.max_context)
    closed_s = under(running, profile, lengths, constraint.quantile)["latency"]
    ratio, others, reason = request_latency(running, profile, lengths) / closed_s, 1.0, ""
    for _ in range(MOST_ROUNDS):
        verdict = judge(plan, profile, workload, weight, terms, slowdown=slowdown, ratio=ratio, ratio_of_others=others)
        if verdict.plan is None or verdict.best is None:
            return replace(verdict, reason=reason or verdict.reason)
        if not verdict.switch:
            return verdict
        seen_s = request_latency(verdict.plan, profile)
        best = verdict.best.model_copy(update={"latency_s": seen_s})
        verdict = replace(verdict, plan=_seen(verdict.plan, seen_s), best=best)
        if bound_s is None or (1 + constraint.headroom) * seen_s <= bound_s:
            return verdict
        reason = f"what would take over takes {seen_s:.3g} s in simulation, the bound is {bound_s:g} s"
        if not best.keeps_bound:
            break  # it was found for want of one that keeps the bound, so there is none under a tighter one
        others *= (1 + constraint.headroom) * seen_s / bound_s * (1 + UNUSED / 4)
    return replace(verdict, switch=False, reason=reason)


def _seen(plan: Plan, latency_s: float) -> Plan:
    """The plan with the simulated quantile of all requests as its latency."""
    bound = f"{plan.search.bound}; latency of all requests by simulation"
    return plan.model_copy(
        update={
            "estimate": plan.estimate.model_copy(update={"latency_s": latency_s}),
            "search": plan.search.model_copy(update={"bound": bound}),
        }
    )
