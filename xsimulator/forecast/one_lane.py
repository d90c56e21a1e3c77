"""Compute the times of steps of one lane under one workload, for the closed forms of single-lane policies.

The closed forms make four assumptions. Requests always wait. Input and output lengths are independent. Every iteration
takes the time of its mean composition. The steps of a micro-batch follow each other through the stages as in
xsimulator.forecast.pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from xgpt.core.policies.rule import ADJUSTMENT
from xsimulator.costs.curves import Array, ContextTable, Table
from xsimulator.costs.step_cost import LaneCost
from xsimulator.forecast.base import upper_deviate
from xsimulator.forecast.pipeline import Pipeline
from xsimulator.lengths import Lengths

T = TypeVar("T")


class OneLaneModel:
    """The times of steps of one lane under one workload. Forecasts of single-lane policies read them.

    Args:
        all_requests: whether to report the quantile of all requests' latencies. Under rra and static, this is the
            latency of a request whose output length is at the quantile, since longer outputs always take longer.
    """

    def __init__(self, lane: LaneCost, lengths: Lengths, quantile: float = 0.99, *, all_requests: bool = False) -> None:
        self.lane = lane
        self.lengths = lengths
        self.pipeline = Pipeline(self.lane)
        self.quantile_decodes = lengths.decodes_at(quantile)
        self.of_all = AllRequests(lengths, quantile) if all_requests else None
        self.self_context = 0.0 if self.lane.has_encoder else lengths.mean_whole_input
        """Number of tokens to which self-attention attends before the first output token."""
        self._made: dict[Callable[[OneLaneModel], Any], Any] = {}

    def part(self, make: Callable[[OneLaneModel], T]) -> T:
        if make not in self._made:
            self._made[make] = make(self)
        return cast(T, self._made[make])

    @cached_property
    def encode_table(self) -> Table:
        """Seconds of a step that only encodes whole prompts, by number of prompts. The functions give, in order, the
        seconds on each kind of stage without hops, through all stages with hops, from each end of a run of equal stages
        on with hops, and the latter without hops.
        """
        hop, alone = self.lane.hop, self.lane.encode(self.lengths)
        whole = alone + Table(hop.points / self.lengths.mean_input, hop.values)
        alone, after = Table(whole.points, alone(whole.points)), self.pipeline.after
        sums = [self.pipeline.counts[None] @ whole.values, after @ whole.values, after @ alone.values]
        return Table(whole.points, np.concatenate([alone.values, *sums]))

    def prompt_s(self, prompts: Array) -> Array:
        """Return the seconds by which a step that encodes whole prompts takes longer with one more prompt."""
        through = len(self.lane.kinds)
        found: Array = np.maximum(self.encode_table(prompts + 1)[through] - self.encode_table(prompts)[through], 0.0)
        return found

    @cached_property
    def decode_table(self) -> ContextTable:
        """Seconds of a step that only decodes, by number of requests and their context: without hops on each kind of
        stage, with hops through all stages, and with hops on each kind. # 2 kinds + 1 functions
        """
        lane, longest = self.lane, len(self.lengths.survival) + 1
        contexts = lane.contexts_between(self.self_context, self.self_context + longest)
        alone, hop = lane.decode(contexts, self.lengths.mean_input), lane.hop
        whole = alone + Table(hop.points, np.repeat(hop.values[:, None], len(contexts), axis=1))
        through = self.pipeline.all_stages(whole.values)[None]
        return ContextTable(whole.points, contexts, np.concatenate([alone(whole.points), through, whole.values]))


DEVIATES = np.asarray([-np.sqrt(3.0), 0.0, np.sqrt(3.0)])[:, None, None]
WEIGHTS = np.asarray([1 / 6, 2 / 3, 1 / 6])[:, None, None]
HALVINGS = 12


class AllRequests:
    """Computes a quantile of all requests' latencies in closed form, with random prompts and random step times.

    The time to a request's first token depends on its prompt and on the step that encodes the prompt. Then come D
    decode steps, where D has the distribution of output lengths. If step times are independent, with mean t and
    standard deviation s, then

        P(latency > x) = sum_jk p_j w_k P(D > d_jk),   first_j + t d_jk + z_k s sqrt(d_jk) = x,

    where z_k and w_k represent a normal distribution (Gauss-Hermite). The probability falls with x, so bisection finds
    the quantile. If the time to the first token is constant and s is 0, the quantile is the latency of a request whose
    output length is at the quantile.
    """

    def __init__(self, lengths: Lengths, quantile: float) -> None:
        self._above = np.concatenate([lengths.survival, [0.0]])  # P(D > d)
        self._late = 1 - quantile
        self._decodes = lengths.decodes_at(quantile)

    def latency(self, first: Array, shares: Array, step: Array, deviation: Array) -> Array:
        """Return the quantile of all requests' latencies, s. # [n]"""
        spread = DEVIATES * deviation  # [3, 1, n]
        step = np.maximum(step, 1e-12)
        weights = WEIGHTS * shares
        low = first.min(axis=0)
        high = first.max(axis=0) + self._decodes * step + 1.8 * deviation * np.sqrt(self._decodes)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            left = middle - first  # [values, n]
            root = np.sqrt(spread**2 + 4 * step * np.maximum(left, 0.0)) - spread
            decodes = np.minimum((root / (2 * step)) ** 2, len(self._above) - 1).astype(int)
            late = np.where(left < 0, 1.0, self._above[decodes])
            breaks = (weights * late).sum(axis=(0, 1)) > self._late
            low, high = np.where(breaks, middle, low), np.where(breaks, high, middle)
        return high


Counts = npt.NDArray[np.int_]

MOST_SEGMENTS = 12
"""The iterations of a phase are grouped into at most this number of segments, plus one. Costs are linear in each."""


class PhaseColumns(NamedTuple):
    """The phases of candidates, with iterations grouped into a few segments. # [n, segments], or [n] from `boundary` on

    A phase with fewer segments repeats its last segment with weight 0.
    """

    weights: Array
    """Number of iterations of each segment."""
    unneeded: Array
    """Number of iterations of its last phase in which a request of the quantile's output length no longer decodes."""
    share: Array
    """Number of decoding requests, relative to the number of requests that a phase encodes."""
    age: Array
    """Mean number of decode iterations so far, over the decoding requests."""
    log_empty: Array
    """Log of the probability that no request decodes, divided by the number of requests that a phase encodes."""
    boundary: Array
    """Share of the gaps between tokens that include an encode phase."""
    boundary_deviate: Array
    stray: Array
    """Deviation of the decode batch at which the rule adjusts its target, for phases that encode one request. It is a
    negative number of standard deviations.
    """


class Phases:
    """Computes and caches the phases of one workload."""

    def __init__(self, lengths: Lengths, decodes: int) -> None:
        self._lengths, self._decodes = lengths, decodes
        self._rows: dict[int, int] = {}
        self._stretches, self._scalars = np.empty((5, 0, MOST_SEGMENTS + 1)), np.empty((3, 0))
        # Phases encode about equal numbers of tokens, so their numbers of prompts vary if prompt lengths vary. Their
        # variance is the mean number times the squared coefficient of variation of lengths. So more phases run out of
        # decoding requests than if each phase encoded the same number of prompts.
        ragged = lengths.mean_square_input / lengths.mean_input**2 - 1
        survival = lengths.survival
        with np.errstate(divide="ignore"):
            gone = -np.log1p(-np.minimum(survival, 1.0))
        gone = np.log1p(ragged * gone) / ragged if ragged > 1e-6 else gone
        ages = np.arange(1, len(survival) + 1)
        self._by_iteration = np.stack([survival, survival * ages, gone, survival * (1 - survival)])

    def __call__(self, decode_iterations: Counts) -> PhaseColumns:
        keys = decode_iterations.tolist()
        if new := set(keys) - self._rows.keys():
            stretches = [self._made(n) for n in sorted(new)]
            self._rows.update(zip(sorted(new), range(len(self._rows), len(self._rows) + len(new)), strict=True))
            self._stretches = np.concatenate(
                [self._stretches, np.stack([stretch for stretch, _ in stretches], axis=1)], axis=1
            )
            self._scalars = np.concatenate([self._scalars, np.asarray([stretch for _, stretch in stretches]).T], axis=1)
        rows: slice | list[int] = [self._rows[n] for n in keys]
        if len(keys) == 1:
            rows = slice(self._rows[keys[0]], self._rows[keys[0]] + 1)
        return PhaseColumns(*self._stretches[:, rows], *self._scalars[:, rows])

    def _made(self, n: int) -> tuple[Array, tuple[float, float, float]]:
        """Return the segments and the scalars of phases with n iterations. # [5, segments], 3"""
        iterations, decodes, size = self._by_iteration, self._decodes, MOST_SEGMENTS + 1
        num_cohorts = -(-iterations.shape[1] // n)
        padded = np.zeros((len(iterations), num_cohorts * n))
        padded[:, : iterations.shape[1]] = iterations
        cohorts = padded.reshape(len(iterations), num_cohorts, n)  # [.., cohort, iteration of the phase]
        rest = (
            decodes - (-(-decodes // n) - 1) * n
        )  # iterations in the last phase of a request of the quantile's length
        edges = segments(n, {rest} if decodes else set(), MOST_SEGMENTS)
        starts, weights = edges[:-1], np.diff(edges)
        share, age, gone, _ = np.add.reduceat(cohorts.sum(axis=1), starts, axis=1) / weights
        found = np.stack([weights, np.where(starts >= rest, weights, 0), share, age / np.maximum(share, 1e-300), -gone])
        found = np.concatenate([found, np.repeat(found[:, -1:], size - len(weights), axis=1)], axis=1)
        found[:2, len(weights) :] = 0
        boundary = cohorts[0, 1:, 0].sum() / max(self._lengths.mean_decodes, 1e-300)
        variance = float(cohorts[3, :, 0].sum())
        stray = -ADJUSTMENT * share[0] / np.sqrt(max(variance, 1e-300))
        return found, (float(boundary), float(upper_deviate(boundary)), float(stray))


@lru_cache(maxsize=8)
def phases_of(lengths: Lengths, decodes: int) -> Phases:
    return Phases(lengths, decodes)


def segments(length: int, edges: set[int], most: int) -> Counts:
    """Divide 0 .. length into at most `most` segments. Return their edges, merged with `edges`. The first segments are
    single iterations, and later ones grow longer.
    """
    if length <= most:
        return np.arange(length + 1)
    spaced = np.unique(np.round(np.linspace(0, 1, most) ** 1.5 * (length - 1)).astype(int) + 1)
    inner = {edge for edge in (*spaced.tolist(), *edges) if 0 < edge < length}
    return np.asarray([0, *sorted(inner), length])
