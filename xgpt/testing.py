"""Test scheduling rules of one's own against the contract of `xgpt.Rule`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from xgpt import api
from xgpt.core import policies
from xgpt.core.policies import OneLane, Rule, Step
from xgpt.core.schema import LaneName, Plan, Profile
from xgpt.core.schema.step_log import StepRecord
from xgpt.core.workload import ArrivalProcess, sample
from xprofiler.store import profile_of
from xsimulator.events import SimulatedEngine, SimulatedRequest, replay
from xsimulator.run import clock_of

NUM_REQUESTS = 400
LOADS = (0.5, 2.0)
"""Arrival rates at which a rule is run, relative to the plan's throughput."""


class _Checked(OneLane):
    def next_step(self, lane: LaneName = "both") -> Step | None:
        pool = self.pool
        before = pool.num_waiting, sorted(pool.running)
        step = super().next_step(lane)
        if step is None:
            assert before == (pool.num_waiting, sorted(pool.running)), "a call that returns None admitted a request"
            return None
        ids = list(step.ids)
        assert ids or step.preempted, "a step computes nothing: return None instead"
        assert len(ids) == len(set(ids)), f"a request is twice in a step: {sorted(ids)}"
        for chunk in step.encode:
            context = pool.running[chunk.id].context
            assert 0 < chunk.length <= context - chunk.start, f"{chunk} is no part of a prompt of {context} tokens"
        held = pool.memory.decodes.num_used
        assert held <= pool.kv_blocks, f"requests hold {held} of {pool.kv_blocks} blocks"
        return step


def check_rule(rule: Rule | Callable[[], Rule], plan: Plan | None = None, profile: Profile | None = None) -> None:
    """Check a rule against its contract, on the simulated engine.

    Every request ends, at half and at twice the plan's throughput. Each step computes parts of running requests, which
    fit into memory. A call that returns None changes nothing. Two runs are equal, and a log replays exactly, as it must
    on the real clock.

    Args:
        rule: a rule, or its class.
        plan: a plan of one lane. None means a chunked plan of Llama 3.1 8B on one H200.

    Raises:
        AssertionError: what the rule breaks.
        InputError: the plan has two lanes, or its profile is not on this machine.
    """
    own = rule if isinstance(rule, Rule) else rule()
    plan = plan or _usual_plan()
    profile = profile or profile_of(plan)
    for load in LOADS:
        first, second = (_run(own, plan, profile, load) for _ in range(2))
        assert first == second, f"two runs of the same requests differ (load {load:g} times the plan's throughput)"
        ended = {id_ for record in first for id_ in record.finished}
        missing = sorted(set(range(NUM_REQUESTS)) - ended)
        assert not missing, f"{len(missing)} of {NUM_REQUESTS} requests never end, the first is {missing[0]}"
        again = replay(policies.build(plan, own), first)
        assert again == first, f"a log replays only up to step {len(again)} of {len(first)}: the rule has other inputs"


def _run(rule: Rule, plan: Plan, profile: Profile, load: float) -> list[StepRecord]:
    rng = np.random.default_rng(0)
    inputs, outputs = sample(plan.workload, NUM_REQUESTS, rng)
    rate = load * plan.estimate.throughput_rps / plan.replicas
    arrivals_ns = (1e9 * ArrivalProcess.at(rate).times(NUM_REQUESTS, rng)).astype(int)
    longest = plan.workload.output.lengths[-1]
    requests = [
        SimulatedRequest(i, int(inputs[i]), longest, int(outputs[i]), int(arrivals_ns[i])) for i in range(NUM_REQUESTS)
    ]
    built = policies.build(plan, rule)
    assert isinstance(built, OneLane)
    schedule = _Checked(built.settings, built.pool.fresh(), built.stages, rule)
    return SimulatedEngine(schedule, clock_of(plan, profile, schedule), requests).run()


@cache
def _usual_plan() -> Plan:
    return api.plan(
        model="llama-3.1-8b",
        cluster="h200x1",
        workload="azure-conv",
        latency_bound_s=8,
        objective="saturated",
        policy="chunked",
    )
