"""Compute upper bounds on the arrival rate at which a placement keeps its latency bounds, waiting included.

Settings that keep the bounds at rate r decode some mean number m of requests in an iteration. By Little's law, r is at
most the throughput of an engine that always decodes m requests. So the placement has settings, possibly with a
fractional batch size, whose iterations take the same mean time and whose saturated throughput is at least r. The lower
tables bound this throughput, as for the saturated objective (`xscheduler.placement_bounds`, `xscheduler.box_bounds`).
The remaining task is to bound the time of an iteration:

- A request of d decode iterations and i prompt tokens ends at least `first(i) + d t` after its arrival, where
  `first(i)` is the time to encode the prompt and t the mean time of its iterations. Waiting adds to this time. The
  quantile of all requests must keep the bound. If all prompts and all iterations took the same time, `first(mean i) +
  S_q t` would have to keep the bound, with S_q the quantile of d. In reality prompts and iterations vary. This matters
  if there are only a few distinct lengths. A long request can then keep the bound because its prompt is short or
  because it arrives at a quiet time. So the share of long requests may slightly exceed the share that may break the
  bound. Therefore `loosened` multiplies `first(i) / t + d` by a normal factor and computes the quantile of the product.
  It does so for all `RATIOS` of prompt time to iteration time and all standard deviations in `SPREAD`. The bound is
  multiplied by the ratio of S_q to the lowest of these quantiles, each taken without the time of a mean prompt. A
  distribution with a smooth tail needs no loosening.
- If prompts go through the stages one after the other in order of arrival, a request also waits for earlier prompts.
  This wait is computed for randomly drawn prompts and arrivals, by Lindley's recursion or, with several micro-batches,
  by Kiefer and Wolfowitz's recursion. A prompt takes at least the time that the slowest stage needs per prompt in its
  largest step. If any step may encode prompts (orca, chunked), a prompt takes at least its share of full steps through
  all stages (`PromptSteps`). `Waits` computes which share of the latency bound remains after these waits. The prompt's
  own way through all stages counts towards TTFT.
- If prompts have a lane of their own, short outputs need shorter iterations, since K/V is moved between their first two
  tokens (`paced`).
- If several groups encode side by side, `waits_in_groups` bounds the wait of each prompt.
- A prompt of i tokens fills at least floor(i / budget) steps, so each second has at least `rate E[floor(i / budget)]`
  full steps. Every other step takes at least as long as a step that decodes one request. This gives a lower bound on
  the mean time of an iteration without closed forms. This lower bound, the waits and the time to encode a prompt
  together show which token budgets cannot keep the latency bound.
- At saturation, the mean TTFT must keep `ttft_s` and the mean time per token must keep `tpot_s`, because a quantile of
  at least `LEAST_QUANTILE` is not below the mean. If the quantile of prompt lengths is below their mean, the bound on
  TTFT is loosened accordingly.

There are three assumptions. Iterations take the same time for requests of all lengths, since no schedule knows an
output's length in advance. The closed forms at saturation are right. The mean time of an iteration varies by at most
`SPREAD` between long requests. A search compares its simulated rates with the bound and widens the gap if a rate
exceeds the bound. `xscheduler.box_bounds.breach` tests the bound on random boxes and points inside them.
"""

from __future__ import annotations

from heapq import heapreplace
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln, ndtr

from xgpt.core.schema import Constraint
from xgpt.core.workload import gamma_arrivals
from xsimulator.costs.step_cost import LaneCost
from xsimulator.lengths import Lengths

Array = npt.NDArray[np.float64]

SPREAD = (0.0, 0.03, 0.1)
"""`loosened` tries these relative standard deviations of the mean iteration time between long requests."""
RATIOS = (0.0, 1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)
"""`loosened` tries these ratios of a mean prompt's time to a decode iteration's time."""
LEAST_QUANTILE = 0.9
"""If at least this share of the requests must keep a bound on a time, the mean time must also keep the bound."""
LENIENT = 2.0
"""Multiple of the allowed share of late requests. More break a bound whatever the fortune of a few requests."""
NUM_PROMPTS, NUM_MOVING = 24, 9
BISECTIONS = 24
NUM_ARRIVALS, NUM_ARRIVALS_AT_SEVERAL = 12_000, 4000
"""Number of randomly drawn arrivals at a queue with one server and with several. The queue is empty at first."""
NUM_WAITS = 400
"""Number of quantiles at which waits are computed. All requests between two quantiles count with the shorter wait."""
LOAD_STEP, MOST_LOAD = 0.01, 1.2
"""Waits are computed at loads that are multiples of `LOAD_STEP`, up to `MOST_LOAD`. Other loads are rounded down."""
MOST_SERVERS, MANY_SERVERS = 4, 0
"""With more than `MOST_SERVERS` micro-batches, waits are ignored, since they are short compared with the time of a
prompt. `MANY_SERVERS` means any such number.
"""
SHIFT_BISECTIONS = 14


def loosened(constraint: Constraint, lengths: Lengths) -> Constraint:
    """Return looser bounds for a saturated engine. It keeps them if arriving requests keep `constraint` at some rate.

    A bound is removed if no finite loosening is enough.
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
    return constraint.but(sla="length", latency_bound_s=latency, ttft_s=ttft, tpot_s=tpot)


def shortened(constraint: Constraint, left: float) -> Constraint:
    bound_s = constraint.latency_bound_s
    return constraint if bound_s is None else constraint.but(latency_bound_s=left * bound_s)


class Waits:
    def __init__(self, constraint: Constraint, lengths: Lengths) -> None:
        self._constraint, self._lengths = constraint, lengths
        self._bound_s, self._loose_s = constraint.allowed_latency_s, loosened(constraint, lengths).allowed_latency_s
        self._longest = float(lengths.decodes_at(constraint.quantile))
        rng = np.random.default_rng(0)
        shares = lengths.input_probabilities / lengths.input_probabilities.sum()
        self._drawn = rng.choice(len(shares), NUM_ARRIVALS, p=shares)
        self._prompts = lengths.inputs[self._drawn] / lengths.mean_input
        self._arrivals = gamma_arrivals(1.0, NUM_ARRIVALS, constraint.burstiness, rng)
        self._decodes, self._shares = _grouped(lengths.outputs - 1, lengths.output_probabilities, constraint.quantile)
        self._known: dict[tuple[int, int], _Queue] = {}

    def left(self, prompt_s: float, rate: float, through_s: Array | None = None) -> float:
        """Return an upper bound on the share of the latency bound that remains after waiting, if prompts go through the
        stages one after the other.

        Args:
            prompt_s: lower bound on the seconds of a prompt of the mean length on the slowest stage.
            through_s: lower bounds on the seconds of a prompt of each length through all stages, or None for those in
                proportion to `prompt_s`. # [lengths]
        """
        queue = self._queue(1, prompt_s * rate)
        if queue is None or not self._keep_first(self._first(queue, prompt_s, through_s)):
            return 0.0
        return self._left(queue.waits * prompt_s)

    def left_in_groups(self, groups: int, prompts: GroupTimes, rate: float) -> Array:
        """Return the same upper bound as `left` for several groups, for each size of their batches. # [sizes]"""
        alone, arrivals, left = prompts.alone_s[self._drawn], self._arrivals / max(rate, 1e-9), []
        for least_s, longest_s in zip(prompts.least_s, prompts.longest_s, strict=True):
            waits = waits_in_groups(groups, arrivals, least_s[self._drawn], alone, longest_s)
            left.append(self._left(_quantiles(waits)) if self._keep_first(alone + waits) else 0.0)
        return np.asarray(left)

    def left_by_budget(self, steps: PromptSteps, rate: float) -> Array:
        """Return the same upper bound as `left` for each token budget of a step. 0 means that the bounds cannot be
        kept. # [n]
        """
        at = steps.at(rate)
        left = np.zeros(len(at.prompt_s))
        for i, (prompt_s, step_s, prompts) in enumerate(zip(at.prompt_s, at.step_s, at.steps_a_prompt, strict=True)):
            queue = self._queue(steps.microbatches, rate * prompt_s / steps.microbatches)
            if queue is None:
                continue
            full = rate / steps.microbatches * prompts  # steps a second
            pace_s = 1 / (full + max(1 - full * step_s, 0.0) / at.alone_s)
            is_kept = self._keep_first(self._first(queue, prompt_s))
            if is_kept and self._keep(queue.first * prompt_s, max(pace_s, at.alone_s)):
                left[i] = self._left(queue.waits * prompt_s)
        return left

    def _first(self, queue: _Queue, prompt_s: float, through_s: Array | None = None) -> Array:
        own_s = self._prompts * prompt_s if through_s is None else through_s[self._drawn]
        first: Array = queue.all_waits * prompt_s + own_s[: len(queue.all_waits)]
        return first

    def _keep_first(self, first: Array) -> bool:
        bounds = self._constraint
        if bounds.ttft_s is None:
            return True
        kept = np.count_nonzero(first <= bounds.ttft_s / (1 + bounds.headroom)) / len(first)
        return bool(kept + 1 / NUM_WAITS >= (bounds.ttft_quantile or bounds.quantile))

    def _keep(self, first: Array, pace_s: float) -> bool:
        return self._loose_s == inf or self._late(first, pace_s, self._loose_s) <= 1 - self._constraint.quantile

    def _late(self, before: Array, pace_s: float, bound_s: float) -> float:
        kept = np.searchsorted(before, bound_s - self._decodes * pace_s, side="right") / len(before)
        return float(1 - kept @ self._shares)

    def _left(self, waits: Array) -> float:
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
            first = waits + self._prompts[: len(waits)]
            self._known[servers, number] = _Queue(waits, _quantiles(waits), _quantiles(first))
        return self._known[servers, number]


class _Queue(NamedTuple):
    """A queue in which each server processes one prompt at a time. The unit of time is the time of a mean prompt.

    Attributes:
        all_waits: each prompt's time until it begins. # [arrivals]
        waits, first: quantiles of this time, and of the time until a prompt ends. # [NUM_WAITS]
    """

    all_waits: Array
    waits: Array
    first: Array


def _quantiles(times: Array) -> Array:
    found: Array = np.sort(times)[:: len(times) // NUM_WAITS]
    return found


def _waits_for_one_of(servers: int, arrivals: list[float], service: list[float]) -> list[float]:
    free, waits = [0.0] * servers, []
    for arrival, needed in zip(arrivals, service, strict=True):
        start = max(arrival, free[0])
        heapreplace(free, start + needed)
        waits.append(start - arrival)
    return waits


def waits_in_groups(groups: int, arrivals_s: Array, least_s: Array, alone_s: Array, longest_s: float) -> Array:
    """Return how much later than without waiting prompts have at least their first tokens, if batches of prompts in
    order of arrival go to the first free one of several groups. # [prompts] each

    n groups have at least as much work left as one server that is n times as fast and never idle while there is work
    (Lindley's recursion). When a prompt's batch begins, all that is left of earlier prompts is in the batches of the
    other groups and in its own batch. So if w is left at its arrival, the batch begins (w - (n - 1) longest - p) / n
    later or more, where p is the work of earlier prompts in the batch. The prompt's first token follows after p + least
    and after alone, which is together the least if p = alone - least.
    """
    ahead = np.cumsum(least_s) - least_s - groups * arrivals_s
    work = ahead - np.minimum.accumulate(ahead)
    return np.maximum((work - (groups - 1) * longest_s - (alone_s - least_s)) / groups, 0.0)


def paced(constraint: Constraint, lengths: Lengths, moving_s: float, rate: float) -> Constraint:
    """Return the bounds with a tighter one on TPOT for a saturated engine whose prompts have a lane of their own.

    After a prompt has been encoded, its K/V is moved, and the request waits for the next iteration to begin. This time
    counts between its first two tokens, so short outputs need shorter iterations than the long ones whose TPOT closed
    forms predict. The wait is uniform over an iteration while the decode lane is busy, that is, except with the
    probability that no request decodes (Poisson). The bound holds for all times of moving from `moving_s` on.

    Args:
        moving_s: lower bound on the seconds to move the K/V of a prompt of the mean length.
        rate: requests a second at one replica.
    """
    longest = lengths.decodes_at(constraint.planned_quantile)
    if constraint.tpot_s is None or not longest:
        return constraint
    allowed = LENIENT * (1 - (constraint.tpot_quantile or constraint.quantile))
    decodes, shares = _grouped(lengths.outputs - 1, lengths.output_probabilities, 1 - allowed)
    prompts, of_prompts = _evenly(lengths.inputs, lengths.input_probabilities)
    most_s, share_of_mean = constraint.tpot_s / (1 + constraint.headroom), prompts / lengths.mean_input
    some = decodes > 0
    room_s = (most_s * decodes[some, None] / share_of_mean).ravel()
    order = np.argsort(room_s)
    reached = np.cumsum(np.outer(shares[some], of_prompts).ravel()[order])
    longest_s = room_s[order][min(int(np.searchsorted(reached, allowed)), len(order) - 1)]
    moving = np.linspace(moving_s, max(moving_s, longest_s), NUM_MOVING)[:, None, None]
    moved = moving * share_of_mean  # [moving, 1, prompts]
    low, high = np.zeros_like(moving), np.full_like(moving, most_s)
    for _ in range(BISECTIONS):
        step = (low + high) / 2
        left = decodes[some, None] * (most_s - step) - moved
        waits = np.clip(1 - left / step, 0.0, 1.0) * -np.expm1(-rate * lengths.mean_decodes * step)
        late = np.where(left < 0, 1.0, waits) @ of_prompts  # [moving, decodes]
        is_late = (late @ shares[some] > allowed)[:, None, None]
        low, high = np.where(is_late, low, step), np.where(is_late, step, high)
    tpot = high * (1 + 0.5 / longest) + moving / longest
    return constraint.but(tpot_s=min(constraint.tpot_s, float(tpot.max()) * (1 + constraint.headroom)))


class GroupTimes(NamedTuple):
    """Seconds of one of several groups that encode side by side.

    Attributes:
        least_s: lower bounds for a prompt of each length as a part of a batch. # [sizes, lengths]
        alone_s: lower bounds for a prompt of each length alone. # [lengths]
        longest_s: upper bounds on a batch. # [sizes]
    """

    least_s: Array
    alone_s: Array
    longest_s: Array


class PromptSteps:
    """Computes lower bounds on a prompt's time through all stages, for several token budgets of a step.

    Smaller steps take more time per token, so a prompt takes the least time in full steps. By Little's law, full steps
    also decode at least `rate E[D] t` requests, where t is the time of an iteration that decodes one request. The
    number of requests in decode is assumed to have a Poisson distribution. In reality it varies less, since prompts end
    one by one. For a time f(b) of b requests that rises with b while f(b) / b falls, E[f(b)] >= f(c) E[min(1, b / c)]
    for any c. The bound uses c = 1 and c = the mean.

    Args:
        lane: the lane's costs on the lower tables (`xscheduler.lower_tables`).
        budgets: token budgets of a step of one micro-batch. # [n]
    """

    def __init__(self, lane: LaneCost, lengths: Lengths, budgets: npt.ArrayLike, microbatches: int) -> None:
        self.microbatches = microbatches
        self._budgets, self._lengths, self._lane = np.asarray(budgets, float), lengths, lane
        prompts, one = lane.prompts(lengths), np.ones(1)
        # A step can contain the end of one prompt and the beginning of the next. Their attention costs less together.
        together = np.minimum(self._budgets / lengths.mean_input + 2, prompts.points[-1])
        self._beside = lane.counts @ prompts(together) / together
        self._step: Array = lane.counts @ (lane.tokens(self._budgets) + lane.hop(self._budgets) + lane.overhead(one))
        context = lengths.mean_decode_context - (lengths.mean_input if lane.has_encoder else 0.0)
        self._attention = lane.decode_attention(context, lengths.mean_input)
        alone = lane.counts @ (lane.tokens(one) + lane.hop(one) + lane.overhead(one))
        self._alone_s = float((alone + self._decodes(one))[0])

    def at(self, rate: float) -> StepsAtRate:
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
        found: Array = self._lane.counts @ (self._attention(batch) + self._lane.samples(batch))
        return found


class StepsAtRate(NamedTuple):
    """Lower bounds at one arrival rate, for each token budget. Times are in seconds. # [n] each"""

    prompt_s: Array
    step_s: Array
    steps_a_prompt: Array
    alone_s: float


def _factor(lengths: Lengths, quantile: float) -> float | None:
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
    if len(values) <= 96:
        return values, probabilities
    tail = (1 - quantile) * np.geomspace(64.0, 1 / 64, 72)
    edges = np.unique(np.concatenate([np.linspace(0.0, 1.0, 16)[:-1], 1 - tail[tail < 1], [1.0]]))
    reached = np.concatenate([[0.0], np.cumsum(probabilities)])
    group = np.searchsorted(edges, (reached[:-1] + reached[1:]) / 2, side="right")
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    return values[starts], np.add.reduceat(probabilities, starts)


def _evenly(values: Array, probabilities: Array) -> tuple[Array, Array]:
    if len(values) <= NUM_PROMPTS:
        return values, probabilities
    group = np.minimum((np.cumsum(probabilities) * NUM_PROMPTS).astype(int), NUM_PROMPTS - 1)
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    return values[starts], np.add.reduceat(probabilities, starts)
