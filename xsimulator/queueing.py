"""Compute in closed form the share of requests that keep their bounds at a given arrival rate, waiting included.

The number k of requests in the system is modelled as a birth-death process. Requests arrive at rate r, and leave at the
throughput X(k) of the schedule with k requests, or at X(n) if k exceeds the number n of slots:

    log P(k) = sum_{j<=k} log(r / X(j)) / z + constant,   z = (1 + 1)/2 up to n + 1,  (1 + s^2)/2 beyond,

where s is the coefficient of variation of the time for which a request occupies a slot. If slots become free together,
after a phase or a batch, s = 0. A request that arrives when k others are in the system spends, one after the other,

- the time until the next step that may admit it, uniform over the time between two such steps;
- the wait for prompts ahead, if prompts have an encode lane of their own or, under a bound on TTFT, if one step of many
  admits a batch. It is that of an M/G/n queue for the lane's n groups (1 for a pipeline and for batches): there is none
  with probability 1 - C(n, u), and else P(W > w) = exp(-2 n (1 - u) w / (s (1 + c^2))) for prompts that take s, with
  coefficient of variation c. C is Erlang's, the share of arrivals that find all groups busy if each is busy for the
  share u of the time. A lane admits a prompt at once, and a batch of b prompts in a cycle T takes s = T / b for each;
- if all n slots are taken, the wait for a slot, exponentially distributed since the tail of P is geometric;
- its running time, with the step times of the schedule with k + 1 requests.

Up to n, the model is exact for Poisson arrivals and processor sharing, whatever the distribution of running times.
Beyond n, the model uses the variance of the diffusion approximation. Requests wait in order of arrival. Sources: Kelly
1979, ch. 3; Whitt 1993 for z; Lee and Longton 1959 for n groups.

The throughput with k requests is the throughput of a saturated batch of size k, so one curve of batch sizes serves for
every largest batch size on the curve.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from xgpt.core.schema import Goal
from xsimulator.forecast import Performance
from xsimulator.forecast.base import Stations
from xsimulator.forecast.lane_balance import share_waiting
from xsimulator.lengths import Lengths, parts_of

Array = npt.NDArray[np.float64]

NUM_LOADS = 16
FEW_STATES = 24
"""Up to this number of requests in the system, each number is a state. Beyond it, the distance between states grows."""
NUM_STATES = 72
RATE_STEPS = 14
"""Number of bisection steps for a rate. They determine the rate to a ten-thousandth of the throughput at saturation."""
LENGTH_EDGES = np.unique(np.concatenate([np.linspace(0, 0.9, 13), np.linspace(0.9, 0.98, 9), np.linspace(0.98, 1, 11)]))
"""Quantiles that divide output lengths into groups. The mean represents each group."""

LANE_LOADS = np.asarray([0.0, 0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.88, 0.94, 1.0])
DRAINS = np.asarray([0.0, 0.15, 0.4, 0.8, 1.4, 2.0, 4.0, 10.0, 40.0])
"""Rates at which the wait for prompts ahead ends, if one step of many admits a batch. The unit of time is that between
two such steps.
"""

P99_DEVIATE = 2.33
INPUT_EDGES = np.asarray([0.0, 0.35, 0.65, 0.85, 0.95, 0.99, 1.0])
TTFT_EDGES = np.union1d(INPUT_EDGES, [0.75, 0.9, 0.97, 0.98, 0.985, 0.995])
"""Under a bound on TTFT, the longest prompts decide, so their groups are smaller."""


class LoadPoints(NamedTuple):
    """Points of curves, with everything that does not depend on arrival rate. # [n] or [n, groups], unless stated

    Attributes:
        work: for each state k, the sum_{j<=k} log X(j). # [n, states]
        late_at: for each state k, the share of late requests among those that run with k others. If there is an encode
            lane, for each of `LANE_LOADS`. If one step of many admits a batch, that of those that find no prompt ahead,
            and of the others for each of `DRAINS`. # [n, states, 1, lane loads or 1 + drains]
        ahead_s: seconds until one more prompt is admitted. # [n, states]
        drain: rate at which the wait for prompts ahead ends, divided by the share of time in which there is none.
            # [n, states]
        log_width: log of the count of numbers of requests that each state represents. # [n, states]
        last, share: the last state below n - 1, and the position of n - 1 between this state (0) and the next one (1).
        spread: (1 + s^2) / 2, with the coefficient of variation s of running times.
        gate: longest wait, in s, for the next step that may admit requests. # [n, 1]
        inside, beyond: the time that remains for waiting, in two parts: the part up to `gate`, and the rest.
    """

    saturation: Array
    work: Array
    late_at: Array
    ahead_s: Array
    drain: Array
    log_width: Array
    last: npt.NDArray[np.intp]
    share: Array
    spread: Array
    slow: Array
    is_late: npt.NDArray[np.bool_]
    gate: Array
    inside: Array
    beyond: Array

    def late_at_rate(self, rate: Array, *, has_lane: bool) -> Array:
        if self.late_at.shape[-1] == 1:
            return self.late_at[..., 0]
        busy = np.minimum(rate[:, None] * self.ahead_s, 1.0)
        if has_lane:
            return _between(self.late_at, LANE_LOADS, busy)
        at_once = self.late_at[..., 0]
        behind = _between(self.late_at[..., 1:], DRAINS, np.minimum((1 - busy) * self.drain, DRAINS[-1]))
        late: Array = at_once + busy * (behind - at_once)
        return late

    def longer(self, drain: Array) -> Array:
        """Return the probability that a request waits too long for its admission.

        The wait is a time uniform between 0 and `gate` plus an exponential time with rate `drain`.
        """
        beyond, inside, gate = self.beyond, self.inside, self.gate
        late = 1 - inside / gate + (np.exp(-drain * beyond) - np.exp(-drain * (beyond + inside))) / (gate * drain)
        return np.where(self.is_late, 1.0, late)

    def take(self, rows: npt.NDArray[np.intp]) -> LoadPoints:
        return LoadPoints._make(values[rows] for values in self)


class LoadCurves:
    """Curves of one policy's candidates. Along each curve the batch grows, and every point is a candidate.

    Args:
        headroom: relative excess of step times over the predictions that must not break the bounds.
    """

    def __init__(
        self,
        stations: Stations,
        found: Performance,
        lengths: Lengths,
        goal: Goal,
        headroom: float = 0.0,
        num_loads: int = NUM_LOADS,
        groups: int = 1,
    ) -> None:
        self._allowed = 1 - goal.quantile
        self._decodes, self._prompts, self._shares = _representatives(lengths, is_fine=goal.ttft_s is not None)
        shape = (-1, num_loads)
        ttft, tpot, throughput = (curve.reshape(shape) for curve in (found.ttft, found.tpot, found.throughput))
        self._ttft, self._tpot, self._gate = ttft, tpot, np.maximum(found.gate.reshape(shape), 1e-12)
        self._prompt_s, self._batch = (each.reshape(shape) for each in (found.prompt_s, found.encode_batch))
        self._has_lane, self._groups = stations.has_encode_lane, groups
        self._has_prompts_ahead = self._has_lane or (goal.ttft_s is not None and not stations.admits_each_step)
        own = np.minimum(found.encode_batch * found.prompt_s / found.ttft, 1.0)
        spread = 1 + (own**2 * (lengths.mean_square_input / lengths.mean_input**2 - 1)).reshape(shape)
        self._drain: Array = 2 / spread
        self._ahead_s: Array = self._gate / self._batch if self._has_lane else self._gate
        # The throughput of a schedule never falls with a larger batch. If it falls in the closed form, rounding is the
        # reason.
        self.saturation: Array = np.maximum.accumulate(throughput, axis=1)
        stay = ttft + tpot * lengths.mean_decodes
        self._inside = np.maximum.accumulate(np.maximum(self.saturation * stay, 1.0), axis=1)
        self._set_bounds(goal, 1 + headroom, (found.itl_p99 - found.tpot).reshape(shape))
        self._set_states()
        self._stay_variation = np.zeros_like(stay)
        if not stations.frees_together:
            stays = self._first + tpot[..., None] * self._decodes
            self._stay_variation = np.maximum((stays**2 @ self._shares) / (stays @ self._shares) ** 2 - 1, 0.0)

    def _set_bounds(self, goal: Goal, longer: float, beyond: Array) -> None:
        """Compute the time that each bound leaves for waiting, and the share that break a bound without waiting."""
        self._first: Array = self._ttft[..., None] + self._prompt_s[..., None] * (self._prompts - 1)
        left = np.full((*self._ttft.shape, len(self._decodes)), np.inf)
        if goal.latency_bound_s is not None:
            left = goal.latency_bound_s / longer - self._first - self._tpot[..., None] * self._decodes
        if goal.ttft_s is not None:
            left = np.minimum(left, goal.ttft_s / longer - self._first)
        self._left: Array = left
        self._slow: Array = np.zeros(left.shape)
        """Share of requests whose mean gap between tokens breaks its bound. In short outputs, the mean gap varies
        more.
        """
        if goal.tpot_s is not None:
            deviation = np.maximum(beyond / P99_DEVIATE, 1e-9)[..., None]
            room = (goal.tpot_s / longer - self._tpot)[..., None] * np.sqrt(self._decodes) / deviation
            self._slow = np.where(self._decodes > 0, 1 - ndtr(room), 0.0)
        lates = [(self._slow + (1 - self._slow) * late) @ self._shares for late in self._late_after(left)]
        self._late: Array = np.stack(lates, axis=-1)
        """# [curves, loads, 1, lane loads or 1 + drains]"""

    def _late_after(self, left: Array) -> Iterator[Array]:
        if self._has_lane:
            decay = (self._drain / self._ahead_s)[..., None] * np.clip(left, 0.0, 1e12)
            for load in LANE_LOADS:
                yield np.where(left < 0, 1.0, share_waiting(self._groups, load) * np.exp(-(1 - load) * decay))
            return
        gate = self._gate[..., None]
        at_once = np.clip(1 - left / gate, 0.0, 1.0)
        yield at_once
        if self._has_prompts_ahead:
            yield np.ones_like(left)
            inside, beyond = np.clip(left / gate, 0.0, 1.0), np.maximum(left / gate - 1, 0.0)
            for drain in DRAINS[1:]:
                yield at_once + (np.exp(-drain * beyond) - np.exp(-drain * (beyond + inside))) / drain

    def _set_states(self) -> None:
        """Choose the numbers k of requests to evaluate. For each, compute sum_{j<=k} log X(j), and the share of late
        requests while k + 1 are in the system.
        """
        most = max(int(np.ceil(self._inside.max())), 2)
        few = np.arange(min(FEW_STATES, most))
        many = np.geomspace(FEW_STATES, max(most, FEW_STATES), NUM_STATES - FEW_STATES)
        self._states = np.unique(np.minimum(np.concatenate([few, np.round(many)]), most).astype(int))
        ks = np.arange(1, most + 1)
        self._work = np.empty((len(self._inside), len(self._states)))
        self._late_at = np.empty((*self._work.shape, self._late.shape[-1]))
        self._ahead_s_at, self._drain_at = np.empty((2, *self._work.shape))
        for i, (inside, throughput) in enumerate(zip(self._inside, self.saturation, strict=True)):
            rates = np.where(ks < inside[0], throughput[0] * ks / inside[0], np.interp(ks, inside, throughput))
            total = np.concatenate([[0.0], np.cumsum(np.log(np.maximum(rates, 1e-300)))])
            self._work[i] = total[self._states]
            self._ahead_s_at[i] = np.interp(self._states + 1, inside, self._ahead_s[i])
            self._drain_at[i] = np.interp(self._states + 1, inside, self._drain[i])
            for j in range(self._late.shape[-1]):
                self._late_at[i, :, j] = np.interp(self._states + 1, inside, self._late[i, :, j])

    def points(self, curves: npt.NDArray[np.intp], loads: npt.NDArray[np.intp]) -> LoadPoints:
        places = np.maximum(np.round(self._inside[curves, loads]), 1.0)
        # Each state represents all numbers up to the next state, but no number from n on.
        width = np.clip(np.minimum(np.append(self._states[1:], np.inf), places[:, None]) - self._states, 0.0, None)
        with np.errstate(divide="ignore"):
            log_width = np.where(width > 0, np.log(width), -np.inf)
        index = np.clip(np.searchsorted(self._states, places - 1, side="right") - 1, 0, len(self._states) - 2)
        before, after = self._states[index], self._states[index + 1]
        left, gate = self._left[curves, loads], self._gate[curves, loads][:, None]
        inside = np.clip(left, 0.0, gate)
        batch = np.ones_like(gate) if self._has_lane else self._batch[curves, loads][:, None]
        return LoadPoints(
            saturation=self.saturation[curves, loads],
            work=self._work[curves],
            late_at=self._late_at[curves],
            ahead_s=self._ahead_s_at[curves] / batch,
            drain=self._drain_at[curves] * batch,
            log_width=log_width,
            last=index,
            share=np.clip((places - 1 - before) / (after - before), 0.0, 1.0),
            spread=np.maximum((1 + self._stay_variation[curves, loads]) / 2, 1e-3),
            slow=self._slow[curves, loads],
            is_late=left < 0,
            gate=gate,
            inside=inside,
            beyond=np.maximum(left - gate, 0.0),
        )

    def late(self, points: LoadPoints, rate: Array) -> Array:
        """Return the share of requests that break a bound at each point's arrival rate (1 beyond saturation). # [n]"""
        at = self._at(points, rate)
        return np.where(rate < points.saturation, at.late(self._longer(points, at.drain)), 1.0)

    def keeps(self, points: LoadPoints, rate: Array) -> npt.NDArray[np.bool_]:
        """Return whether enough requests keep the bounds at each point's arrival rate. # [n]"""
        at = self._at(points, rate)
        stable = rate < points.saturation
        keeps: npt.NDArray[np.bool_] = stable & (at.late(1.0) <= self._allowed)
        unsure = np.flatnonzero(stable & ~keeps & (at.late(0.0) <= self._allowed))
        if len(unsure):
            late = self._longer(points.take(unsure), at.drain[unsure])
            keeps[unsure] = at.take(unsure).late(late) <= self._allowed
        return keeps

    def _at(self, points: LoadPoints, rate: Array) -> _AtRate:
        saturation, rows = points.saturation, np.arange(len(rate))
        rate = np.minimum(rate, (1 - 1e-6) * saturation)
        log_p = self._states * np.log(rate)[:, None] - points.work
        log_load = np.log(rate / saturation)
        decay = log_load / points.spread
        last = log_p[rows, points.last] * (1 - points.share) + log_p[rows, points.last + 1] * points.share
        log_p += points.log_width
        tail = last + log_load - np.log(-np.expm1(decay))
        top = np.maximum(log_p.max(axis=1), tail)
        p, tail = np.exp(log_p - top[:, None]), np.exp(tail - top)
        late = (p * points.late_at_rate(rate, has_lane=self._has_lane)).sum(axis=1)
        return _AtRate(late, tail, p.sum(axis=1) + tail, -decay * saturation)

    def _longer(self, points: LoadPoints, drain: Array) -> Array:
        late = points.longer(drain[:, None])
        found: Array = (points.slow + (1 - points.slow) * late) @ self._shares
        return found

    def keep_alone(self) -> npt.NDArray[np.bool_]:
        """Return on which curves enough requests keep the bounds if each is alone. # [curves, 1]"""
        found: npt.NDArray[np.bool_] = self._late[:, :1, 0] <= self._allowed
        return found


class _AtRate(NamedTuple):
    """Points at their arrival rates. # [n] each

    Attributes:
        inside, tail, total: weights of late requests that find a free slot, of those that find none, and of all.
        drain: rate of the exponential wait for a slot.
    """

    inside: Array
    tail: Array
    total: Array
    drain: Array

    def late(self, waiting: Array | float) -> Array:
        return (self.inside + self.tail * waiting) / self.total

    def take(self, rows: npt.NDArray[np.intp]) -> _AtRate:
        return _AtRate(*(values[rows] for values in self))


def highest_rates(
    curves: Sequence[LoadCurves],
    at_least: float = 0.0,
    wanted: npt.NDArray[np.bool_] | None = None,
    *,
    only_best: bool = False,
) -> Array:
    """Return for each point the highest rate at which enough requests keep the bounds of all goals, or 0.
    # [curves, loads]

    Args:
        curves: the same curves under each goal.
        at_least: points that are saturated at this rate are left out.
        wanted: the points to compute. None means all. # [curves, loads]
        only_best: whether only the highest rate is exact. The others are then lower bounds.
    """
    saturation = curves[0].saturation
    able = (saturation > at_least) & np.logical_and.reduce([one.keep_alone() for one in curves])
    places = np.nonzero(able if wanted is None else able & wanted)
    of_goals = [one.points(*places) for one in curves]
    low, high = np.zeros(len(places[0])), saturation[places]
    open_ = np.arange(len(low))
    for _ in range(RATE_STEPS):
        if only_best and len(open_):
            is_open = high[open_] >= low.max()
            if 2 * is_open.sum() <= len(open_):
                open_, of_goals = open_[is_open], [points.take(np.flatnonzero(is_open)) for points in of_goals]
        middle = (low[open_] + high[open_]) / 2
        keeps = np.logical_and.reduce([one.keeps(points, middle) for one, points in zip(curves, of_goals, strict=True)])
        low[open_], high[open_] = np.where(keeps, middle, low[open_]), np.where(keeps, high[open_], middle)
    found = np.zeros_like(saturation)
    found[places] = low
    return found


@lru_cache(maxsize=8)
def _representatives(lengths: Lengths, *, is_fine: bool) -> tuple[Array, Array, Array]:
    """Return the numbers of decodes of representative requests, the lengths of their prompts relative to the mean
    prompt, and their shares of all requests.
    """
    decodes, of_decodes = parts_of(lengths.outputs - 1, lengths.output_probabilities, LENGTH_EDGES)
    edges = TTFT_EDGES if is_fine else INPUT_EDGES
    inputs, of_inputs = parts_of(lengths.inputs, lengths.input_probabilities, edges)
    shares = np.outer(of_decodes, of_inputs).ravel()
    return np.repeat(decodes, len(inputs)), np.tile(inputs / lengths.mean_input, len(decodes)), shares


def _between(values: Array, grid: Array, at: Array) -> Array:
    """Return values that are known on a grid, interpolated at other points. # [n, states, grid], [n, states]"""
    index = np.minimum(grid.searchsorted(at, side="right"), len(grid) - 1)
    low, high = (np.take_along_axis(values, one[..., None], axis=2)[..., 0] for one in (index - 1, index))
    found: Array = low + (high - low) * (at - grid[index - 1]) / (grid[index] - grid[index - 1])
    return found
