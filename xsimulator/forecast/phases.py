"""Compute the decode batch of every iteration of an rra phase, from a workload's lengths.

The result does not depend on devices, so all placements of a search share it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xgpt.core.policies.rule import ADJUSTMENT
from xsimulator.costs.curves import Array
from xsimulator.forecast.base import upper_deviate
from xsimulator.lengths import Lengths

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
    """Computes and caches the phases of one workload.

    Args:
        decodes: number of decode iterations of a request with output length at the quantile.
    """

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
    """Divide 0 .. length into at most `most` segments. Return the segments' edges, merged with `edges`. The first
    segments are single iterations, and later ones grow longer.
    """
    if length <= most:
        return np.arange(length + 1)
    spaced = np.unique(np.round(np.linspace(0, 1, most) ** 1.5 * (length - 1)).astype(int) + 1)
    inner = {edge for edge in (*spaced.tolist(), *edges) if 0 < edge < length}
    return np.asarray([0, *sorted(inner), length])
