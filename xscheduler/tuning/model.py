"""Predict the highest arrival rates of an engine's settings for all values of the parameters that are unknown about it.

The parameters (`xsimulator.fitted.Fit`) are sampled from a prior that is as wide as earlier predictions were wrong. At
a few samples, the rates of all settings follow from closed forms, and a measured load is simulated. Between these
samples, both are interpolated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log, sqrt
from typing import NamedTuple

import numpy as np
from scipy.interpolate import RBFInterpolator
from scipy.special import ndtri

from xgpt.core.errors import InfeasibleError
from xgpt.core.schema import ChunkedSettings, Plan, Profile
from xscheduler.arrival_rate import curves_of
from xscheduler.problem import Problem
from xscheduler.schedule import Scheduler
from xscheduler.space import Space
from xscheduler.tuning.belief import Array, Belief
from xsimulator.capacity import Trial
from xsimulator.fitted import Fit
from xsimulator.measures import RequestTimes
from xsimulator.queueing import NUM_LOADS

DESIGN = 48
SAMPLES = 4096
BUDGETS = 8
REQUESTS = 250
SIMILAR = 3.0
"""Settings are similar if they differ by less than this factor."""
APART = 1.0
"""Distance between two variants of the same settings, in units of `SIMILAR`."""
ERRORS = {"ttft_s": 0.15, "tpot_s": 0.06}
"""Standard deviations of the logarithmic errors of a measured load's mean times after the best fit: the differences
between the requests of two loads, and what no parameter describes.
"""
LONGEST = 20.0
"""A simulated TTFT counts as at most this multiple of the bound: it grows with the length of an overloaded run."""


class Prior(NamedTuple):
    pace: float
    split: float
    step_share: float = 0.02
    path_s: float = 0.01

    @classmethod
    def of(cls, profile: Profile) -> Prior:
        if "calibration" in profile.provenance:
            return cls(0.06, 0.05, 0.005, 0.003)
        if profile.source == "measured":
            return cls(0.08, 0.08) if profile.is_served and profile.engine == "xgpt" else cls(0.30, 0.20)
        return cls(0.15, 0.15) if profile.source == "imported" else cls(0.20, 0.20)

    def fits(self, scores: Array, least_step_s: float) -> list[Fit]:
        """Return the parameters at these standard scores. # scores: [samples, 4]"""
        pace, split = self.pace * scores[:, 0], self.split * scores[:, 1]
        step_s = self.step_share * least_step_s * np.exp(scores[:, 2])
        path_s = self.path_s * np.exp(scores[:, 3])
        rows = zip(np.exp(pace - split / 2), np.exp(pace + split / 2), step_s, path_s, strict=True)
        return [Fit(*map(float, row)) for row in rows]


@dataclass(frozen=True)
class MeasuredTimes:
    candidate: int
    rate_per_s: float
    ttft_s: float
    tpot_s: float


class EngineModel:
    """The settings of an engine for a problem, with predictions under unknown parameters.

    Args:
        problem: the problem of the engine's own scheduler, with policy chunked. Its headroom is ignored, since rates
            are measured.
        more: settings that are candidates as well, such as those that run now.
        variants: number of variants in which each setting can run, which the model cannot tell apart, such as those of
            the attention kernels. The first one is the engine's default.
    """

    def __init__(
        self,
        problem: Problem,
        prior: Prior | None = None,
        more: Sequence[ChunkedSettings] = (),
        seed: int = 0,
        variants: int = 1,
    ) -> None:
        self.problem = problem.under(problem.constraint.but(headroom=0.0))
        self.prior = prior or Prior.of(problem.profile)
        self._scheduler = Scheduler(self.problem)
        spaces = self._scheduler.candidates.spaces("chunked")
        if not spaces:
            raise InfeasibleError("memory: the model fits on no placement of these devices", binding="memory")
        self.placements = [space.placement for space in spaces]
        self._grids = [_grid(space, more if not index else ()) for index, space in enumerate(spaces)]
        found: dict[tuple[int, ChunkedSettings], tuple[int, int, int]] = {}
        for placement, (space, grid) in enumerate(zip(spaces, self._grids, strict=True)):
            for curve, load in np.argwhere(space.evaluate(grid).fits.reshape(-1, NUM_LOADS)).tolist():
                settings = space.settings(grid, curve * NUM_LOADS + load)
                assert isinstance(settings, ChunkedSettings)
                found.setdefault((placement, settings), (placement, curve, load))
        self.settings = [settings for settings in found for _ in range(variants)]
        self._index = [index for index in found.values() for _ in range(variants)]
        self.variant = [variant for _ in found for variant in range(variants)]
        self._plans: dict[int, Plan] = {}
        layer = problem.profile.layers[0]
        self._least_step_s = layer.rest.seconds[0] * problem.model.num_layers
        dimensions = len(Fit._fields)
        from scipy.stats import qmc  # takes a second to import

        self._scores = ndtri(qmc.Sobol(dimensions, seed=seed).random(DESIGN + 16)[:DESIGN])
        self.fits = self.prior.fits(self._scores, self._least_step_s)
        self.samples: Array = ndtri(qmc.Sobol(dimensions, seed=seed + 1).random(SAMPLES))

    def belief(self) -> Belief:
        rates = np.asarray([self.rates(fit) for fit in self.fits])
        floor = 0.01 * max(float(np.median(rates.max(axis=1))), 1e-9)
        predicted = np.exp(self._between(np.log(rates + floor))) - floor
        return Belief(self.places, np.maximum(predicted, 0.0), np.zeros(SAMPLES))

    def informed(self, belief: Belief, load: MeasuredTimes) -> Belief:
        found = np.asarray([self.times(load.candidate, load.rate_per_s, fit) for fit in self.fits])
        at = self._between(np.log(found))
        off = (at - np.log([load.ttft_s, load.tpot_s])) / list(ERRORS.values())
        # Times that no parameters explain, such as stalls of the machine, must not outweigh all others.
        return replace(belief, log_weights=belief.log_weights - np.log1p(off**2 / 8).sum(axis=1) * 4)

    def fitted(self, belief: Belief) -> Fit:
        weights = np.exp(belief.log_weights - belief.log_weights.max())
        mean = weights @ self.samples / weights.sum()
        return self.prior.fits(mean[None], self._least_step_s)[0]

    def rates(self, fit: Fit) -> Array:
        return self.rates_of(self._under(fit))

    def rates_of(self, problem: Problem) -> Array:
        engine = problem.engine
        if engine is not None:
            prompt = self._scheduler.candidates.lengths.mean_whole_input
            problem = problem.under(problem.constraint.less(engine.request_path_s(prompt)))
        candidates = Scheduler(problem).candidates
        rates = []
        for placement, grid in zip(self.placements, self._grids, strict=True):
            space = candidates.space("chunked", placement)
            rates.append(space.evaluate(grid).max_rates())
        return np.asarray([rates[placement][curve, load] for placement, curve, load in self._index])

    def times(self, candidate: int, rate_per_s: float, fit: Fit) -> tuple[float, float]:
        found = self.simulated(candidate, rate_per_s, fit)
        bound_s = self.problem.constraint.ttft_s or self.problem.constraint.latency_bound_s or 10.0
        return min(float(found.ttft_s.mean()), LONGEST * bound_s), max(float(found.tpot_s.mean()), 1e-6)

    def simulated(self, candidate: int, rate_per_s: float, fit: Fit) -> RequestTimes:
        plan = fit.of_plan(self.plan(candidate))
        found = Trial(plan, fit.of_profile(self.problem.profile), least_requests=REQUESTS).at(rate_per_s)
        assert found is not None
        return found

    def plan(self, candidate: int) -> Plan:
        if candidate not in self._plans:
            self._plans[candidate] = self.plan_of(self.settings[candidate][1], self.settings[candidate][0])
        return self._plans[candidate]

    def plan_of(self, settings: ChunkedSettings, placement: int = 0) -> Plan:
        return self._scheduler.score(settings, self.placements[placement])

    @property
    def unfitted(self) -> Fit:
        return self.prior.fits(np.zeros((1, len(Fit._fields))), self._least_step_s)[0]

    def nearest(self, settings: ChunkedSettings) -> int:
        values = np.asarray([[s.token_budget, s.max_batch] for _, s in self.settings], float)
        return int(np.abs(np.log(values / [settings.token_budget, settings.max_batch])).sum(axis=1).argmin())

    @cached_property
    def places(self) -> Array:
        return np.asarray(
            [
                [
                    log(settings.token_budget) / log(SIMILAR),
                    log(settings.max_batch) / log(SIMILAR),
                    *(4.0 * (placement == index) for index in range(len(self.placements) - 1)),
                    *(APART / sqrt(2) * (variant == index) for index in range(max(self.variant) + 1)),
                ]
                for (placement, settings), variant in zip(self.settings, self.variant, strict=True)
            ]
        )

    def _under(self, fit: Fit) -> Problem:
        engine = self.problem.engine
        return replace(
            self.problem,
            profile=fit.of_profile(self.problem.profile),
            engine=None if engine is None else fit.of_engine(engine),
        )

    def _between(self, values: Array) -> Array:
        found = RBFInterpolator(self._scores, values, kernel="thin_plate_spline")(self.samples)
        return np.clip(found, values.min(axis=0), values.max(axis=0))


def _grid(space: Space, more: Sequence[ChunkedSettings]) -> dict[str, np.ndarray]:
    """Return settings on a grid: a load curve for each token budget. # [curves * NUM_LOADS]"""
    axis = next(axis for axis in space.axes if axis.variable.name == "token_budget")
    wanted = np.geomspace(max(axis.values[0], 32), axis.values[-1], BUDGETS)
    nearest = axis.values[np.abs(np.log(axis.values[:, None] / wanted)).argmin(axis=0)]
    budgets = np.asarray([*np.unique(nearest), *(each.token_budget for each in more)])
    most = np.asarray([int(space.capacity)] * (len(budgets) - len(more)) + [each.max_batch for each in more])
    return curves_of({"token_budget": budgets, "max_batch": most}, space.forecast)
