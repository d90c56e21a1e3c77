"""Replay the requests of a log on a plan, with their times and lengths."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from xgpt.core.errors import InputError
from xgpt.core.load import LogLoad
from xgpt.core.policies import Rule
from xgpt.core.schema import PlanDraft, Profile, Workload
from xgpt.core.workload import Ints, TraceLengths
from xsimulator.clock import Span
from xsimulator.counts.arrivals import KeptBounds, Run, Stream
from xsimulator.measures import Measured, RequestTimes
from xsimulator.run import (
    Simulated,
    check_fits,
    check_known,
    counted,
    kept_by_class,
    outstanding_requests,
    run_replica,
    run_requests,
    times_of,
)
from xsimulator.shares import routed

MOST_STEPWISE = 5000
"""Largest number of requests that are replayed step by step, if a plan's arrivals cannot be counted."""
MANY_REQUESTS = 20_000
"""Replays of more requests than this are simulated by counts if possible. They take seconds, but return no steps."""


def replay(plan: PlanDraft, profile: Profile, load: LogLoad) -> RequestTimes | None:
    """Replay all requests of a load with times, and return theirs.

    Return None if a request can never fit into the plan's memory, if the load has no times, or if the plan's arrivals
    cannot be counted and there are too many to simulate each step.
    """
    requests, found = _requests(plan, load), list[tuple[Ints, RequestTimes]]()
    if requests.timestamp_s is None:
        return None
    try:
        _check_fits(plan, load)
        for own in routed(requests, plan):
            if not len(own):
                continue
            part = requests.take(own)
            longest = int(max(part.output.max(), plan.workload.output.lengths[-1]))
            if (run := _counted(plan, profile, part, longest, len(own))) is not None:
                found.append((own, _times(plan, run, part)))
            elif len(own) > MOST_STEPWISE:
                return None
            else:
                found.append((own, _stepwise(plan, profile, part, longest, len(own))))
    except InputError:
        return None
    return _together(len(requests.input), found)


def simulate_log(
    plan: PlanDraft,
    profile: Profile,
    workload: Workload,
    load: LogLoad,
    num_requests: int,
    *,
    keep_steps: bool = False,
    rule: Rule | None = None,
) -> Simulated:
    """Replay a log's first requests on all replicas, with the recorded arrival times and pairs of lengths.

    Args:
        keep_steps: whether to return the steps even if more than `MANY_REQUESTS` requests are replayed. Such a replay
            then takes 0.6 ms for each request.

    Raises:
        InputError: the log has no times, or one of its requests can never fit into the plan's K/V memory.
    """
    check_fits(plan, workload)
    trace, count = _requests(plan, load), min(num_requests, len(load.requests.input))
    if trace.timestamp_s is None:
        raise InputError("workload", workload.name, "it has no timestamps; give `arrival_rate_per_s`")
    # Further requests follow, so that the last ones do not run in an engine that is running empty.
    rest = outstanding_requests(plan)
    counts = [(own, int((own < count).sum())) for own in routed(trace, plan)]
    parts = [(own[:number], trace.take(own[: number + rest])) for own, number in counts if number]
    is_long = count > MANY_REQUESTS and not keep_steps and rule is None
    run = _by_counts(plan, profile, workload, parts, count) if is_long else None
    if run is None:
        run = _by_steps(plan, profile, workload, parts, count, rule)
    load = load.part(count=count)
    run = replace(run, load=load)
    if run.times is None or not plan.constraint.bounds_latency:
        return run
    return replace(run, windows=load.kept(run.times.excess(plan.constraint.all_bounds) <= 1))


Parts = list[tuple[Ints, TraceLengths]]
"""For each replica the places of its measured requests in the log, and all its requests."""


def _by_steps(
    plan: PlanDraft, profile: Profile, workload: Workload, parts: Parts, count: int, rule: Rule | None
) -> Simulated:
    longest, spans, (own, part) = workload.output.lengths[-1], list[Span](), parts[0]
    measured, steps = run_replica(plan, profile, workload, part, len(own), spans.append, rule)
    check_known(plan, profile, steps)
    found = [(own, _from_arrival(plan, times_of(plan, steps, len(own), part.output), part.input[: len(own)]))]
    found += [(own, _stepwise(plan, profile, part, longest, len(own), rule)) for own, part in parts[1:]]
    measured = replace(measured, num_requests=count)
    times, kept = _together(count, found), kept_by_class(plan, steps, len(own))
    return Simulated(plan, measured, tuple(steps), tuple(spans), times, kept)


def _by_counts(plan: PlanDraft, profile: Profile, workload: Workload, parts: Parts, count: int) -> Simulated | None:
    """Replay by counts, with mean step times, or return None if the plan cannot be simulated by counts. The times of
    requests equal those of `_by_steps`, but gaps between single tokens and idle shares are not known.
    """
    found, sums, preempted, longest = [], np.zeros(4, int), 0, workload.output.lengths[-1]
    begin_ns, end_ns, unknown = np.inf, 0.0, float("nan")
    for own, part in parts:
        run = _counted(plan, profile, part, longest, len(own))
        if run is None:
            return None
        found.append((own, _times(plan, run, part.take(np.arange(len(own))))))
        sums += run.step_sums
        preempted += int(np.count_nonzero(run.state.requests["made"][: len(own)]))
        begin_ns = min(begin_ns, float(run.state.requests["admitted_ns"][: len(own)].min()))
        end_ns = max(end_ns, float(np.max(run.end_ns[: len(own)])))
    encode_steps, pieces, decode_steps, decoded = sums
    window_s, tokens = (end_ns - begin_ns) / 1e9, sum(int(part.output[: len(own)].sum()) for own, part in parts)
    measured = Measured(
        num_requests=count,
        window_s=window_s,
        throughput_rps=count / window_s,
        output_tokens_per_s=tokens / window_s,
        latency_s=unknown,
        request_latency_s=unknown,
        ttft_s=unknown,
        itl_p99_s=unknown,
        preemptions=preempted,
        encode_batch=float(pieces / max(encode_steps, 1)),
        decode_batch=float(decoded / max(decode_steps, 1)),
        latencies_s=np.zeros(0),
    )
    return Simulated(plan, measured, (), (), _together(count, found))


def _requests(plan: PlanDraft, load: LogLoad) -> TraceLengths:
    return load.requests if plan.shares_prompts else load.requests._replace(prefixes=None)


def _counted(plan: PlanDraft, profile: Profile, part: TraceLengths, longest: int, count: int) -> Run | None:
    """Run a replica's requests by counts, with mean step times, until the first `count` have ended. Return None if its
    arrivals cannot be counted.
    """
    is_reuse_unknown = plan.estimate.reuse is not None and part.prefixes is None
    if plan.constraint.classes or plan.speculation is not None or is_reuse_unknown or part.timestamp_s is None:
        return None
    stream = Stream(part.input, part.output, longest, _arrivals_ns(part))
    run = counted(plan, profile, stream, part.prefixes)
    if run is not None:
        run.run(KeptBounds((), 0, count))
    return run


def _arrivals_ns(part: TraceLengths) -> Ints:
    assert part.timestamp_s is not None
    return (1e9 * part.timestamp_s).astype(int)


def _times(plan: PlanDraft, run: Run, part: TraceLengths) -> RequestTimes:
    arrived, count = _arrivals_ns(part).astype(float), len(part.input)
    first, end = (np.asarray(values[:count], float) for values in (run.first_ns, run.end_ns))
    return _from_arrival(plan, RequestTimes.of_ns(arrived, first, end, part.output), part.input)


def _stepwise(
    plan: PlanDraft, profile: Profile, part: TraceLengths, longest: int, count: int, rule: Rule | None = None
) -> RequestTimes:
    log = run_requests(plan, profile, part, longest, rule=rule)
    return _from_arrival(plan, times_of(plan, log, count, part.output), part.input[:count])


def _from_arrival(plan: PlanDraft, times: RequestTimes, inputs: Ints) -> RequestTimes:
    """Return times in the engine's loop as times from arrival, with the log's own prompts."""
    return times.later(0.0 if plan.engine is None else plan.engine.request_path_s(float(np.mean(inputs))))


def _together(number: int, found: Iterable[tuple[Ints, RequestTimes]]) -> RequestTimes:
    ttft_s, tpot_s, whole_s = (np.empty(number) for _ in range(3))
    for own, times in found:
        ttft_s[own], tpot_s[own], whole_s[own] = times.ttft_s, times.tpot_s, times.whole_s
    return RequestTimes(ttft_s=ttft_s, tpot_s=tpot_s, whole_s=whole_s)


def _check_fits(plan: PlanDraft, load: LogLoad) -> None:
    inputs, outputs = load.requests.input, load.requests.output
    held = longest = int((inputs + outputs).max())
    if plan.admission.kv == "reserve":
        held = int(inputs.max() + max(outputs.max(), plan.workload.output.lengths[-1]))
    room = plan.block_size * min(stage.kv_blocks for stage in plan.stages if stage.lane != "encode")
    if longest > plan.model.max_context or held > room:
        raise InputError("workload", load.name, f"a request of {held} tokens does not fit: plan for this workload")
