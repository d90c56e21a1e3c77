"""Sessions on all replicas of a plan as simulated engines run them, step by step: the reference for what is counted."""

from __future__ import annotations

import heapq

from xgpt.core import policies
from xgpt.core.policies.routing import BLOCKS_A_KEY, ReplicaRouter
from xgpt.core.schema import PlanDraft, Profile
from xgpt.core.schema.step_log import Chain, StepRecord
from xgpt.core.turns import Chains
from xgpt.core.workload import TraceLengths
from xsimulator.events import SimulatedEngine, SimulatedRequest
from xsimulator.run import clock_of
from xsimulator.session_routes import Route
from xsimulator.sessions import TurnTimes, logged_turns


def routed_engines(plan: PlanDraft, profile: Profile, trace: TraceLengths, route: Route) -> TurnTimes:
    sessions = trace.turns
    assert trace.timestamp_s is not None
    chains = Chains(sessions, trace.input, trace.output, plan.block_size)
    router = ReplicaRouter.of(plan) if route == "prefix" else ReplicaRouter(plan.replicas, float("inf"))
    schedules = [policies.build(plan) for _ in range(plan.replicas)]
    engines = [SimulatedEngine(each, clock_of(plan, profile, each), ()) for each in schedules]
    outside, path_ns, longest = sessions.children(), round(1e9 * plan.request_path_s), int(trace.output.max())
    due = [(int(1e9 * trace.timestamp_s[i]), i) for i in sessions.first.tolist()]
    heapq.heapify(due)
    inside, left, log = [0] * plan.replicas, list[tuple[int, int]](), list[StepRecord]()
    while due or any(inside):
        working = [i for i, count in enumerate(inside) if count]
        first = min(working, key=lambda i: engines[i].now_ns, default=None)
        if due and (first is None or due[0][0] <= engines[first].now_ns):
            at_ns, turn = heapq.heappop(due)
            while left and left[0][0] <= at_ns:
                router.leave(heapq.heappop(left)[1])
            prompt = chains.prompt(turn)
            number = router.route(_key(route, int(sessions.session[turn]), prompt))
            lengths = int(trace.input[turn]), longest, int(trace.output[turn])
            request = SimulatedRequest(turn, *lengths, at_ns, chain=prompt, output_chain=chains.output(turn))
            engines[number].submit(request)
            engines[number].now_ns = max(engines[number].now_ns, 0 if inside[number] else at_ns)
            inside[number] += 1
            continue
        assert first is not None
        step = engines[first].step()
        assert step is not None
        log.append(step)
        for id_ in step.finished:
            inside[first] -= 1
            heapq.heappush(left, (step.end_ns, first))
            for child in outside.get(id_, ()):
                heapq.heappush(due, (step.end_ns + path_ns + int(1e9 * sessions.pause_s[child]), child))
    return logged_turns(plan, trace, log)


def _key(route: Route, session: int, prompt: Chain) -> Chain:
    if route == "prefix":
        return prompt[BLOCKS_A_KEY - 1 :: BLOCKS_A_KEY]
    return (session.to_bytes(8, "big"),) if route == "session" else ()
