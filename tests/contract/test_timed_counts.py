"""Rules that go by the clock: due times are those of single requests, and logs replay.

Budgets from slack and the order in time, over random settings, placements, lengths and bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.contract.test_counts import AHEAD, Arrivals, by_counts, drawn, one_by_one, simulated
from tests.rings import examples
from xgpt.core import policies
from xgpt.core.policies import MicroBatch
from xgpt.core.policies.slack import LaneForecast, Slack
from xgpt.core.schema import Plan, SlackBudget
from xsimulator.costs.step_times import with_step_times
from xsimulator.events import SimulatedEngine, replay
from xsimulator.run import clock_of


@dataclass(frozen=True)
class Timed:
    """Arrivals under a rule with times.

    Attributes:
        tightness: of the bounds, relative to what the plan takes at saturation.
        is_in_time: the order of admission.
    """

    arrivals: Arrivals
    tightness: float
    is_in_time: bool

    def plan(self) -> Plan | None:
        plan = self.arrivals.plan()
        if plan is None:
            return None
        rng = np.random.default_rng(self.arrivals.case.seed)
        estimate = plan.estimate
        bounds = {
            "ttft_s": max(3 * self.tightness * estimate.ttft_s, 1e-6),
            "tpot_s": max(self.tightness * estimate.tpot_s, 1e-6),
        }
        plan = plan.model_copy(update={"constraint": plan.constraint.model_copy(update=bounds)})
        plan = with_step_times(plan, self.arrivals.case.subject.profile)
        least = int(rng.integers(1, 40))
        slack = SlackBudget(
            least_tokens=least,
            most_tokens=least + int(rng.integers(0, 400)),
            share=float(rng.uniform(0.5, 1)),
            behind_tokens=int(rng.integers(0, 3)),
        )
        policy = plan.policy.model_copy(update={"slack": slack})
        order = "in-time" if self.is_in_time else "fcfs"
        admission = plan.admission.model_copy(update={"order": order, "patience": float(rng.choice([0.2, 8.0]))})
        return plan.model_copy(update={"policy": policy, "admission": admission})


class CheckedForecast(LaneForecast):
    """Compares each due time with the least of all requests that decode."""

    def first_due_ns(self, batch: MicroBatch, now_ns: int, slack: Slack) -> float:
        coming = batch.steps_under_way if batch.assumed is None else 0
        due_ns = (
            slack.due_ns(now_ns if r.first_ns is None else r.first_ns, r.generated + coming, r.account.tpot_ns)
            for r in batch.decoding.values()
        )
        found = super().first_due_ns(batch, now_ns, slack)
        assert found == min(due_ns, default=inf)
        return found


@settings(max_examples=examples(150, 12))
@given(
    st.builds(
        Timed,
        arrivals=drawn(("chunked", "orca"), 3, loads=(0.5, 0.9, 1.2, 1.5), room=(0, 0, 2, 5)),
        tightness=st.sampled_from((0.3, 0.8, 1.2, 2.0)),
        is_in_time=st.just(True),
    ),
    st.booleans(),
)
def test_counts_defer_prompts_as_the_engine_does(timed: Timed, ahead: bool) -> None:
    plan = timed.plan()
    assume(plan is not None)
    assert plan is not None
    if plan.policy.kind == "chunked":
        plan = plan.model_copy(update={"policy": plan.policy.model_copy(update={"slack": None})})
    if ahead and len(plan.stages) == 1:
        plan = plan.model_copy(update={"engine": AHEAD})
    requests, profile = timed.arrivals.stream(plan), timed.arrivals.case.subject.profile
    run = by_counts(plan, profile, requests)
    assert run.run()
    assert (list(run.first_ns), list(run.end_ns)) == one_by_one(plan, profile, requests)


@settings(max_examples=examples(40, 6))
@given(
    st.builds(
        Timed,
        arrivals=drawn(("chunked",), 3, room=(0, 0, 2, 5)),
        tightness=st.sampled_from((0.8, 1.2, 2.0)),
        is_in_time=st.booleans(),
    )
)
def test_due_times_are_those_of_the_requests_and_the_log_replays(timed: Timed) -> None:
    plan = timed.plan()
    assume(plan is not None)
    assert plan is not None
    assert type(plan).model_validate_json(plan.model_dump_json()) == plan
    requests, profile = timed.arrivals.stream(plan), timed.arrivals.case.subject.profile
    schedule = policies.build(plan)
    schedule.pool.forecast = CheckedForecast()
    log = SimulatedEngine(schedule, clock_of(plan, profile, schedule), simulated(requests)).run()
    assert replay(policies.build(plan), log) == log
