"""Replay a whole load on a plan, with the times and lengths of its requests."""

from __future__ import annotations

import numpy as np

from xgpt.core.errors import InputError
from xgpt.core.load import LogLoad
from xgpt.core.schema import PlanDraft, Profile
from xsimulator.measures import RequestTimes
from xsimulator.run import counted_times, run_requests, times_of

MOST_STEPWISE = 5000
"""Largest number of requests that are replayed step by step, if a plan's arrivals cannot be counted."""


def replay(plan: PlanDraft, profile: Profile, load: LogLoad) -> RequestTimes | None:
    """Replay all requests of a load with times, and return theirs. The replicas of the plan take turns.

    Return None if a request can never fit into the plan's memory, if the load has no times, or if the plan's arrivals
    cannot be counted and there are too many to simulate each step.
    """
    requests = load.requests._replace(prefixes=load.requests.prefixes if plan.shares_prompts else None)
    if requests.timestamp_s is None:
        return None
    one, number = plan.but(replicas=1), len(requests.input)
    found = [np.empty(number) for _ in range(3)]
    try:
        _check_fits(plan, load)
        for replica in range(plan.replicas):
            own = np.arange(replica, number, plan.replicas)
            part = requests.take(own)
            longest = int(max(part.output.max(), plan.workload.output.lengths[-1]))
            of_one = counted_times(one, profile, part, longest)
            if of_one is None:
                if len(own) > MOST_STEPWISE:
                    return None
                log = run_requests(one, profile, part, longest)
                of_one = times_of(one, log, len(own), part.output).later(plan.request_path_s)
            for whole, each in zip(found, (of_one.ttft_s, of_one.tpot_s, of_one.whole_s), strict=True):
                whole[own] = each
    except InputError:
        return None
    return RequestTimes(ttft_s=found[0], tpot_s=found[1], whole_s=found[2])


def _check_fits(plan: PlanDraft, load: LogLoad) -> None:
    inputs, outputs = load.requests.input, load.requests.output
    if plan.admission.kv == "reserve":
        outputs = np.maximum(outputs.max(), plan.workload.output.lengths[-1])
    room = plan.block_size * min(stage.kv_blocks for stage in plan.stages if stage.lane != "encode")
    if (longest := int((inputs + outputs).max())) > min(room, plan.model.max_context):
        raise InputError("workload", load.name, f"a request of {longest} tokens does not fit: plan for this workload")
