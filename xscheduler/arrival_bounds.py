"""Bound the arrival rate at which any settings of a placement keep their bounds, waiting included, from above.

Settings that keep the bounds at a rate r decode m requests in the mean iteration, and by Little's law r is at most what
an engine serves that always decodes m. So r is at most the saturated throughput of some settings of the placement, real
numbers included, whose mean iteration is as long; and that is bounded on the lower tables, as for the other objective
(`xscheduler.placement_bounds`, `xscheduler.box_bounds`). What remains is to say how long an iteration may be:

- A request of d decode iterations and i prompt tokens takes at least `first(i) + d t` from its arrival on, with t the
  mean iteration that it meets, since waiting only adds. The quantile of all requests must keep the bound. With S_q the
  quantile of d, `first(mean i) + S_q t` would have to keep it if prompts were all alike and every request met the same
  iterations. Neither is so, and both can help where lengths are few: of long requests that are just more than may break
  the bound, those with short prompts, or at quiet times, may be the ones that keep it. `loosened` therefore takes the
  least quantile of `first(i) / t + d` times a normal factor, over all ratios of prompt to iteration time and all
  deviations up to `SPREAD`, and loosens the bound by as much: by nothing if the distribution has a smooth tail.
- Where prompts pass one after the other in the order of their arrival, a request also waits for those before it
  (Lindley's recursion, for several micro-batches Kiefer and Wolfowitz's, on drawn prompts and Poisson arrivals). One
  prompt takes no less than its share of the least time: of the slowest stage, or, where steps take prompts at any time
  (orca, chunked), of full steps through all stages (`PromptSteps`). `Waits` says how much of the bound is left, by how
  far waits shift the quantile of all requests.
- Full steps are also counted. A prompt of i tokens fills at least floor(i / budget) steps, whatever follows it, so a
  second has at least `rate E[floor(i / budget)]` full steps. The others take no less than a step of one decode. So the
  mean iteration is known from below without closed forms, and with waits and the prompts themselves it tells which
  token budgets cannot keep the bound.
- The mean time to the first token, and the mean gap, of a saturated engine must keep `ttft_s` and `tpot_s`: a quantile
  from `LEAST_QUANTILE` on is not below the mean. Prompts whose quantile is below their mean loosen the former.

Assumed are that requests of all lengths meet the same iterations (no schedule knows an output's length beforehand),
that closed forms at saturation are right, and that a mean iteration varies by no more than `SPREAD` from long request
to long request. Fluctuations, bursts of prompts above all, lower what a schedule keeps, but not this bound; so it is
loosest where few long prompts decide. What is simulated in a search is held against it, and widens the gap if it is
more; `xscheduler.box_bounds.breach` draws boxes and points inside them.
"""

from __future__ import annotations

from heapq import heapreplace
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln, ndtr

from xgpt.core.schema import Constraint
from xgpt.core.workload import gamma_arrivals
from xsimulator.costs.step_cost import LaneCost
from xsimulator.lengths import Lengths

Array = npt.NDArray[np.float64]

SPREAD = (0.0, 0.03, 0.1)
"""Relative standard deviations of the mean iteration that a long request meets."""
RATIOS = (0.0, 1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)
"""Times of a mean prompt over that of a decode iteration."""
LEAST_QUANTILE = 0.9
"""Least share of requests that must keep a bound for its mean to have to keep it."""
NUM_PROMPTS = 24
"""Number of prompts that represent all."""
BISECTIONS = 24
NUM_ARRIVALS, NUM_ARRIVALS_AT_SEVERAL = 12_000, 4000
"""Drawn arrivals at one server and at several, from an empty engine on."""
WAIT_SHARES = np.linspace(0.0, 1.0, 401)[:-1]
"""Shares of requests, each of which waits for the shortest time of its group."""
LOAD_STEP, MOST_LOAD = 0.01, 1.2
"""Loads at which waits are computed are multiples of this one, the next lower one each, up to the highest."""
MOST_SERVERS, MANY_SERVERS = 4, 0
"""Beyond this number of micro-batches waits are short beside the prompts themselves: they are left out."""
SHIFT_BISECTIONS = 14


def loosened(constraint: Constraint, lengths: Lengths) -> Constraint:
    """Return bounds that a saturated engine keeps at each rate at which arriving requests keep the constraint.

    A bound that would have to be loosened without limit is left out.
    """
    latency, ttft, tpot = None, None, None
    of_ttft = constraint.ttft_quantile or constraint.quantile
    of_tpot = constraint.tpot_quantile or constraint.quantile
    if constraint.latency_bound_s is not None and (factor := _factor(lengths, constraint.quantile)) is not None:
        latency = factor * constraint.latency_bound_s
    if constraint.ttft_s is not None and of_ttft >= LEAST_QUANTILE:
        above = np.cumsum(lengths.input_probabilities) >= of_ttft - 1e-12
        longest = lengths.inputs[min(int(above.argmax()), len(above) - 1)] if above.any() else lengths.inputs[-1]
        ttft = constraint.ttft_s * max(1.0, lengths.mean_input / max(float(longest), 1.0))
    decoding = float(lengths.survival[0])
    if constraint.tpot_s is not None and decoding > 0 and (1 - of_tpot) / decoding <= 1 - LEAST_QUANTILE + 1e-12:
        tpot = constraint.tpot_s
    free: dict[str, Any] = {"sla": "length", "latency_bound_s": latency, "ttft_s": ttft, "tpot_s": tpot}
    return constraint.model_copy(update=free)


def shortened(constraint: Constraint, left: float) -> Constraint:
    """Return the constraint with a share of its latency bound."""
    bound_s = constraint.latency_bound_s
    return constraint if bound_s is None else constraint.model_copy(update={"latency_bound_s": left * bound_s})


class Waits:
    """What the requests of one workload wait at least, at any rate, for the prompts before them.

    Args:
        constraint: the bounds of arriving requests, and the burstiness of their arrivals.
    """

    def __init__(self, constraint: Constraint, lengths: Lengths) -> None:
        self._constraint, self._lengths = constraint, lengths
        bound_s, loose_s = constraint.latency_bound_s, loosened(constraint, lengths).latency_bound_s
        self._bound_s = inf if bound_s is None else bound_s / (1 + constraint.headroom)
        self._loose_s = inf if loose_s is None else loose_s / (1 + constraint.headroom)
        self._longest = float(lengths.decodes_at(constraint.quantile))
        rng = np.random.default_rng(0)
        shares = lengths.input_probabilities / lengths.input_probabilities.sum()
        self._prompts = rng.choice(lengths.inputs, NUM_ARRIVALS, p=shares) / lengths.mean_input
        self._arrivals = gamma_arrivals(1.0, NUM_ARRIVALS, constraint.burstiness, rng)
        self._decodes, self._shares = _grouped(lengths.outputs - 1, lengths.output_probabilities, constraint.quantile)
        self._known: dict[tuple[int, int], _Queue] = {}

    def left(self, prompt_s: float, rate: float) -> float:
        """Return the share of the latency bound that waiting leaves at most if prompts pass one after the other.

        Args:
            prompt_s: least seconds of a prompt of the mean length.
            rate: requests a second of one replica.
        """
        queue = self._queue(1, prompt_s * rate)
        if queue is None or not self._keep_first(queue.first * prompt_s):
            return 0.0
        return self._left(queue.waits * prompt_s)

    def left_by_budget(self, steps: PromptSteps, rate: float) -> Array:
        """Return the same if prompts pass in steps, by their token budget; 0: the bounds cannot be kept."""
        at = steps.at(rate)
        left = np.zeros(len(at.prompt_s))
        for i, (prompt_s, step_s, prompts) in enumerate(zip(at.prompt_s, at.step_s, at.steps_a_prompt, strict=True)):
            queue = self._queue(steps.microbatches, rate * prompt_s / steps.microbatches)
            if queue is None:
                continue
            full = rate / steps.microbatches * prompts  # steps a second
            pace_s = 1 / (full + max(1 - full * step_s, 0.0) / at.alone_s)
            if self._keep_first(queue.first * prompt_s) and self._keep(queue.first * prompt_s, max(pace_s, at.alone_s)):
                left[i] = self._left(queue.waits * prompt_s)
        return left

    def _keep_first(self, first: Array) -> bool:
        """Return whether the quantile of requests keeps a bound on times to first token."""
        bounds = self._constraint
        if bounds.ttft_s is None:
            return True
        share = np.searchsorted(first, bounds.ttft_s / (1 + bounds.headroom), side="right") / len(first)
        return bool(share >= (bounds.ttft_quantile or bounds.quantile))

    def _keep(self, first: Array, pace_s: float) -> bool:
        """Return whether the quantile of requests keeps the latency bound, given first tokens and a mean iteration."""
        return self._loose_s == inf or self._late(first, pace_s, self._loose_s) <= 1 - self._constraint.quantile

    def _late(self, before: Array, pace_s: float, bound_s: float) -> float:
        """Return the share of requests that end after the bound, if shares of them begin to decode at these times."""
        kept = np.searchsorted(before, bound_s - self._decodes * pace_s, side="right") / len(before)
        return float(1 - kept @ self._shares)

    def _left(self, waits: Array) -> float:
        """Return the share of the bound that decoding may take, for the quantile of requests to keep it."""
        if self._bound_s == inf:
            return 1.0
        if not self._longest:
            return max(1 - float(np.quantile(waits, self._constraint.quantile)) / self._bound_s, 0.0)
        low, high = 0.0, self._bound_s / self._longest
        for _ in range(SHIFT_BISECTIONS):
            middle = (low + high) / 2
            is_late = self._late(waits, middle, self._bound_s) > 1 - self._constraint.quantile
            low, high = (low, middle) if is_late else (middle, high)
        return high * self._longest / self._bound_s

    def _queue(self, servers: int, load: float) -> _Queue | None:
        """Return a queue at the next lower load that is a multiple of `LOAD_STEP`; None if it is overloaded."""
        number = int(load / LOAD_STEP)
        if number >= MOST_LOAD / LOAD_STEP:
            return None
        servers = servers if servers <= MOST_SERVERS else MANY_SERVERS
        if (servers, number) not in self._known:
            arrivals = self._arrivals / max(number * LOAD_STEP * servers, 1e-9)
            if servers == 1:
                ahead = np.cumsum(self._prompts) - self._prompts - arrivals
                waits = ahead - np.minimum.accumulate(ahead)
            elif servers == MANY_SERVERS:
                waits = np.zeros(NUM_ARRIVALS)
            else:
                few = slice(NUM_ARRIVALS_AT_SEVERAL)
                waits = np.asarray(_waits_for_one_of(servers, arrivals[few].tolist(), self._prompts[few].tolist()))
            shares = (np.quantile(times, WAIT_SHARES) for times in (waits, waits + self._prompts[: len(waits)]))
            self._known[servers, number] = _Queue(*shares)
        return self._known[servers, number]


class _Queue(NamedTuple):
    """Prompts at servers that take one after the other; times are in those of a mean prompt.

    Attributes:
        waits, first: times until a prompt begins and until it ends, for shares of all requests (`WAIT_SHARES`).
    """

    waits: Array
    first: Array


def _waits_for_one_of(servers: int, arrivals: list[float], service: list[float]) -> list[float]:
    """Return the waits of requests that the server takes which is free first (Kiefer and Wolfowitz's recursion)."""
    free, waits = [0.0] * servers, []
    for arrival, needed in zip(arrivals, service, strict=True):
        start = max(arrival, free[0])
        heapreplace(free, start + needed)
        waits.append(start - arrival)
    return waits


class PromptSteps:
    """The least time of prompts that pass all stages in steps of a token budget, one step after the other.

    A step of n tokens takes the more for each of them the smaller it is, so full steps take the least for a prompt.
    They also decode: by Little's law at least `rate E[D] t` requests, with t an iteration that decodes one. Requests in
    decode are taken to be no more clumped than independent ones (Poisson): since their prompts end one by one, they are
    less so. Where f rises and f(n) / n falls, E[f(b)] >= f(c) E[min(1, b / c)] for any c; c is 1 and the mean.

    Args:
        lane: on tables whose cost of a unit never rises (`xscheduler.lower_tables`).
        budgets: largest number of tokens of a step of one micro-batch. # [n]
    """

    def __init__(self, lane: LaneCost, lengths: Lengths, budgets: npt.ArrayLike, microbatches: int) -> None:
        self.microbatches = microbatches
        self._budgets, self._lengths, self._lane = np.asarray(budgets, float), lengths, lane
        prompts, one = lane.prompts(lengths), np.ones(1)
        # A step of few tokens has the end of a prompt and the begin of the next; their attention costs less together.
        together = np.minimum(self._budgets / lengths.mean_input + 2, prompts.points[-1])
        self._beside = lane.counts @ prompts(together) / together
        self._step: Array = lane.counts @ (lane.tokens(self._budgets) + lane.hop(self._budgets) + lane.overhead(one))
        context = lengths.mean_decode_context - (lengths.mean_input if lane.has_encoder else 0.0)
        self._attention = lane.decode_attention(context, lengths.mean_input)
        alone = lane.counts @ (lane.tokens(one) + lane.hop(one) + lane.overhead(one))
        self._alone_s = float((alone + self._decodes(one))[0])

    def at(self, rate: float) -> StepsAtRate:
        """Return what prompts take at a rate of arrivals, in requests a second of one replica."""
        if self._lane.has_encoder:
            return StepsAtRate(self._beside, self._beside, np.zeros_like(self._beside), self._alone_s)
        batch = rate / self.microbatches * self._lengths.mean_decodes * self._alone_s
        of_decodes = 0.0
        if self._lane.apart:  # the step does not decode
            batch = 0.0
        if batch > 0:
            whole = np.floor(batch)
            of_mean = 1 - np.exp(whole * np.log(batch) - batch - gammaln(whole + 1))
            shares = np.asarray([-np.expm1(-batch), of_mean])
            of_decodes = float((self._decodes(np.asarray([1.0, max(batch, 1.0)])) * shares).max())
        step_s = self._step + of_decodes
        lengths, room = self._lengths, np.maximum(self._budgets - batch, 1e-3)
        filled = np.floor(lengths.inputs / room[:, None]) @ lengths.input_probabilities
        return StepsAtRate(lengths.mean_input / room * step_s + self._beside, step_s, filled, self._alone_s)

    def _decodes(self, batch: Array) -> Array:
        """Return the seconds of decodes beyond their tokens."""
        found: Array = self._lane.counts @ (self._attention(batch) + self._lane.samples(batch))
        return found


class StepsAtRate(NamedTuple):
    """Least times at one rate, by token budget. # [n] each

    Attributes:
        prompt_s: a prompt of the mean length.
        step_s: a full step.
        steps_a_prompt: mean number of steps that a prompt fills.
        alone_s: a step that only decodes one request.
    """

    prompt_s: Array
    step_s: Array
    steps_a_prompt: Array
    alone_s: float


def _factor(lengths: Lengths, quantile: float) -> float | None:
    """Return by how much the latency bound must be loosened; None: without limit."""
    decodes, shares = _grouped(lengths.outputs - 1, lengths.output_probabilities, quantile)
    prompts, of_prompts = _evenly(lengths.inputs, lengths.input_probabilities)
    longest = float(lengths.decodes_at(quantile))
    weights = np.outer(of_prompts, shares).ravel()
    least = longest
    for ratio in RATIOS:
        work = (ratio * prompts[:, None] / lengths.mean_input + decodes).ravel()
        for spread in SPREAD:
            least = min(least, _quantile(work, weights, spread, quantile) - ratio)
    if longest <= 0:
        return 1.0 if least >= 0 else None
    return longest / least if least > 0.1 * longest else None


def _quantile(work: Array, weights: Array, spread: float, quantile: float) -> float:
    """Return the quantile of work times a normal factor of mean one and this deviation."""
    if not spread:
        order = np.argsort(work)
        reached = np.cumsum(weights[order])
        return float(work[order][min(int(np.searchsorted(reached, quantile - 1e-9)), len(work) - 1)])
    low, high = 0.0, 2.0 * float(work.max())
    scale = np.maximum(spread * work, 1e-9)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        enough = float(weights @ ndtr((middle - work) / scale)) >= quantile
        low, high = (low, middle) if enough else (middle, high)
    return low


def _grouped(values: Array, probabilities: Array, quantile: float) -> tuple[Array, Array]:
    """Return lengths that represent all, each the shortest of its group, with their shares; groups get finer towards
    the tail."""
    if len(values) <= 96:
        return values, probabilities
    tail = (1 - quantile) * np.geomspace(64.0, 1 / 64, 72)
    edges = np.unique(np.concatenate([np.linspace(0.0, 1.0, 16)[:-1], 1 - tail[tail < 1], [1.0]]))
    reached = np.concatenate([[0.0], np.cumsum(probabilities)])
    group = np.searchsorted(edges, (reached[:-1] + reached[1:]) / 2, side="right")
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    return values[starts], np.add.reduceat(probabilities, starts)


def _evenly(values: Array, probabilities: Array) -> tuple[Array, Array]:
    """Return prompts that represent all, each the shortest of a group of equal share, with their shares."""
    if len(values) <= NUM_PROMPTS:
        return values, probabilities
    group = np.minimum((np.cumsum(probabilities) * NUM_PROMPTS).astype(int), NUM_PROMPTS - 1)
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    return values[starts], np.add.reduceat(probabilities, starts)
