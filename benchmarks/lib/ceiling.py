"""Bound what any rule of steps can serve on a plan's placement, even if it knows future requests.

Two relaxations; the lower one counts. Each takes steps at the plan's own step times, which are fitted to its profile.

- **Fluid**: a linear programme over how often a step of each number of decodes and of prompt tokens runs, at whose rate
  all tokens are made, and the requests in decode wait no longer in all than the bound on the time per token allows.
  Only those with the longest outputs, as many as may break their bounds, wait as long as they like.
- **Prompts**: nothing is executed but prompts, each at the least time that a token takes in any step, preempted at no
  cost by a rule that knows all arrivals, and gives up those requests that help the others most (Moore and Hodgson). As
  many have their first token in time as can.
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
    """Return the arrival rate, requests a second, that no rule of steps exceeds on this plan's placement.

    Args:
        seed, num_requests: of the draw of lengths and arrivals.
    """
    plan = with_step_times(plan, profile)
    return min(fluid(plan), prompts_in_time(plan, Trial(plan, profile, seed, least_requests=num_requests)))


def fluid(plan: Plan) -> float:
    """Return the highest rate of tokens under which requests in decode wait no longer than they may."""
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
    """Requests whose K/V fits at a time, each with the mean prompt and its maximum set aside."""
    workload = plan.workload
    tokens = _mean(workload.input.lengths, workload.input.probabilities) + workload.output.lengths[-1]
    return max(1, int(min(stage.kv_blocks for stage in plan.stages) * plan.block_size / tokens))


def _longest(plan: Plan) -> float:
    """Tokens of the longest outputs, as many as may break their bounds, in the mean over all requests."""
    left, tokens = 1 - plan.constraint.quantile, 0.0
    outputs = plan.workload.output
    for length, share in zip(reversed(outputs.lengths), reversed(outputs.probabilities), strict=True):
        tokens += min(share, left) * length
        left = max(0.0, left - share)
    return tokens


def _mean(values: npt.ArrayLike, shares: npt.ArrayLike) -> float:
    return float(np.asarray(values, float) @ np.asarray(shares, float))


def prompts_in_time(plan: Plan, trial: Trial) -> float:
    """Return the highest rate at which enough prompts can be encoded in time where nothing decodes."""
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
    """Count the requests that must be late, those with equal time to do so being served in the order of arrival."""
    late, free_s = 0, 0.0
    inside: list[float] = []
    """What each of the requests since the device was last idle takes, rising."""
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
