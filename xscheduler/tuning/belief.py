"""Hold what is believed of candidates' values, update it by measurements, and say which measurement can change the
decision most, and when none can.

A candidate's value is the prediction of a model with unknown parameters, times an error that is similar for similar
candidates:

    log(value) = log(prediction(parameters)) + error,    error ~ GP(0, s^2 exp(-distance^2 / 2))

The posterior is a mixture over samples of the parameters and of s. If measurements refute the model's ranks, samples
with a large s outweigh the others, and the candidates' values follow from those of measured neighbours, as in Bayesian
optimisation without a model. This module draws no conclusions from a clock, and reads and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int_]

AMPLITUDES = (0.03, 0.08, 0.2, 0.6)
"""Possible standard deviations of the logarithmic error of the model."""
AMPLITUDE_SHARES = (0.5, 0.35, 0.13, 0.02)
ALONE = 0.06
"""Share of the error's variance that candidates do not share with their neighbours."""
FLOOR = 0.02
"""A value counts as zero if it is much smaller than this share of the largest prediction."""
DRAWS = 2000
SURE = 0.95
"""Probability at which a decision counts as certain."""
LEAST_GAIN = 0.001
"""A measurement that is expected to gain less than this share is not worth its time."""
TOLERANCE = 0.05
"""Share by which a candidate may exceed the chosen one without changing the decision."""


class MeasuredRate(NamedTuple):
    candidate: int
    value: float
    error: float = 0.03


class Standing(NamedTuple):
    """What the measurements say.

    Attributes:
        best: the measured candidate with the highest expected value. None means that none was measured.
        sure: probability that no candidate exceeds it by more than the tolerance.
        most: value that no candidate exceeds, with probability `SURE`.
        next: the candidate whose measurement is expected to gain most, or None if all were measured.
        gain: that gain, as a share of `value`.
    """

    best: int | None
    value: float
    sure: float
    most: float
    next: int | None
    gain: float

    @property
    def is_decided(self) -> bool:
        return self.best is not None and (self.sure >= SURE or self.next is None)

    @property
    def ends(self) -> bool:
        """Whether to measure no more: the decision is certain, or another measurement is expected to gain nothing."""
        return self.best is not None and (self.is_decided or self.gain < LEAST_GAIN)


@dataclass(frozen=True)
class Belief:
    """What is known of the candidates' values.

    Attributes:
        places: the candidates' settings, scaled so that the error at distance 1 is similar. # [candidates, settings]
        predictions: each sample's values of all candidates. # [samples, candidates]
        log_weights: logarithmic weights of the samples: what other observations say of the parameters. # [samples]
    """

    places: Array
    predictions: Array
    log_weights: Array
    measured: tuple[MeasuredRate, ...] = ()
    excluded: frozenset[int] = field(default_factory=frozenset)
    seed: int = 0

    def measure(self, found: MeasuredRate) -> Belief:
        return replace(self, measured=(*self.measured, found))

    def exclude(self, candidates: Iterable[int]) -> Belief:
        return replace(self, excluded=self.excluded | set(candidates) - {found.candidate for found in self.measured})

    @cached_property
    def draws(self) -> Array:
        """Samples of all candidates' values, given the measurements. # [DRAWS, candidates]"""
        rng = np.random.default_rng(self.seed)
        floor = FLOOR * float(np.median(self.predictions.max(axis=1)) or 1.0)
        logs = np.log(self.predictions + floor)
        at = np.asarray([found.candidate for found in self.measured], int)
        seen = np.log(np.asarray([found.value for found in self.measured]) + floor)
        noise = np.asarray([found.error * found.value / (found.value + floor) for found in self.measured])
        alike = self._alike
        weights, gains, factors = [], [], []
        for amplitude, share in zip(AMPLITUDES, AMPLITUDE_SHARES, strict=True):
            kernel = amplitude**2 * alike
            inner = kernel[np.ix_(at, at)] + np.diag(np.maximum(noise, 1e-3) ** 2)
            gain = np.linalg.solve(inner, kernel[at]) if len(at) else np.zeros((0, len(alike)))
            off = seen - logs[:, at]
            fit = -0.5 * np.einsum("si,si->s", off @ np.linalg.inv(inner), off) if len(at) else np.zeros(len(logs))
            weights.append(self.log_weights + fit - 0.5 * np.linalg.slogdet(inner)[1] + np.log(share))
            gains.append(gain)
            left = kernel - kernel[:, at] @ gain
            factors.append(np.linalg.cholesky(left + 1e-9 * np.eye(len(left))))
        flat = np.concatenate(weights)
        flat = np.exp(flat - flat.max())
        picked = rng.choice(len(flat), DRAWS, p=flat / flat.sum())
        which, sample = np.divmod(picked, len(logs))
        found: Array = logs[sample]
        for index, (gain, factor) in enumerate(zip(gains, factors, strict=True)):
            rows = which == index
            noise_of = rng.standard_normal((int(rows.sum()), len(alike))) @ factor.T
            found[rows] += (seen - found[np.ix_(rows, at)]) @ gain + noise_of
        values = np.maximum(np.exp(found) - floor, 0.0)
        values[:, sorted(self.excluded)] = 0.0
        return values

    def standing(self, tolerance: float = TOLERANCE) -> Standing:
        """Return what the measurements say. `tolerance` is the share by which others may exceed the best."""
        values = self.draws
        open_ = np.ones(values.shape[1], bool)
        open_[[*(found.candidate for found in self.measured), *self.excluded]] = False
        most = float(np.quantile(values.max(axis=1), SURE))
        known = sorted({found.candidate for found in self.measured} - self.excluded)
        means = values.mean(axis=0)
        best = max(known, key=lambda index: means[index]) if known else None
        now = np.zeros(len(values)) if best is None else values[:, best]
        gains = np.where(open_, np.maximum(values - now[:, None], 0.0).mean(axis=0), -1.0)
        following = int(gains.argmax()) if open_.any() else None
        value = 0.0 if best is None else float(np.mean([m.value for m in self.measured if m.candidate == best]))
        sure = float(np.mean(values.max(axis=1) <= (1 + tolerance) * now)) if best is not None else 0.0
        gain = 0.0 if following is None else float(gains[following]) / max(value, 1e-12)
        return Standing(best, value, sure, most, following, gain)

    @property
    def _alike(self) -> Array:
        distance = ((self.places[:, None] - self.places[None]) ** 2).sum(axis=2)
        shared: Array = (1 - ALONE) * np.exp(-distance / 2) + ALONE * np.eye(len(self.places))
        return shared
