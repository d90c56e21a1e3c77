"""Bound the rate that any scheduling rule can serve on a plan's placement, even if the rule knows future requests.

There are two relaxations, and the lower result counts. Both use the plan's step times, which are fitted to its profile.

- **Fluid**: a linear program. Its variables are the rates of steps with each number of decodes and of prompt tokens.
  The steps must compute all tokens, and all requests in decode together must not wait longer than the bound on the time
  per token allows. Only the longest outputs, as many as may break their bounds, may wait for any time.
- **Prompts**: only prompts are executed, with the least time that a token takes in any step. A rule that knows all
  arrivals preempts them at no cost, and gives up the requests whose loss helps the others most (Moore and Hodgson). So
  the largest possible number of requests has the first token in time.
"""

from __future__ import annotations

from bisect import insort
from itertools import product

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from xgpt.core.policies.slack import StepClock
from xgpt.core.schema import Plan, Profile
from xsimulator.capacity import Trial
from xsimulator.costs.step_times import with_step_times

PRECISION = 0.01
NUM_BATCHES, NUM_PIECES, NUM_EXEMPT = 48, 28, 5
LARGEST_STEP = 16384


def ceiling(plan: Plan, profile: Profile, seed: int, num_requests: int) -> float:
    """Return the arrival rate, in requests a second, that no scheduling rule exceeds on this plan's placement."""
    plan = with_step_times(plan, profile)
    return min(fluid(plan), prompts_in_time(plan, Trial(plan, profile, seed, least_requests=num_requests)))


def fluid(plan: Plan) -> float:
    """Return the highest rate at which requests in decode wait no longer than their bound allows."""
    assert plan.estimate.step_times is not None and plan.constraint.tpot_s is not None
    clock, most = StepClock(plan.estimate.step_times), _most_running(plan)
    batches = np.unique([0, *np.round(np.geomspace(1, most, NUM_BATCHES))]).astype(int)
    pieces = np.unique([0, *np.round(np.geomspace(16, LARGEST_STEP, NUM_PIECES))]).astype(int)
    exempt = np.linspace(0, 1, NUM_EXEMPT)
    steps = [(b, round(e * b), p) for b, e, p in product(batches, exempt, pieces) if b + p]
    workload = plan.workload
    inputs, outputs = (
        _mean(workload.input.lengths, workload.input.probabilities),
        _mean(workload.output.lengths, workload.output.probabilities),
    )
    context = inputs + _mean(np.square(workload.output.lengths), workload.output.probabilities) / outputs / 2
    attention = _mean([clock.piece(0, n) for n in workload.input.lengths], workload.input.probabilities)
    seconds = [clock.tokens(b + p) + clock.decodes(b, round(b * context)) for b, _, p in steps]
    # Variables: how often each step runs a second, then the rate of requests.
    waits = [(took - plan.constraint.tpot_s) * (b - e) for took, (b, e, _) in zip(seconds, steps, strict=True)]
    rows = [
        [*(took / len(plan.stages) for took in seconds), attention / len(plan.stages)],
        [*(-b for b, _, _ in steps), outputs - 1],
        [*(-p for _, _, p in steps), inputs],
        [*(e for _, e, _ in steps), -_longest(plan)],
        [*waits, 0.0],
    ]
    found = linprog([*(0.0 for _ in steps), -1.0], A_ub=rows, b_ub=[1.0, 0, 0, 0, 0], method="highs")
    assert found.success, found.message
    return float(plan.replicas * -found.fun)


def _most_running(plan: Plan) -> int:
    """Return how many requests' K/V fits at the same time, each with the mean prompt and its maximum output
    reserved."""
    workload = plan.workload
    tokens = _mean(workload.input.lengths, workload.input.probabilities) + workload.output.lengths[-1]
    return max(1, int(min(stage.kv_blocks for stage in plan.stages) * plan.block_size / tokens))


def _longest(plan: Plan) -> float:
    """Return the tokens of the longest outputs, as many as may break their bounds, divided by the number of all
    requests."""
    left, tokens = 1 - plan.constraint.quantile, 0.0
    outputs = plan.workload.output
    for length, share in zip(reversed(outputs.lengths), reversed(outputs.probabilities), strict=True):
        tokens += min(share, left) * length
        left = max(0.0, left - share)
    return tokens


def _mean(values: npt.ArrayLike, shares: npt.ArrayLike) -> float:
    return float(np.asarray(values, float) @ np.asarray(shares, float))


def prompts_in_time(plan: Plan, trial: Trial) -> float:
    """Return the highest rate at which enough prompts can be encoded in time if no request decodes."""
    assert plan.estimate.step_times is not None
    if plan.constraint.ttft_s is None:
        return float("inf")
    times, clock = plan.estimate.step_times, StepClock(plan.estimate.step_times)
    token_s = min(took / n for n, took in zip(times.tokens[1:], times.tokens_s[1:], strict=True))
    stream, lanes = trial.stream(1.0), len(plan.stages) * plan.replicas
    inputs, arrivals_s = np.asarray(stream.inputs), np.asarray(stream.arrivals_ns) / 1e9 * plan.replicas
    seconds = [(n * token_s + clock.piece(0, n)) / lanes for n in inputs]
    alone_s = [clock.tokens(n) + clock.piece(0, n) for n in inputs]
    low, high = 0.0, 2 / float(np.mean(seconds))
    while high - low > PRECISION * high:
        rate = (low + high) / 2
        late = _fewest_late(arrivals_s / rate / plan.replicas, seconds, alone_s, plan.constraint.ttft_s)
        low, high = (rate, high) if late <= (1 - plan.constraint.quantile) * len(inputs) else (low, rate)
    return high


def _fewest_late(arrivals_s: npt.NDArray[np.float64], seconds: list[float], alone_s: list[float], ttft_s: float) -> int:
    """Return how many requests must be late. All have the same bound, so they are served in order of arrival."""
    late, free_s = 0, 0.0
    inside: list[float] = []
    """Seconds of each request since the device was last idle, in ascending order."""
    for at_s, took, alone in zip(arrivals_s, seconds, alone_s, strict=True):
        if alone > ttft_s:
            late += 1
            continue
        if free_s <= at_s:
            free_s = at_s
            inside.clear()
        insort(inside, took)
        free_s += took
        if free_s > at_s + ttft_s:
            free_s -= inside.pop()
            late += 1
    return late
