"""Replay a log with its recorded arrival times, to find out whether a deployment's settings cause late requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InputError
from xgpt.core.numbers import duration
from xgpt.core.schema import Plan, Profile
from xgpt.core.workload import TraceLengths
from xgpt.reporting.plan_text import bounds_in_words
from xscheduler.problem import Problem
from xscheduler.schedule import scheduler
from xscheduler.why_not import fastest
from xsimulator.measures import RequestTimes
from xsimulator.run import replay_by_counts

MOST_REPLAYED = 50_000
"""Largest number of requests of a log to replay."""


def answer(
    current: Plan,
    current_profile: Profile,
    best: Plan,
    problem: Problem,
    trace: TraceLengths | None,
    running: Problem,
) -> list[str]:
    """Return lines of text: which share of a log's requests keep the bounds at the recorded times, and why others are
    late.

    Args:
        best: the plan with which to compare the deployment.
        problem: the problem that the plans solve.
        running: the same problem with the deployment's engine and data types.
        trace: the log, or None. Without a log with times, nothing is returned.
    """
    constraint = problem.constraint
    if trace is None or trace.timestamp_s is None or not constraint.bounds_latency or len(trace.input) < 2:
        return []
    count = min(len(trace.input), MOST_REPLAYED)
    part = trace.take(np.arange(count))
    now, planned = _times(current, current_profile, part), _times(best, problem.profile, part)
    if now is None:
        return []
    share, quantile = now.share_kept(constraint.all_bounds), constraint.quantile
    span = duration(float(trace.timestamp_s[count - 1]))
    lines = [
        f"your log, replayed at its own times ({count:,} requests in {span}): with the current deployment, "
        f"{100 * share:.4g}% of the requests keep {bounds_in_words(constraint)} (p{100 * quantile:g} from arrival to "
        f"the last token: {float(np.quantile(now.whole_s, quantile)):.3g} s), "
        f"{'as required' if share >= quantile else f'but {100 * quantile:g}% should'}"
    ]
    late = now.excess(constraint.all_bounds) > 1
    if late.any():
        lines += _others(running, part, late, planned)
    elif share >= quantile:
        lines.append("no request is late, so the log gives no reason for other settings")
    return lines


def _others(
    running: Problem, trace: TraceLengths, late: npt.NDArray[np.bool_], planned: RequestTimes | None
) -> list[str]:
    """Return a line of text on late requests: how many have outputs too long for any schedule, how many are late for
    other reasons, and how many of these would be late under the best plan.
    """
    number, constraint = int(late.sum()), running.constraint
    parts, too_long = list[str](), np.zeros(len(late), bool)
    found = fastest(scheduler(running).candidates, ("chunked", "orca"))
    if constraint.latency_bound_s is not None and found is not None and found.each_s > 0:
        most = 1 + int((constraint.latency_bound_s - found.first_s) / found.each_s)
        too_long = late & (np.asarray(trace.output) > most)
        if too_long.any():
            ways = ["more or faster devices", "or a limit on output tokens"]
            if not running.speculation:
                ways.insert(0, "a draft")
            if running.profile.dtype != "float8":
                ways.insert(0, "dtype=float8")
            parts.append(
                f"{int(too_long.sum())} have outputs of more than {most:,} tokens, which no schedule can finish in "
                f"time, since a token takes {1e3 * found.each_s:.3g} ms even in an empty engine: only "
                f"{', '.join(ways)} would help"
            )
    if rest := number - int(too_long.sum()):
        still = 0 if planned is None else _late_in(planned, running, too_long)
        better = "" if planned is None else f"; under the best plan {still} of these are late"
        parts.append(f"{rest} are late because requests wait or share steps{better}")
    return [f"of the {number:,} late requests, {'; '.join(parts)}"]


def _late_in(planned: RequestTimes, running: Problem, too_long: npt.NDArray[np.bool_]) -> int:
    over = planned.excess(running.constraint.all_bounds) > 1
    size = min(len(over), len(too_long))
    return int((over[:size] & ~too_long[:size]).sum())


def _times(plan: Plan, profile: Profile, trace: TraceLengths) -> RequestTimes | None:
    """Simulate a trace on a plan, and return its requests' times. Return None if the plan has several replicas, or if a
    fast simulation is not possible.
    """
    if plan.replicas > 1:  # a replica gets only a part of the log
        return None
    try:
        run = replay_by_counts(plan, profile, plan.workload, trace, len(trace.input))
    except InputError:
        return None
    return None if run is None else run.times
