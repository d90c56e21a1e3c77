"""Explain why requests of a log are late under a deployment: because of its settings, or under any schedule."""

from __future__ import annotations

import numpy as np

from xgpt.core.schema import Plan
from xgpt.deciding.load import CarriedLoad
from xscheduler.problem import Problem
from xscheduler.schedule import scheduler
from xscheduler.why_not import fastest


def why_late(current: Plan, best: Plan, running: Problem, problem: Problem, load: CarriedLoad) -> list[str]:
    """Return a line on the late requests of the whole log, or nothing if none is late or the log has no times.

    Args:
        best: the plan with which to compare the deployment.
        running: the problem with the deployment's engine and data types.
    """
    late = load.late(current, running.profile)
    if load.log is None or late is None or not late.any():
        return []
    trace, planned = load.log.requests, load.late(best, problem.profile)
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
                f"{int(too_long.sum()):,} have outputs of more than {most:,} tokens, which no schedule can finish in "
                f"time, since a token takes {1e3 * found.each_s:.3g} ms even in an empty engine: only "
                f"{', '.join(ways)} would help"
            )
    alone = load.late_alone(current, running.profile)
    slow = np.zeros(len(late), bool) if alone is None else late & alone & ~too_long
    if slow.any():
        parts.append(
            f"{int(slow.sum()):,} are late even if they run alone, since this deployment's steps take too long"
        )
    if rest := number - int((too_long | slow).sum()):
        parts.append(f"{rest:,} are late because requests wait or share steps")
    if planned is not None and not (late <= too_long).all():
        still, new = int((planned & late & ~too_long).sum()), int((planned & ~late).sum())
        others = "the others" if too_long.any() else "these"
        parts.append(f"under the best plan {still:,} of {others} are late, and {new:,} that now are not")
    return [f"of the {number:,} late requests, {'; '.join(parts)}"]
