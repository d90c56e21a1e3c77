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
- Where prompts pass a stage one after the other in the order of their arrival (one micro-batch, order fcfs), a request
  also waits for those before it, each of which takes the slowest stage no less than its share of the least time
  (Lindley's recursion, on drawn prompts and Poisson arrivals). `Waits.left` says how much of the bound is left, by how
  far this shifts the quantile of all requests.
- The mean time to the first token, and the mean gap, of a saturated engine must keep `ttft_s` and `tpot_s`: a quantile
  from `LEAST_QUANTILE` on is not below the mean. Prompts whose quantile is below their mean loosen the former.

Assumed are that requests of all lengths meet the same iterations (no schedule knows an output's length beforehand),
that closed forms at saturation are right, and that a mean iteration varies by no more than `SPREAD` from long request
to long request. Fluctuations, bursts of prompts above all, lower what a schedule keeps, but not this bound; so it is
loosest where few long prompts decide. What is simulated in a search is held against it, and widens the gap if it is
more; `xscheduler.box_bounds.breach` draws boxes and points inside them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from xgpt.core.schema import Constraint
from xgpt.core.workload import gamma_arrivals
from xsimulator.lengths import Lengths

Array = npt.NDArray[np.float64]

SPREAD = (0.0, 0.03, 0.1)
"""Relative standard deviations of the mean iteration that a long request meets."""
RATIOS = (0.0, 1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)
"""Times of a mean prompt over that of a decode iteration."""
LEAST_QUANTILE = 0.9
"""Least share of requests that must keep a bound for its mean to have to keep it."""
NUM_PROMPTS = 24
"""Prompts that stand for all."""
BISECTIONS = 24
NUM_ARRIVALS = 12_000
"""Drawn arrivals, from an empty engine on."""
WAIT_SHARES = np.linspace(0.0, 1.0, 401)[:-1]
"""Shares of requests, each of which waits for the shortest time of its group."""
LEAST_LEFT = 0.02
"""Least share of a bound that is left."""


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
        self._bound_s, self._quantile = constraint.latency_bound_s, constraint.quantile
        self._lengths, self._longest = lengths, float(lengths.decodes_at(constraint.quantile))
        rng = np.random.default_rng(0)
        shares = lengths.input_probabilities / lengths.input_probabilities.sum()
        self._prompts = rng.choice(lengths.inputs, NUM_ARRIVALS, p=shares) / lengths.mean_input
        self._gaps = np.diff(gamma_arrivals(1.0, NUM_ARRIVALS, constraint.burstiness, rng), prepend=0.0)
        self._decodes, self._shares = _grouped(lengths.outputs - 1, lengths.output_probabilities, self._quantile)

    def left(self, prompt_s: float, rate: float) -> float:
        """Return the share of the latency bound that waiting leaves at most.

        Args:
            prompt_s: least seconds of a prompt of the mean length on the slowest stage.
            rate: requests a second of one replica.
        """
        if self._bound_s is None:
            return 1.0
        steps = self._prompts * prompt_s - np.append(self._gaps[1:], 0.0) / rate
        total = np.concatenate([[0.0], np.cumsum(steps)])[:-1]
        wait: Array = np.quantile(total - np.minimum.accumulate(total), WAIT_SHARES)
        return max((self._bound_s - self._shift(wait)) / self._bound_s, LEAST_LEFT)

    def _shift(self, wait: Array) -> float:
        """Return by how many seconds less than the bound decoding takes, for the quantile of requests to keep it."""
        assert self._bound_s is not None
        if not self._longest:
            return float(np.quantile(wait, self._quantile))
        low, high = 0.0, self._bound_s / self._longest
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            late = (wait[:, None] + self._decodes * middle > self._bound_s).mean(axis=0) @ self._shares
            low, high = (low, middle) if late > 1 - self._quantile else (middle, high)
        return self._bound_s - high * self._longest


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
    """Return lengths that stand for all, each the shortest of its group, finer towards the tail, and their shares."""
    if len(values) <= 96:
        return values, probabilities
    tail = (1 - quantile) * np.geomspace(64.0, 1 / 64, 72)
    edges = np.unique(np.concatenate([np.linspace(0.0, 1.0, 16)[:-1], 1 - tail[tail < 1], [1.0]]))
    reached = np.concatenate([[0.0], np.cumsum(probabilities)])
    group = np.searchsorted(edges, (reached[:-1] + reached[1:]) / 2, side="right")
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    return values[starts], np.add.reduceat(probabilities, starts)


def _evenly(values: Array, probabilities: Array) -> tuple[Array, Array]:
    """Return prompts that stand for all, each the shortest of an equal share, and their shares."""
    if len(values) <= NUM_PROMPTS:
        return values, probabilities
    group = np.minimum((np.cumsum(probabilities) * NUM_PROMPTS).astype(int), NUM_PROMPTS - 1)
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    return values[starts], np.add.reduceat(probabilities, starts)
