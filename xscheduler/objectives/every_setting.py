"""Bound arrival rates where few requests run at a time, by simulating every setting.

Little's law lets an engine run 2.4 requests in every step. If only a few requests run, whole numbers and chance
arrivals lower the rate far below that. But then few settings differ: a cap on requests that is never reached has no
effect, so all larger caps run the same steps. `EverySetting` tries all settings at rising rates, until all break the
bounds:

- A setting whose saturated throughput on the lower tables is below the rate cannot sustain it.
- A setting is refuted if more than `LENIENT` times the allowed share of requests are late in a short run, or more than
  the allowed share in a run of `LASTING_REQUESTS`. At higher rates it stays refuted.
- Settings that differ in one limit only are run from the smallest. Once each request ends when it ends under the
  largest, the limit has had no effect, and those in between need no run. The same holds for whole rows of settings.

All settings get the K/V blocks of the one whose steps leave the most. Runs share their random numbers. The bound is the
rate at which all settings break the bounds, corrected by what chance may hide. The rates of the best plan with `DRAWS`
draws of requests, of which the runs use the first, say how the first differs from their mean, and how sure the mean is.
How a setting that was kept last differs from the best plan, from draw to draw, says how much other settings may. The
quantile `SURE` is Student's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import pairwise
from math import hypot, inf, sqrt
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from xgpt.core.schema import PlanDraft, PolicySettings
from xscheduler.box_bounds import SLACK
from xscheduler.objectives.branches import Branch
from xscheduler.schedule import Scheduler
from xscheduler.space import Array, Evaluation, Space
from xsimulator.capacity import LASTING_REQUESTS, LEAST_REQUESTS, PRECISION, SEED, EngineRun, Trial, rates_of_draws
from xsimulator.counts.arrivals import Run, Stream
from xsimulator.counts.counted_run import is_counted
from xsimulator.forecast.base import Ints

LENIENT = 3.0
DRAWS, SURE = 8, 0.977
STEP = 1.015
"""Ratio of two rates that are tried one after the other."""
FEW = 12.0
"""Settings are simulated if at most this mean number of requests is in a replica."""
WIDE = 1.08
"""They are simulated if a bound exceeds the best rate by this factor."""
MOST_RUNS, STEPS_OF_RUN = 9000, 5_000
"""A run counts once for each `STEPS_OF_RUN` steps that are computed one by one, and at least once for each
`LEAST_REQUESTS` requests.
"""
AT_ONCE = 4096
"""Number of settings that are predicted together."""
ALL_SETTINGS = "; where few requests run, simulations of every setting"


class _Outcome(NamedTuple):
    keeps: bool
    ends: bytes


class _Settings:
    """The settings of a space, as rows of indices. Along a row, the variable of the space's lines grows.

    Attributes:
        base: a plan with some of these settings.
    """

    base: PlanDraft

    def __init__(self, space: Space) -> None:
        self._space = space
        ends = np.cumsum(space.lines[2]).tolist()
        self.rows = [np.arange(start, end) for start, end in pairwise([0, *ends]) if start < end]
        self._blocks: dict[int, tuple[dict[str, Ints], Evaluation, Array]] = {}

    @cached_property
    def smallest(self) -> PolicySettings | None:
        """The settings whose steps leave the most memory, or None if none fit."""
        columns = self._space.points(np.asarray([row[0] for row in self.rows]))
        evaluation = self._space.evaluate(columns)
        if not len(fits := np.flatnonzero(evaluation.fits)):
            return None
        return self._space.settings(columns, int(fits[evaluation.performance.peak_tokens[fits].argmin()]))

    def plan(self, index: int) -> PlanDraft:
        columns, evaluation, _ = self._block(index // AT_ONCE)
        at = evaluation.at(index % AT_ONCE)
        sizes = {name: at[name] for name in ("encode_batch", "encode_tokens", "decode_batch")}
        return self.base.but(policy=self._space.settings(columns, index % AT_ONCE)).with_estimate(**sizes)

    def able(self, row: Ints, rate: float) -> Ints:
        """Return the settings whose saturated throughput on the lower tables is at least a rate."""
        blocks = row // AT_ONCE
        served = [self._block(block)[2][row[blocks == block] % AT_ONCE] for block in np.unique(blocks).tolist()]
        return row[np.concatenate(served) >= rate] if served else row

    def _block(self, number: int) -> tuple[dict[str, Ints], Evaluation, Array]:
        if number not in self._blocks:
            space, start = self._space, number * AT_ONCE
            columns = space.points(np.arange(start, min(start + AT_ONCE, space.num_points)))
            evaluation = space.evaluate(columns)
            served = space.evaluate_floor(columns, evaluation).throughput * (1 + SLACK)
            served[space.forecast.promises_too_little(evaluation.performance)] = np.inf
            self._blocks[number] = columns, evaluation, np.where(evaluation.fits, served, 0.0)
        return self._blocks[number]


class EverySetting:
    """Tries the settings of a problem's branches.

    Args:
        best: the plan with the highest rate so far, which is `rate`.
    """

    def __init__(
        self, scheduler: Scheduler, finish: Callable[[PlanDraft], PlanDraft], best: PlanDraft, rate: float
    ) -> None:
        self._scheduler, self._finish, self._best, self._rate = scheduler, finish, best, rate
        self._slack = 1 / (1 + best.constraint.headroom)
        self._runs_left = MOST_RUNS
        self._last: PlanDraft | None = None

    @cached_property
    def _trial(self) -> Trial:
        return Trial(self._best, self._scheduler.problem.profile)

    @cached_property
    def _long(self) -> Trial:
        return Trial(self._best, self._scheduler.problem.profile, least_requests=LASTING_REQUESTS)

    @cached_property
    def _allowed(self) -> float:
        """How many times the rate that all settings break with the runs' requests may be kept with any requests."""
        profile = self._scheduler.problem.profile

        def rates_of(plan: PlanDraft) -> Array:
            draws = range(SEED, SEED + DRAWS)
            return rates_of_draws(plan, profile, self._rate, draws, PRECISION / 4, least_requests=LASTING_REQUESTS)

        rates = rates_of(self._best)
        others = rates if self._last is None else rates_of(self._last)
        if not (rates.all() and others.all()):
            return inf
        error, sure = float(np.std(rates, ddof=1) / np.mean(rates)), float(stdtrit(DRAWS - 1, SURE))
        if self._last is None:
            return 1 + sure * error
        differs = float(np.std(np.log(others / rates), ddof=1))
        return float(np.mean(rates) / rates[0]) * (1 + sure * hypot(error / sqrt(DRAWS), differs))

    def tighten(self, branches: Sequence[Branch]) -> bool:
        """Lower wide bounds if few requests run. Return whether a bound has been lowered."""
        wide = sorted((one for one in branches if one.bound > WIDE * self._rate), key=lambda one: -one.bound)
        if not wide or not self._is_few:
            return False
        most, has_lowered = self._rate, False
        for branch in wide:
            if has_lowered and branch.bound <= self._allowed * most:
                break
            if (found := self._highest(branch.space, branch.bound, most)) is None:
                break
            most, has_lowered = found, True
            branch.bound = min(branch.bound, max(self._allowed * most, self._rate))
        return has_lowered

    @property
    def _is_few(self) -> bool:
        times = self._trial.at(self._rate)
        return times is not None and self._rate / self._best.replicas * float(times.whole_s.mean()) <= FEW

    def _highest(self, space: Space, bound: float, at_least: float) -> float | None:
        """Return a rate from `at_least` to about `bound` at which every setting breaks the bounds. None means that
        runs cannot show it.
        """
        settings, profile = _Settings(space), self._scheduler.problem.profile
        if settings.smallest is None:
            return at_least
        plan = self._scheduler.draft_at(space, settings.smallest, self._best.search)
        if plan is None or not is_counted(base := self._finish(plan)):
            return None
        settings.base = base
        trials = self._trial.on(base, profile), self._long.on(base, profile)
        rows, rate = settings.rows, at_least
        with suppress(_TooManyError):
            while rate < bound:
                outcome = partial(self._outcome, trials, [trial.stream(rate) for trial in trials], settings)
                if not (rows := _kept_rows(rows, partial(settings.able, rate=rate), outcome)):
                    break
                self._last = settings.plan(int(rows[0][-1]))
                rate *= STEP
            return rate
        return None

    def _outcome(
        self, trials: tuple[Trial, Trial], streams: Sequence[Stream], settings: _Settings, index: int
    ) -> _Outcome:
        if self._runs_left <= 0:
            raise _TooManyError
        (short, long), plan = trials, settings.plan(index)
        keeps, run = short.of(plan).run(streams[0], self._slack, LENIENT)
        self._runs_left -= max(1, _num_events(run) // STEPS_OF_RUN)
        if keeps:
            keeps, run = long.of(plan).run(streams[1], self._slack)
            self._runs_left -= max(LASTING_REQUESTS // LEAST_REQUESTS, _num_events(run) // STEPS_OF_RUN)
        return _Outcome(keeps, np.asarray(run.end_ns).tobytes())


def _num_events(run: Run | EngineRun) -> int:
    return run.num_events if isinstance(run, Run) else 0


class _TooManyError(Exception):
    pass


def _kept_rows(rows: list[Ints], able: Callable[[Ints], Ints], outcome: Callable[[int], _Outcome]) -> list[Ints]:
    """Return the settings of each row that are not refuted. If a row's requests end as in the last row, so do those of
    the rows in between.
    """
    while rows and not len(able(rows[-1])):
        rows = rows[:-1]
    if not rows:
        return []
    last, ends = _kept(able(rows[-1]), outcome)
    found = []
    for i, row in enumerate(rows[:-1]):
        kept, others = _kept(able(row), outcome)
        if others == ends:
            found += rows[i:-1] if len(last) else []
            break
        found.append(kept)
    return [row for row in (*found, last) if len(row)]


def _kept(row: Ints, outcome: Callable[[int], _Outcome]) -> tuple[Ints, list[bytes]]:
    """Return the settings that are not refuted, and when requests end under those that were run."""
    if not len(row):
        return row, []
    top, kept, ends = outcome(int(row[-1])), np.zeros(len(row), bool), []
    kept[-1] = top.keeps
    for i, index in enumerate(row[:-1].tolist()):
        found = outcome(index)
        if found.ends == top.ends:
            kept[i:] = top.keeps
            break
        kept[i] = found.keeps
        ends.append(found.ends)
    return row[kept], [*ends, top.ends]
