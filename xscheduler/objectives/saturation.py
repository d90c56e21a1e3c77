"""Check a plan's figures under saturation (requests always waiting) by simulation.

Closed forms know the steady state in which running requests are spread over their outputs. Where outputs are nearly of
one length there is another one: requests that began together end together, and whole batches follow each other. So each
plan is simulated; where that disagrees, its figures stand in the plan. Where throughput does, or a bound is broken, the
policy's plan is the one that serves most in simulation among those that are the best in closed form under tighter
bounds. These stand on rungs that do not depend on the bound, so that a looser one adds plans and takes none away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import ceil, floor, inf, log
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InfeasibleError
from xgpt.core.progress import Progress
from xgpt.core.schema import Constraint, Plan, Profile
from xgpt.core.workload import Ints, quantile, sample
from xscheduler.objectives.arrivals import BOUNDS, rate_of, simulating
from xscheduler.objectives.verifying import request_law, with_law
from xsimulator.capacity import in_order_of_arrival
from xsimulator.run import check_fits, encode_emits, outstanding_requests, seen_at_once, warm_up_requests

if TYPE_CHECKING:
    from xscheduler.schedule import Scheduler

AGREES = 0.1
"""Share by which a simulation may differ from the closed form, whose figures then stand."""
MORE = 2.0
"""By which factor another plan may serve more in simulation than it promises, where the one that promises most does."""
LEAST_REQUESTS = 1000
LIFETIMES = 16
"""Simulated requests for each request of the decode batch, at least `LEAST_REQUESTS` in all."""
ABOUT = 1.25
"""Factor by which outputs may differ from the quantile's length and still count for its gaps between tokens."""
LEAST_ALIKE = 30
"""Least number of requests of about the quantile's length from which its latency is read."""
MOST_REQUESTS = 5000
"""Most simulated requests where few have that length."""
SEED = 0
RUNG = 1.2
"""Ratio of the closed form's latencies on neighbouring rungs."""

TOGETHER = "none: requests that began together stay together, which closed forms do not know"
PASSED_OVER = f"{TOGETHER}; plans that promise more there serve less in simulation, or break a bound"


class Saturated(NamedTuple):
    """A plan's simulated figures while requests are always waiting.

    Attributes:
        throughput_rps: of all replicas.
        latency_s: mean time from admission to the last token, of a request of the quantile's length.
        ttft_s: mean time from admission to the first token.
        tpot_s: mean gap between the tokens of a request of about the quantile's length. None, like the latency, if too
            few requests have that length.
    """

    throughput_rps: float
    latency_s: float | None
    ttft_s: float
    tpot_s: float | None

    def other_than(self, plan: Plan) -> dict[str, float]:
        """Return the figures that disagree with the plan's; under sla "request" its latency is simulated already."""
        found = self._asdict()
        if plan.constraint.sla == "request":
            del found["latency_s"]
        return {
            name: seen
            for name, seen in found.items()
            if seen is not None and not _agree(seen, getattr(plan.estimate, name))
        }

    def excess(self, plan: Plan, constraint: Constraint) -> float:
        """Return the largest ratio of time to bound, headroom included, of times that disagree with the plan."""
        bounds = {"latency_s": constraint.latency_bound_s, "ttft_s": constraint.ttft_s, "tpot_s": constraint.tpot_s}
        over = [seen / (bounds.get(name) or inf) for name, seen in self.other_than(plan).items()]
        return (1 + constraint.headroom) * max(over, default=0.0)

    def refutes(self, plan: Plan) -> bool:
        """Whether another plan may be better: this one does not serve what it says, or breaks a bound."""
        return not _agree(self.throughput_rps, plan.estimate.throughput_rps) or self.excess(plan, plan.constraint) > 1


def _agree(seen: float, own: float) -> bool:
    return own <= (1 + AGREES) * seen and seen <= (1 + AGREES) * own


def saturated(plan: Plan, profile: Profile) -> Saturated:
    """Simulate a plan with all requests there from the beginning, in the order of their arrival.

    Raises:
        InputError: a request of the workload can never fit into the plan's K/V memory.
    """
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
    seen = seen_at_once(plan, profile, inputs, outputs, longest)
    ends = np.sort(seen.end_s[seen.last_token[seen.last_token >= 0]])
    first, last = ends[skipped], ends[min(skipped + count, len(ends) - 1)]
    ended = np.searchsorted(ends, last, "right") - np.searchsorted(ends, first, "right")  # many may end in one step
    chosen = np.flatnonzero(seen.first_token >= 0)[skipped : skipped + count]
    first_s = seen.first_output_s(chosen, encode_emits=encode_emits(plan))
    ttft_s = float((first_s - seen.start_s[seen.admitted[chosen]]).mean())
    about = _about(outputs[chosen], length)
    gaps = (seen.end_s[seen.last_token[chosen]] - first_s)[about] / (outputs[chosen][about] - 1)
    rps = float(plan.replicas * ended / (last - first))
    if length == 1:
        return Saturated(rps, ttft_s, ttft_s, None)
    tpot_s = float(gaps.mean()) if len(gaps) >= LEAST_ALIKE else None
    return Saturated(rps, None if tpot_s is None else ttft_s + (length - 1) * tpot_s, ttft_s, tpot_s)


def _about(lengths: Ints | Sequence[int], length: int) -> npt.NDArray[np.bool_]:
    """Which outputs are of about a length, and have a gap between tokens."""
    of = np.asarray(lengths)
    return (of >= max(2, length / ABOUT)) & (of <= ABOUT * length)


def with_simulated_figures(plan: Plan, profile: Profile) -> Plan:
    """Return the plan with simulated figures in place of those of the closed form that disagree with them."""
    return _with(plan, saturated(plan, profile))


def settled(of: Scheduler, plans: dict[str, Plan], progress: Progress | None = None) -> dict[str, Plan]:
    """Return each policy's plan with the highest throughput, confirmed or corrected by simulation, the best first.

    Raises:
        InfeasibleError: no plan keeps the bounds in simulation.
    """
    found: dict[str, Plan] = {}
    nearest_s = inf
    for kind, plan in plans.items():
        seen = saturated(plan, of.problem.profile)
        cannot_win = plan.constraint.sla == "request" and plan.estimate.latency_error is None
        if cannot_win or not seen.refutes(plan):
            found[kind] = _with(plan, seen)
        else:
            if progress is not None:
                progress(0, 1, simulating(kind))
            best, least = _best_in_simulation(of, kind, plan, seen)
            nearest_s = min(nearest_s, least * (plan.constraint.latency_bound_s or inf))
            if best is not None:
                found[kind] = best
    if not found:
        raise _never_kept(of, nearest_s)
    return dict(sorted(found.items(), key=lambda item: -item[1].estimate.throughput_rps))


def _best_in_simulation(of: Scheduler, kind: str, plan: Plan, seen: Saturated) -> tuple[Plan | None, float]:
    """Return the policy's best plan in simulation (None: none keeps the bounds), and the least excess over them."""
    best, least, simulated = None, inf, {}
    more = MORE if seen.throughput_rps > plan.estimate.throughput_rps else 1.0
    for other in chain((plan,), _rungs(of, kind, plan)):
        if best is not None and more * other.estimate.throughput_rps <= best.estimate.throughput_rps:
            break
        if _key(other) in simulated:
            continue
        found = simulated[_key(other)] = seen if other is plan else saturated(other, of.problem.profile)
        excess = found.excess(other, plan.constraint)
        if other is not plan and other.constraint.sla == "request":
            law = request_law(other, of.problem.profile)
            guarded_s = (1 + plan.constraint.headroom) * law.quantile(plan.constraint.planned_quantile)
            excess = max(excess, guarded_s / (plan.constraint.latency_bound_s or inf))
            other = with_law(other, law, closed_s=other.constraint.latency_bound_s)
        least = min(least, excess)
        if excess <= 1:
            shown = _with(other, found)
            if best is None or shown.estimate.throughput_rps > best.estimate.throughput_rps:
                best = shown
    if best is None:
        return None, least
    search = best.search.model_copy(update={"simulations": len(simulated), "gap": None, "bound": PASSED_OVER})
    return best.model_copy(update={"constraint": plan.constraint, "search": search}), least


def _rungs(of: Scheduler, kind: str, plan: Plan) -> Iterator[Plan]:
    """Yield the policy's best plans in closed form under ever tighter latency bounds."""
    constraint = of.problem.constraint
    rung = floor(log(plan.estimate.latency_s * (1 + constraint.headroom)) / log(RUNG))
    while True:
        under = constraint.model_copy(update={"latency_bound_s": RUNG**rung})
        try:
            yield of.under(under).best_of_each((kind,))[kind]
        except InfeasibleError:
            return
        rung -= 1


def _key(plan: Plan) -> str:
    return f"{plan.policy!r} {plan.stages!r}"


def _with(plan: Plan, seen: Saturated) -> Plan:
    """Return the plan with the simulated figures that disagree with its own; its proof is that of the closed form."""
    e, search, figures = plan.estimate, plan.search, seen.other_than(plan)
    rps = figures.get("throughput_rps")
    if rps is not None:
        figures["throughput_rps"] = rps = max(rps, 0.0 if e.capacity is None else rate_of(plan))
        figures["output_tokens_per_s"] = e.output_tokens_per_s * rps / e.throughput_rps
        if e.cost_per_million_tokens is not None:
            figures["cost_per_million_tokens"] = e.cost_per_million_tokens * e.throughput_rps / rps
    estimate = e.model_copy(update={**figures, "simulated": tuple(figures)})
    if rps is not None and not plan.constraint.maximises_arrivals:
        search = search.model_copy(update={"gap": None, "bound": TOGETHER, "simulations": max(1, search.simulations)})
    return plan.model_copy(update={"estimate": estimate, "search": search})


def _never_kept(of: Scheduler, nearest_s: float) -> InfeasibleError:
    """Return the error that no policy keeps the bounds, with a latency bound that one kept in simulation."""
    from xscheduler.schedule import round_up

    bounds = {name: bound for name in BOUNDS if (bound := getattr(of.problem.constraint, name)) is not None}
    name = next(iter(bounds))
    known = len(bounds) == 1 and name == "latency_bound_s"
    nearest = f"; the nearest bound that one keeps is {round_up(nearest_s)} s" if known else ""
    return InfeasibleError(
        f"{name}: no schedule keeps {' and '.join(f'{bound:g} s' for bound in bounds.values())} in simulation, where "
        f"requests that began together stay together{nearest}",
        nearest_bound_s=nearest_s if known else None,
        binding=name,
    )
