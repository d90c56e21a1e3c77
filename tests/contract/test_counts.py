"""Arrivals simulated by counts have the times of the engine that runs each request, whatever the schedule.

Random settings of every policy on random placements (several stages, micro-batches, tensor parallelism, WAA's lanes),
random lengths, outputs of one token among them, arrivals that tie, and K/V memory for a few requests only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from importlib import import_module
from inspect import getsource
from re import findall

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.contract.test_claims import Case
from tests.rings import examples
from xgpt.core import policies
from xgpt.core.errors import InfeasibleError
from xgpt.core.schema import Constraint, EngineSpec, Plan, Profile
from xgpt.core.workload import sample
from xgpt.resolve import load_engine
from xscheduler.schedule import scheduler
from xscheduler.space import POLICIES
from xsimulator.costs.step_cost import lanes_of
from xsimulator.counts.arrivals import Run, Stream
from xsimulator.counts.counted_run import counted_run
from xsimulator.counts.one_lane_arrivals import OneLaneRun
from xsimulator.counts.two_lane_arrivals import TwoLaneRun
from xsimulator.events import SimulatedEngine, SimulatedRequest
from xsimulator.run import clock_of

NUM_REQUESTS = 80


@dataclass(frozen=True)
class Arrivals:
    """A schedule and when requests arrive.

    Attributes:
        load: of the saturated throughput.
        together: requests that arrive at once, in the mean.
        room: of the K/V memory, in requests of the longest lengths; 0: what the devices have.
    """

    case: Case
    load: float
    together: int
    room: int

    def plan(self) -> Plan | None:
        case = self.case
        search = scheduler(case.subject.under(Constraint(objective="saturated")))
        rng = np.random.default_rng(case.seed)
        spaces = [space for space in search.candidates.spaces(case.policy) if space.num_points]
        if not spaces:
            return None  # a policy for more devices
        space = spaces[rng.integers(len(spaces))]
        points = space.points(rng.integers(0, space.num_points, 1))
        try:
            plan = search.score(space.settings(points, 0), space.placement)
        except InfeasibleError:
            return None
        if plan.policy.kind == "waa":
            control = {
                "adjustment_percent": int(rng.choice([0, 0, 10, 40])),
                "buffer_iterations": int(rng.choice([0, 0, 2, 9])),
            }
            plan = plan.model_copy(update={"policy": plan.policy.model_copy(update=control)})
        if not self.room:
            return plan
        longest = plan.workload.input.lengths[-1] + plan.workload.output.lengths[-1]
        blocks = self.room * -(-longest // plan.block_size)
        return plan.model_copy(
            update={"stages": tuple(stage.model_copy(update={"kv_blocks": blocks}) for stage in plan.stages)}
        )

    def stream(self, plan: Plan) -> Stream:
        rng = np.random.default_rng(self.case.seed + 1)
        inputs, outputs = sample(plan.workload, NUM_REQUESTS, rng)
        gap_s = self.together * plan.replicas / (self.load * plan.estimate.throughput_rps)
        bursts = np.cumsum(rng.exponential(gap_s, NUM_REQUESTS))
        arrivals = (1e9 * bursts[np.arange(NUM_REQUESTS) // self.together]).astype(int)
        return Stream(inputs.tolist(), outputs.tolist(), plan.workload.output.lengths[-1], arrivals.tolist())


def drawn(
    kinds: Iterable[str],
    num_devices: int,
    *,
    sla: str = "length",
    loads: tuple[float, ...] = (0.3, 0.9, 1.5),
    together: tuple[int, ...] = (1, 1, 3, NUM_REQUESTS),
    room: tuple[int, ...] = (0, 0, 1, 2, 5),
) -> st.SearchStrategy[Arrivals]:
    """Arrivals at plans of these policies, on at most `num_devices` devices."""
    case = st.builds(
        Case,
        seed=st.integers(0, 2**32 - 1),
        num_devices=st.integers(1, num_devices),
        policy=st.sampled_from(tuple(kinds)),
        sla=st.just(sla),
        monotone=st.booleans(),
        quantile=st.just(0.99),
    )
    load, together_, room_ = (st.sampled_from(choices) for choices in (loads, together, room))
    return st.builds(Arrivals, case=case, load=load, together=together_, room=room_)


def by_counts(plan: Plan, profile: Profile, requests: Stream) -> Run:
    run = counted_run(plan, lanes_of(plan, profile), requests)
    assert run is not None
    return run


def simulated(requests: Stream) -> list[SimulatedRequest]:
    """The same requests for the engine that runs each."""
    columns = enumerate(zip(requests.inputs, requests.outputs, requests.arrivals_ns, strict=True))
    return [SimulatedRequest(i, a, requests.max_output, b, at) for i, (a, b, at) in columns]


def one_by_one(plan: Plan, profile: Profile, requests: Stream) -> tuple[list[int], list[int]]:
    """When each request has its first and its last token."""
    schedule = policies.build(plan)
    each = simulated(requests)
    first, end = [-1] * len(each), [-1] * len(each)
    for record in SimulatedEngine(schedule, clock_of(plan, profile, schedule), each).run():
        ended = [id_ for id_, start, length in record.encode if start + length == requests.inputs[id_]]
        for id_ in ended if schedule.pool.encode_emits else record.decode:
            first[id_] = record.end_ns if first[id_] < 0 else first[id_]
        for id_ in record.finished:
            end[id_] = record.end_ns
    return first, end


AHEAD = load_engine("vllm-0.15")
APART = AHEAD.model_copy(update={"mixes": False})
SPARING = APART.model_copy(update={"spare_tokens": 40, "spare_tokens_each": 9})
ENGINES = (None, AHEAD, APART, SPARING, APART.model_copy(update={"schedules_ahead": False}))


@settings(max_examples=examples(100, 15))
@given(
    drawn(("orca", "chunked"), 2),
    st.booleans(),
    st.sampled_from((0, 0, 1, 3)),
    st.sampled_from((10, 100, 10_000)),
    st.sampled_from((1, 1, 2, 5)),
)
def test_counts_run_ahead_as_the_engine_does(
    arrivals: Arrivals, whole_prompts: bool, wait_steps: int, wait_tokens: int, receive_steps: int
) -> None:
    plan = arrivals.plan()
    assume(plan is not None and len(plan.stages) == 1)
    assert plan is not None
    plan = plan.model_copy(update={"engine": AHEAD})
    requests, profile = arrivals.stream(plan), arrivals.case.subject.profile
    with pytest.MonkeyPatch.context() as patch:
        build = import_module("xgpt.core.policies.build")  # the package has a function of that name
        rule = build.settings_of
        others = {"batch_wait_steps": wait_steps, "batch_wait_tokens": wait_tokens}
        others["receive_steps"] = receive_steps
        patch.setattr(build, "settings_of", lambda *args: replace(rule(*args), whole_prompts=whole_prompts, **others))
        run = by_counts(plan, profile, requests)
        assert run.run()
        assert (list(run.first_ns), list(run.end_ns)) == one_by_one(plan, profile, requests)


@settings(max_examples=examples(100, 15))
@given(drawn(("orca", "chunked"), 2, room=(1, 1, 2, 3, 5)), st.sampled_from(ENGINES), st.sampled_from((2, 5, 1000)))
def test_counts_preempt_as_the_engine_does(arrivals: Arrivals, engine: EngineSpec | None, max_running: int) -> None:
    plan = arrivals.plan()
    assume(plan is not None and len(plan.stages) == 1)
    assert plan is not None
    admission = plan.admission.model_copy(update={"kv": "quantile", "max_running": max_running})
    plan = plan.model_copy(update={"engine": engine, "admission": admission})
    requests, profile = arrivals.stream(plan), arrivals.case.subject.profile
    run = by_counts(plan, profile, requests)
    assert run.run()
    assert (list(run.first_ns), list(run.end_ns)) == one_by_one(plan, profile, requests)


@settings(max_examples=examples(200, 20))
@given(drawn(POLICIES, 4))
# The encode lane's memory is full of prompts: it holds no place for the token that each of them makes.
@example(Arrivals(Case(2818240210, 4, "waa", "length", monotone=False, quantile=0.99), load=0.9, together=80, room=5))
def test_counts_have_the_times_of_the_engine(arrivals: Arrivals) -> None:
    plan = arrivals.plan()
    assume(plan is not None)
    assert plan is not None
    requests, profile = arrivals.stream(plan), arrivals.case.subject.profile
    run = by_counts(plan, profile, requests)
    assert run.run()
    assert (list(run.first_ns), list(run.end_ns)) == one_by_one(plan, profile, requests)


@settings(max_examples=examples(100, 12))
@given(drawn(("waa",), 4))
def test_counts_run_prefill_groups_as_the_engine_does(arrivals: Arrivals) -> None:
    plan = arrivals.plan()
    assume(plan is not None)
    assert plan is not None
    encode, layers = [stage for stage in plan.stages if stage.lane == "encode"], (0, plan.model.num_layers)
    assume(len(encode) > 1 and {stage.tp for stage in encode} == {1})
    groups = (stage.model_copy(update={"decode_layers": layers}) for stage in encode)
    plan = plan.model_copy(update={"stages": (*groups, *plan.stages[len(encode) :])})
    assert Plan.model_validate_json(plan.model_dump_json()).prefill_groups == len(encode)
    requests, profile = arrivals.stream(plan), arrivals.case.subject.profile
    run = by_counts(plan, profile, requests)
    assert run.run()
    assert (list(run.first_ns), list(run.end_ns)) == one_by_one(plan, profile, requests)


@pytest.mark.parametrize(
    ("run", "settings_of_lane"), [(OneLaneRun, policies.LaneSettings), (TwoLaneRun, policies.TwoLaneSettings)]
)
def test_counts_know_exactly_the_settings_that_they_read(
    run: type[OneLaneRun | TwoLaneRun], settings_of_lane: type
) -> None:
    read = {*findall(r"settings\.(\w+)", getsource(run.__init__))}
    assert run.known == read & {field.name for field in fields(settings_of_lane)}
