"""Bound arrival rates where few requests run at a time, by simulating every setting.

Little's law lets an engine run 2.4 requests in every step. If only a few requests run, whole numbers and chance
arrivals lower the rate far below that. But then few settings differ: a cap on requests that is never reached has no
effect, so all larger caps run the same steps. `EverySetting` tries all settings at rising rates, until all break the
bounds:

- A setting whose saturated throughput on the lower tables is below the rate cannot sustain it.
- A setting is refuted if more than `LENIENT` times the allowed share of requests are late in a short run, or more than
  the allowed share in a run of `MANY_REQUESTS`. At higher rates it stays refuted.
- Settings that differ only in the batch size are run from the smallest. Once each request ends when it ends under the
  largest, the cap has had no effect, and the sizes in between need no run.

All settings get the K/V blocks of the one whose steps leave the most. Runs share their random numbers. The bound is the
rate at which all settings break the bounds, raised by two standard deviations of a rate from `MANY_REQUESTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import sqrt
from typing import NamedTuple

import numpy as np

from xgpt.core.schema import PlanDraft
from xscheduler.box_bounds import SLACK
from xscheduler.objectives.branches import Branch
from xscheduler.schedule import Scheduler
from xscheduler.space import Evaluation, Space
from xsimulator.capacity import LEAST_REQUESTS, Trial
from xsimulator.counts.counted_run import is_counted
from xsimulator.forecast.base import Ints

MANY_REQUESTS = 8 * LEAST_REQUESTS
LENIENT = 2.0
STEP = 1.015
"""Ratio of two rates that are tried one after the other."""
FEW = 8.0
"""Settings are simulated if at most this mean number of requests is in a replica."""
WIDE = 1.08
"""They are simulated if a bound exceeds the best rate by this factor."""
MOST_SETTINGS, MOST_RUNS = 50_000, 3000
ALL_SETTINGS = "; where few requests run, simulations of every setting"


class _Outcome(NamedTuple):
    keeps: bool
    ends: Ints


class EverySetting:
    """Tries the settings of a problem's branches.

    Args:
        best: the plan with the highest rate so far, which is `rate`.
        error: share by which a rate measured with `LEAST_REQUESTS` may be too low by chance.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        finish: Callable[[PlanDraft], PlanDraft],
        best: PlanDraft,
        rate: float,
        error: float,
    ) -> None:
        self._scheduler, self._finish, self._best, self._rate = scheduler, finish, best, rate
        self._allowed = 1 + error * sqrt(LEAST_REQUESTS / MANY_REQUESTS)
        self._slack = 1 / (1 + best.constraint.headroom)
        self._runs_left = MOST_RUNS

    @cached_property
    def _trial(self) -> Trial:
        return Trial(self._best, self._scheduler.problem.profile)

    @cached_property
    def _long(self) -> Trial:
        return Trial(self._best, self._scheduler.problem.profile, least_requests=MANY_REQUESTS)

    def tighten(self, branches: Sequence[Branch]) -> bool:
        """Lower wide bounds if few requests run. Return whether a bound has been lowered."""
        wide = sorted((one for one in branches if one.bound > WIDE * self._rate), key=lambda one: -one.bound)
        if not wide or not self._is_few:
            return False
        most, has_lowered = self._rate, False
        for branch in wide:
            if branch.bound <= self._allowed * most:
                break
            found = self._highest(branch.space, branch.bound, most)
            if found is None:
                break
            most, has_lowered = found, True
            branch.bound = min(branch.bound, self._allowed * most)
        return has_lowered

    @property
    def _is_few(self) -> bool:
        times = self._trial.at(self._rate)
        return times is not None and self._rate / self._best.replicas * float(times.whole_s.mean()) <= FEW

    def _highest(self, space: Space, bound: float, at_least: float) -> float | None:
        """Return a rate from `at_least` to about `bound` at which every setting breaks the bounds. None means that
        runs cannot show it.
        """
        if space.num_points > MOST_SETTINGS:
            return None
        columns = space.points(np.arange(space.num_points))
        evaluation = space.evaluate(columns)
        base = self._base(space, columns, evaluation)
        if base is None:
            return at_least
        if not is_counted(base):
            return None
        profile = self._scheduler.problem.profile
        trials = self._trial.on(base, profile), self._long.on(base, profile)
        served = space.evaluate_floor(columns, evaluation).throughput * (1 + SLACK)
        served[space.forecast.promises_too_little(evaluation.performance)] = np.inf
        lines, rate = _lines(space, columns, evaluation), at_least
        try:
            while rate < bound:
                able = [line[served[line] >= rate] for line in lines]
                lines = [
                    kept for line in able if len(kept := self._kept(space, columns, evaluation, trials, line, rate))
                ]
                if not lines:
                    break
                rate *= STEP
        except _TooManyError:
            return None
        return rate

    def _base(self, space: Space, columns: dict[str, Ints], evaluation: Evaluation) -> PlanDraft | None:
        """Return the finished plan of the setting that leaves the most memory, or None if no setting fits."""
        fits = np.flatnonzero(evaluation.fits)
        if not len(fits):
            return None
        index = int(fits[evaluation.performance.peak_tokens[fits].argmin()])
        plan = self._scheduler.draft_at(space, space.settings(columns, index), self._best.search)
        return None if plan is None else self._finish(plan)

    def _kept(
        self,
        space: Space,
        columns: dict[str, Ints],
        evaluation: Evaluation,
        trials: tuple[Trial, Trial],
        line: Ints,
        rate: float,
    ) -> Ints:
        base = trials[0].plan

        def outcome(index: int) -> _Outcome:
            at = evaluation.at(index)
            sizes = {name: at[name] for name in ("encode_batch", "encode_tokens", "decode_batch")}
            plan = base.but(policy=space.settings(columns, index)).with_estimate(**sizes)
            return self._outcome(trials, plan, rate)

        if not len(line):
            return line
        kept = np.zeros(len(line), bool)
        top = outcome(int(line[-1]))
        kept[-1] = top.keeps
        for i, index in enumerate(line[:-1].tolist()):
            found = outcome(index)
            if np.array_equal(found.ends, top.ends):
                kept[i:] = top.keeps
                break
            kept[i] = found.keeps
        return line[kept]

    def _outcome(self, trials: tuple[Trial, Trial], plan: PlanDraft, rate: float) -> _Outcome:
        short, long = trials
        self._runs_left -= 1
        if self._runs_left < 0:
            raise _TooManyError
        keeps, run = short.of(plan).run(short.stream(rate), self._slack, LENIENT)
        if keeps:
            self._runs_left -= MANY_REQUESTS // LEAST_REQUESTS
            keeps, run = long.of(plan).run(long.stream(rate), self._slack)
        return _Outcome(keeps, np.asarray(run.end_ns))


class _TooManyError(Exception):
    pass


def _lines(space: Space, columns: dict[str, Ints], evaluation: Evaluation) -> Sequence[Ints]:
    """Return the settings that fit, by their value of the variable that is not the batch size, smallest batch first."""
    fits, load = np.flatnonzero(evaluation.fits), columns[space.forecast.load]
    others = [values for name, values in columns.items() if name != space.forecast.load]
    if not others:
        return [fits[np.argsort(load[fits], kind="stable")]]
    order = fits[np.lexsort((load[fits], others[0][fits]))]
    return np.split(order, np.flatnonzero(np.diff(others[0][order])) + 1)
