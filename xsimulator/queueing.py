"""Latency under load: what a request takes from its arrival on, waiting included, in closed form.

The number of requests inside is taken for a birth-death process: arrivals at rate r, departures at the throughput X(k)
that the schedule has with batches of k requests, and at X(n) while more than the n that it takes are there:

    log P(k) = sum_{j<=k} log(r / X(j)) / z + constant,   z = (c^2 + 1)/2 up to n + 1,  (c^2 + s^2)/2 beyond,

with c the coefficient of variation of the gaps between arrivals (Poisson: 1) and s that of the time that a place is
held: 0 where places are free again together, after a phase or a batch. A request that meets k others takes in turn

- the time to the next step that may admit it, uniform over the time between two such steps;
- where all n places are taken, the wait for one: exponential, for the tail of P is geometric;
- its time inside, at the pace that the schedule has with k + 1 requests.

Exact for Poisson arrivals and processor sharing up to n (z = 1: the stay's distribution does not matter); elsewhere the
diffusion's variance. Sources: Kelly 1979, ch. 3; Whitt 1993 for z. Requests wait in order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xgpt.schema.step_log import StepRecord
from xsimulator.analytic import Performance
from xsimulator.lengths import Lengths

Array = npt.NDArray[np.float64]
Evaluate = Callable[..., Performance]
"""(kind, **columns of control variables) -> predictions at saturation, one entry a candidate."""

BATCH_VARIABLE = {
    "rra": "encode_batch",
    "orca": "max_batch",
    "chunked": "max_batch",
    "static": "batch",
    "waa": "max_decode_batch",
}
"""The control variable that shrinks under light load."""

NUM_LOADS = 16
"""Batches at which a candidate is evaluated, from one request up to its own."""

FREED_TOGETHER = ("rra", "static")
"""Policies whose places are free again together: after a phase, after a batch."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a vector of candidates does at one arrival rate.

    Attributes:
        utilisation: arrival rate over throughput at saturation.
        whole: quantile over requests of the time from arrival to the last token, s; infinite beyond saturation.
        wait: mean wait for admission, s.
        ttft: mean time from arrival to the first token, s.
        tpot: mean gap between tokens, s.
    """

    utilisation: Array
    whole: Array
    wait: Array
    ttft: Array
    tpot: Array


class Queue:
    """Candidates of one policy under any load.

    Args:
        evaluate: the closed form.
        columns: the candidates' control variables, one entry each.
    """

    def __init__(self, evaluate: Evaluate, lengths: Lengths, kind: str, **columns: npt.ArrayLike) -> None:
        values = {name: np.atleast_1d(np.asarray(column, float)) for name, column in columns.items()}
        batch = values[BATCH_VARIABLE[kind]]
        # Geometric from 1 to the candidate's own batch. # [candidates, loads]
        batches = np.maximum(batch, 1.0)[:, None] ** np.linspace(0.0, 1.0, NUM_LOADS)
        repeated = {name: np.repeat(column, NUM_LOADS) for name, column in values.items()}
        repeated[BATCH_VARIABLE[kind]] = batches.ravel()
        found = evaluate(kind, **repeated)
        self._decodes: Array = lengths.outputs - 1
        self._probabilities = lengths.output_probabilities
        self._ttft, self._tpot, self._gate, throughput = (
            values.reshape(batches.shape) for values in (found.ttft, found.tpot, found.cycle, found.throughput)
        )
        # A schedule never serves less with a larger batch: where the closed form says so, it is by rounding.
        throughput = np.maximum.accumulate(throughput, axis=1)
        self.saturation: Array = throughput[:, -1]
        """Requests a second at most, [candidates]."""
        stay = self._ttft + self._tpot * float(self._probabilities @ self._decodes)
        inside = np.maximum.accumulate(np.maximum(throughput * stay, 1.0), axis=1)
        self._places = np.maximum(np.round(inside[:, -1]), 1).astype(int)
        self._work, self._share = _states(throughput, inside, self._places)
        if kind in FREED_TOGETHER:
            self._stay_variation = np.zeros_like(batch)
        else:
            stays = self._ttft[:, -1:] + self._tpot[:, -1:] * self._decodes  # [candidates, lengths]
            square = stays**2 @ self._probabilities
            self._stay_variation = np.maximum(square / (stays @ self._probabilities) ** 2 - 1, 0.0)

    def at(self, rate: npt.ArrayLike, quantile: float, cv: float = 1.0) -> Loaded:
        """Predict at an arrival rate, one for all candidates or one each.

        Args:
            quantile: over requests, of the whole time.
            cv: coefficient of variation of the gaps between arrivals.
        """
        rate = np.broadcast_to(np.asarray(rate, float), self.saturation.shape)
        utilisation = rate / self.saturation
        stable = utilisation < 1
        met, queued, drain = self._met(np.minimum(rate, (1 - 1e-6) * self.saturation), cv)

        stay = self._ttft[..., None] + self._tpot[..., None] * self._decodes  # [candidates, loads, lengths]
        full, full_gate = stay[:, -1], self._gate[:, -1:]
        low = np.zeros_like(utilisation)
        high = stay.max(axis=(1, 2)) + self._gate.max(axis=1) + np.log(1e6) / drain
        for _ in range(40):
            middle = (low + high) / 2
            late = np.clip(1 - (middle[:, None, None] - stay) / self._gate[..., None], 0.0, 1.0)
            beyond = np.einsum("cl,cls,s->c", met, late, self._probabilities)
            late = _longer(middle[:, None] - full, full_gate, drain[:, None])
            beyond = beyond + queued * (late @ self._probabilities)
            low, high = np.where(beyond > 1 - quantile, middle, low), np.where(beyond > 1 - quantile, high, middle)
        wait = (met * self._gate).sum(axis=1) / 2 + queued * (full_gate[:, 0] / 2 + 1 / drain)
        ttft = wait + (met * self._ttft).sum(axis=1) + queued * self._ttft[:, -1]
        return Loaded(
            utilisation=utilisation,
            whole=np.where(stable, high, np.inf),
            wait=np.where(stable, wait, np.inf),
            ttft=np.where(stable, ttft, np.inf),
            tpot=(met * self._tpot).sum(axis=1) + queued * self._tpot[:, -1],
        )

    def max_rate(self, bound_s: float, quantile: float, cv: float = 1.0) -> Array:
        """The highest arrival rate at which the quantile of the whole time keeps the bound; 0 where none does."""
        low, high = np.zeros_like(self.saturation), self.saturation.copy()
        for _ in range(20):
            middle = (low + high) / 2
            keeps = self.at(middle, quantile, cv).whole <= bound_s
            low, high = np.where(keeps, middle, low), np.where(keeps, high, middle)
        return np.where(low < 1e-4 * self.saturation, 0.0, low)

    def _met(self, rate: Array, cv: float) -> tuple[Array, Array, Array]:
        """What an arrival meets: P(each load) where there is room, P(none is), and the rate at which such waits end."""
        others = np.arange(self._work.shape[1])
        log_p = (others * np.log(rate)[:, None] - self._work) / ((cv**2 + 1) / 2)
        log_p = np.where(others < self._places[:, None], log_p, -np.inf)
        log_load = np.log(rate / self.saturation)
        decay = log_load / np.maximum((cv**2 + self._stay_variation) / 2, 1e-3)
        last = np.take_along_axis(log_p, self._places[:, None] - 1, axis=1)[:, 0]
        tail = last + log_load / ((cv**2 + 1) / 2) - np.log(-np.expm1(decay))
        top = np.maximum(log_p.max(axis=1), tail)
        p, tail = np.exp(log_p - top[:, None]), np.exp(tail - top)
        total = p.sum(axis=1) + tail
        met = np.einsum("ck,ckl->cl", p, self._share) / total[:, None]
        return met, tail / total, -decay * self.saturation


def _states(throughput: Array, inside: Array, places: npt.NDArray[np.int_]) -> tuple[Array, Array]:
    """sum_{j<=k} log X(j) for k = 0 .. n-1 requests inside, and how much of each load k + 1 requests are.

    Args:
        throughput, inside: at each load, and the mean number of requests inside then, [candidates, loads].

    Returns:
        [candidates, states] and [candidates, states, loads].
    """
    num_candidates, num_loads = throughput.shape
    states = np.arange(1, places.max() + 1)
    work = np.empty((num_candidates, len(states)))
    share = np.zeros((num_candidates, len(states), num_loads))
    for c in range(num_candidates):
        x, y = inside[c], throughput[c]
        rates = np.where(states < x[0], y[0] * states / x[0], np.interp(states, x, y))
        work[c] = np.concatenate([[0.0], np.cumsum(np.log(rates))[:-1]])
        above = np.clip(np.searchsorted(x, states), 1, num_loads - 1)
        part = np.clip((states - x[above - 1]) / np.maximum(x[above] - x[above - 1], 1e-12), 0.0, 1.0)
        share[c, states - 1, above] = part
        share[c, states - 1, above - 1] += 1 - part
    return work, share


def _longer(x: Array, gate: Array, drain: Array) -> Array:
    """P(uniform wait up to `gate` and an exponential one at rate `drain` take longer than x)."""
    inside, beyond = np.clip(x, 0.0, gate), np.maximum(x - gate, 0.0)
    late = 1 - inside / gate + (np.exp(-drain * beyond) - np.exp(-drain * (beyond + inside))) / (gate * drain)
    return np.where(x < 0, 1.0, late)


def whole_times(log: Sequence[StepRecord], skip_requests: int = 0) -> Array:
    """Seconds from arrival to the last token of each request, in the order of their ends, simulated or real."""
    arrived = {arrival.id: arrival.arrival_ns for record in log for arrival in record.arrivals}
    times = [record.end_ns - arrived[id_] for record in log for id_ in record.finished]
    return np.asarray(times[skip_requests:], float) / 1e9


def verified_max_rate(
    whole: Callable[[float], float], predicted: float, saturation: float, bound_s: float, precision: float = 0.02
) -> float:
    """The highest arrival rate that keeps the bound in simulation, searched for around the predicted one.

    Args:
        whole: the quantile of the whole time in a simulation at a rate; its requests are the same at every rate.
        precision: relative, of the rate.

    Returns:
        0 where the bound is not kept even at a hundredth of the saturation.
    """
    low, high = 0.0, saturation
    rate, step = min(max(predicted, 0.01 * saturation), 0.99 * saturation), 2 * precision
    while high - low > precision * high and high > 0.01 * saturation:
        if whole(rate) <= bound_s:
            low = rate
            rate = min(rate * (1 + step), (rate + high) / 2)
        else:
            high = rate
            rate = max(rate * (1 - step), (rate + low) / 2)
        step *= 2
        if low > 0 and high < saturation:
            rate = (low + high) / 2
    return low
