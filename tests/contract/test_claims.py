"""What `xgpt plan` claims holds for random problems: one to four devices, any lengths, bounds and SLAs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.contract.scenarios import random_profile
from tests.rings import ALL, known
from xgpt.core.errors import InfeasibleError
from xgpt.core.schema import Constraint, Histogram, Plan, Workload
from xgpt.core.schema.constraint import Objective, Sla
from xgpt.core.schema.plan import rate_of
from xgpt.core.schema.policy import PolicyChoice
from xgpt.resolve import load_cluster, load_model
from xscheduler.objectives.base import TOGETHER
from xscheduler.objectives.best_plans import plan_each
from xscheduler.objectives.capacities import with_capacity
from xscheduler.objectives.ladder import request_law
from xscheduler.objectives.saturation import PASSED_OVER
from xscheduler.problem import Problem
from xscheduler.schedule import scheduler
from xscheduler.space import POLICIES
from xscheduler.tolerances import TOLERANCES
from xsimulator.capacity import PRECISION, Trial
from xsimulator.run import simulate

SPEC, _ = load_model("opt-125m")
CLUSTER = load_cluster("a40x4")
ROUNDING = 1e-9
SHARES = (0.4, 1.2)
"""Bounds, as shares of the latency of the plan without one."""
CHANCE = 0.25
"""By which share a few requests may take another time than many of the same lengths."""
LEAST_OF_ALL = 2000
"""Single requests, without which the slowest hundredth is not told."""
ARRIVAL_SHARES = (0.7, 1.1, 2.5) if ALL else (1.1, 2.5)
"""The same, with waiting counted."""


@dataclass(frozen=True)
class Case:
    """A problem; `__repr__` is what a failure shows."""

    seed: int
    num_devices: int
    policy: PolicyChoice
    sla: Sla
    monotone: bool
    quantile: float

    @cached_property
    def subject(self) -> Problem:
        rng = np.random.default_rng(self.seed)
        profile = random_profile(rng, monotone=self.monotone, degrees=(1, 2))
        return Problem(SPEC, None, CLUSTER, random_workload(rng), profile, Constraint(), max_devices=self.num_devices)

    def plans(self, bound_s: float | None, objective: Objective = "saturated") -> dict[str, Plan]:
        """Each policy's plan; none where nothing keeps the bound."""
        constraint = Constraint(latency_bound_s=bound_s, sla=self.sla, quantile=self.quantile, objective=objective)
        try:
            return plan_each(self.subject.under(constraint), self.policy)
        except InfeasibleError:
            return {}


def random_workload(rng: np.random.Generator) -> Workload:
    """Histograms of a few lengths each, of any shape."""

    def lengths(longest: int) -> Histogram:
        values = np.unique(rng.integers(1, longest, rng.integers(1, 9)))
        shares = rng.dirichlet(np.full(len(values), rng.choice([0.3, 1.0, 10.0])))
        return Histogram(lengths=tuple(values.tolist()), probabilities=tuple((shares / shares.sum()).tolist()))

    return Workload(
        name="random", input=lengths(int(rng.choice([8, 60, 250]))), output=lengths(int(rng.choice([4, 40])))
    )


cases = st.builds(
    Case,
    seed=st.integers(0, 2**32 - 1),
    num_devices=st.integers(1, 4),
    policy=st.sampled_from(("auto", *POLICIES)),
    sla=st.integers(0, 23).map(lambda drawn: "length" if drawn else "request"),
    monotone=st.booleans(),
    quantile=st.sampled_from((0.5, 0.9, 0.99)),
)


def claims_hold(case: Case, shares: Sequence[float] = SHARES) -> None:
    """Claims of the plans under bounds, rising shares of the latency without one, and that the last serves most."""
    free = case.plans(None)
    if not free:
        return  # a policy for more devices
    loosest_s = max(plan.estimate.latency_s for plan in free.values())
    best_rps, kept, together = 0.0, False, False
    for share in shares:
        bound_s = share * loosest_s
        plans = case.plans(bound_s)
        assert plans or not kept, f"{bound_s} s is infeasible, a tighter bound is not"
        if not plans:
            continue
        kept = True
        best = next(iter(plans.values()))
        together |= best.search.bound in (TOGETHER, PASSED_OVER)
        slack = 1 + (TOLERANCES.simulated if together else best.search.gap or 0.0)
        assert best.estimate.throughput_rps * slack >= best_rps * (1 - ROUNDING), "a tighter bound serves more"
        best_rps = max(best_rps, best.estimate.throughput_rps)
        for plan in plans.values():
            assert plan.estimate.latency_s <= bound_s * (1 + ROUNDING), "a bound that is not kept"
            assert plan.search.evaluations <= plan.search.space_size, "more points than there are"
            assert Plan.model_validate_json(plan.model_dump_json()) == plan, "a plan that reads back differently"
        assert best.estimate.throughput_rps == max(plan.estimate.throughput_rps for plan in plans.values())
        if best.search.gap is not None:
            nothing_beats(case, best, [kind for kind in kinds_in(case) if is_proven(kind, plans)])
    unbounded = next(iter(free.values()))
    together |= unbounded.search.bound in (TOGETHER, PASSED_OVER)
    slack = 1 + (TOLERANCES.simulated if together else unbounded.search.gap or 0.0)
    assert unbounded.estimate.throughput_rps * slack >= best_rps * (1 - ROUNDING), "a bound serves more than none"
    figures_are_simulated(case, best if kept else unbounded)


def kinds_in(case: Case) -> tuple[str, ...]:
    return tuple(POLICIES) if case.policy == "auto" else (case.policy,)


def is_proven(kind: str, plans: dict[str, Plan]) -> bool:
    """Whether a policy's plan is the best in closed form; simulation shows others to serve less than these promise."""
    return all(plan.search.gap is not None for name, plan in plans.items() if name.startswith(kind)) and any(
        name.startswith(kind) for name in plans
    )


def nothing_beats(case: Case, best: Plan, kinds: list[str]) -> None:
    """Random settings on random placements serve no more than the certificate allows."""
    rng = np.random.default_rng(case.seed)
    search = scheduler(case.subject.under(best.constraint))
    for kind in kinds:
        spaces = [space for space in search.candidates.spaces(kind) if space.num_points]
        for i in rng.choice(len(spaces), min(len(spaces), 2), replace=False) if spaces else ():
            points = spaces[i].points(rng.integers(0, spaces[i].num_points, 60))
            evaluation = spaces[i].evaluate(points)
            most = evaluation.throughput[evaluation.feasible].max(initial=0.0)
            assert best.search.gap is not None
            assert most <= best.estimate.throughput_rps * (1 + best.search.gap) * (1 + ROUNDING), (kind, "beats it")


def figures_are_simulated(case: Case, plan: Plan) -> None:
    """Other requests than those that settled the plan show what it says."""
    subject, rng = case.subject, np.random.default_rng(case.seed + 1)
    error = plan.estimate.latency_error
    # Between two lengths the latency of a quantile may jump: what lies a little to either side counts.
    q, near = plan.constraint.quantile, 0.2 * (1 - plan.constraint.quantile)
    if error is not None:
        law = request_law(plan, subject.profile, seed=case.seed % 1000 + 1)
        low, high = law.quantile(q - near), law.quantile(q + near)
        room = 4 * (error + law.error(q)) + 0.01
        assert low * (1 - room) <= plan.estimate.latency_s <= high * (1 + room), (low, plan.estimate.latency_s, high)
    # A batch that begins all at once ends its short requests first: of a few batches its long ones are in the mean.
    least = 200 if error is None else LEAST_OF_ALL
    num_requests = ceil(least + 12 * plan.estimate.decode_batch)
    measured, _ = simulate(plan, subject.profile, subject.workload, num_requests, rng)
    assert measured.throughput_rps == pytest.approx(plan.estimate.throughput_rps, rel=CHANCE)
    if error is None:
        assert measured.latency_s == pytest.approx(plan.estimate.latency_s, rel=CHANCE)
    else:
        low, high = np.quantile(measured.latencies_s, [q - near, q + near])
        if len(subject.workload.output.lengths) == 1:  # how they begin decides for good; the slower way is stated
            high = np.inf
        assert low / (1 + CHANCE) <= plan.estimate.latency_s <= (1 + CHANCE) * high, (
            low,
            plan.estimate.latency_s,
            high,
        )


def rates_hold(case: Case) -> None:
    """Stated arrival rates are kept, request by request, and broken a little above; a looser bound keeps as many."""
    free = case.plans(None)
    if not free:
        return
    loosest_s = max(plan.estimate.latency_s for plan in free.values())
    tighter: list[Plan] = []
    for share in ARRIVAL_SHARES:
        plans = case.plans(share * loosest_s, "arrivals")
        assert plans or not tighter, f"{share * loosest_s} s is infeasible, a tighter bound is not"
        if not plans:
            continue
        best = next(iter(plans.values()))
        assert rate_of(best) == max(map(rate_of, plans.values()))
        for plan in tighter:
            # Under one bound, so that both rates are of the same requests; a better plan must keep more by PRECISION.
            here = plan.model_copy(update={"constraint": best.constraint})
            other = with_capacity(here, case.subject.profile, rate_of(plan), edges=False)
            assert rate_of(best) * (1 + PRECISION) >= rate_of(other), "a plan for a tighter bound keeps a higher rate"
        tighter.append(best)
        for plan in plans.values():
            rate_is_confirmed(case, plan)


def rate_is_confirmed(case: Case, plan: Plan) -> None:
    found, constraint = plan.estimate.capacity, plan.constraint
    assert found is not None and constraint.latency_bound_s is not None
    assert (plan.search.gap is None) == plan.search.bound.startswith("none: ")
    assert found.share_kept >= constraint.quantile and found.whole_s <= constraint.latency_bound_s
    assert found.rate_per_s <= plan.estimate.throughput_rps * (1 + 1e-9)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan, "a plan that reads back differently"
    by_request, trial = (
        Trial(plan, case.subject.profile, by_request=one, least_requests=found.num_requests) for one in (True, False)
    )
    slack = 1 / (1 + constraint.headroom)
    assert (trial.num_requests, trial.num_warm_up) == (found.num_requests, found.warm_up_requests)
    assert by_request.at(found.rate_per_s, slack) is not None, "the stated rate breaks the bound"
    # Beyond saturation the queue grows, and a bound is kept only until the run ends.
    coarse = TOLERANCES.rate_of_others
    most, above = min(plan.estimate.throughput_rps, trial.saturated()), (1 + coarse) * found.rate_per_s * (1 + ROUNDING)
    assert found.rate_per_s < most, "the stated rate exceeds saturation"
    if above < most and by_request.at(above, slack) is not None:
        # A little more load can make better batches: the bound is broken at some rate between, not at all above.
        between = found.rate_per_s * (1 + coarse * np.linspace(1, 0, 24, endpoint=False))
        assert any(trial.at(rate, slack) is None for rate in between), "a higher rate keeps it, too"


KNOWN = (
    # Steps that take longer by the request in larger batches: a lane that chance has taken there does not come back.
    Case(3153535141, 4, "waa", "length", monotone=False, quantile=0.9),
    # Outputs of one length: a larger batch promises more, and serves less.
    Case(2491266330, 2, "orca", "request", monotone=False, quantile=0.5),
    # Tails that few admissions do not tell: requests that wait in a pipeline of waa's; batches of which a few are slow.
    Case(2055536846, 1, "static", "request", monotone=True, quantile=0.99),
    Case(284712975, 3, "waa", "request", monotone=True, quantile=0.99),
    # All prompts and outputs alike: the steps repeat for ever what the start has made of them.
    Case(2509471469, 1, "chunked", "request", monotone=True, quantile=0.9),
    # Of the requests that waa's cap lets in fewer than half decode: more than those wait in a saturated loop.
    Case(2837500832, 4, "waa", "length", monotone=False, quantile=0.5),
    # A static batch in parts whose outputs end with the first decode round.
    Case(486237138, 2, "auto", "length", monotone=False, quantile=0.99),
    # Outputs of 3 tokens or 37: few requests tell the mean only after the long ones of the first batch have ended.
    Case(2789746108, 1, "chunked", "length", monotone=False, quantile=0.9),
    # Outputs that end together keep whole batches of waa inside: nearly all after nine tokens; all with the first one.
    Case(3678212432, 2, "waa", "length", monotone=False, quantile=0.99),
    Case(3596733950, 3, "waa", "length", monotone=False, quantile=0.9),
    # Outputs of one or two tokens: the encode lane alone limits waa, with next to nothing in decode.
    Case(3782129256, 3, "waa", "length", monotone=True, quantile=0.9),
    Case(4100690267, 2, "waa", "length", monotone=False, quantile=0.5),
    # Outputs of one token: a batch's latency is that of its prompts, and few batches do not tell the slowest hundredth.
    Case(4100226323, 2, "orca", "request", monotone=False, quantile=0.99),
    # Of few requests, those that the start has kept waiting are the slowest hundredth.
    Case(2781628323, 4, "waa", "request", monotone=True, quantile=0.99),
    # Of the quantile's length there are few: the simulation that tells its latency needs more than others.
    Case(2241879313, 4, "waa", "length", monotone=False, quantile=0.99),
    # Nearly all outputs of one length: requests leave together, and those that stay meet fewer prompts than steps hold.
    Case(3980523140, 1, "orca", "request", monotone=False, quantile=0.9),
    # Batches that end with their prompts between others: what decodes next says nothing of their requests.
    Case(8619240, 1, "static", "length", monotone=True, quantile=0.9),
    # Outputs of one token, which say nothing of the time of longer ones: in waa's decode lane; in a batch that ended.
    Case(1813625218, 3, "waa", "request", monotone=True, quantile=0.9),
    Case(3689056080, 3, "static", "request", monotone=False, quantile=0.99),
    # Outputs of one length, or of two of which one is rare: requests that began together stay together.
    Case(1247510167, 1, "orca", "length", monotone=False, quantile=0.99),
    Case(1966559322, 4, "waa", "length", monotone=False, quantile=0.9),
    # One output in 22 is long: an empty engine ends many short ones before its share of long ones is there.
    Case(400527, 1, "auto", "length", monotone=True, quantile=0.5),
    # One in 300,000 is long: in a static batch none is, as a rule, and there is nothing to wait for.
    Case(682355403, 1, "static", "length", monotone=False, quantile=0.5),
)
"""Problems for which a claim once failed; the first ones, of every policy, are in the first ring."""


@pytest.mark.timeout(3600)
@settings(max_examples=100, phases=tuple(Phase) if ALL else [Phase.explicit])
@given(cases)
@known(KNOWN, 1)
def test_claims_hold(case: Case) -> None:
    claims_hold(case, (SHARES[case.seed % 2],))  # each bound is a third of the time; the long run tries both


rated = st.builds(
    Case,
    seed=st.integers(0, 2**32 - 1),
    num_devices=st.integers(1, 4),
    policy=st.sampled_from(("auto", *POLICIES)),
    sla=st.just("length"),
    monotone=st.booleans(),
    quantile=st.sampled_from((0.5, 0.9, 0.99)),
)


KNOWN_RATES = (
    # Smaller batches that closed forms put level with the best setting, or 12% behind it, keep 3 and 6% more.
    Case(2271760180, 1, "rra", "length", monotone=False, quantile=0.9),
    # Rates between saturation in simulation and in closed form keep a bound until the run ends, and its queue grows.
    Case(2675342405, 3, "waa", "length", monotone=False, quantile=0.99),
    Case(1641650881, 3, "waa", "length", monotone=True, quantile=0.5),
    # A simulation shows another throughput than the closed form, and so calls for another number of requests.
    Case(3503122931, 4, "waa", "length", monotone=True, quantile=0.5),
    Case(2494333050, 2, "waa", "length", monotone=False, quantile=0.5),
)
"""Problems for which a stated rate was once wrong."""


@pytest.mark.timeout(3600)
@settings(max_examples=12, phases=tuple(Phase) if ALL else [Phase.explicit])
@given(rated)
@known(KNOWN_RATES, 1)
def test_rates_hold(case: Case) -> None:
    rates_hold(case)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=100, derandomize=False)
@given(cases)
def test_claims_hold_of_many(case: Case) -> None:
    claims_hold(case)
