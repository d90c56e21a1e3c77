"""Tune settings that closed forms cannot compare, by simulation: token budgets that depend on the slack of requests.

Optuna proposes settings in rounds and begins with settings that are equivalent to the plan's fixed budget, so the
result is never worse than the given plan. All settings are simulated with the same lengths and arrivals, at a rate
slightly above the best rate so far. A run ends early if too many requests have broken their bounds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xgpt.core.errors import InfeasibleError
from xgpt.core.progress import Progress
from xgpt.core.schema import AdmissionOrder, Ceiling, PlanDraft, Profile, SlackBudget
from xgpt.core.schema.plan import rate_of
from xscheduler.found import Found
from xscheduler.objectives.arrivals import DRAWS, Arrivals
from xscheduler.objectives.capacities import with_capacity
from xscheduler.schedule import Scheduler
from xsimulator.capacity import CapacitySearch, Trial, rates_of_draws
from xsimulator.costs.step_times import with_step_times
from xsimulator.forecast import TUNED

if TYPE_CHECKING:
    import optuna

TUNED_ONLY = "none: budgets that depend on slack are compared by simulation only"
NUM_TRIALS = 44
ROUND = 4
"""Number of settings in a round. It does not depend on the number of processes, so plans do not depend on it either."""
NUM_PROCESSES = 2
PRECISION = 0.01
"""Settings are better only if their rate exceeds the best rate so far by this share."""
FAR = 1.5
"""A run ends early once the quantile of its times is this many times the bound."""
LARGEST_STEP = 8192
TIGHTER = (0.7, 0.4)
"""Factors that tighten the bound on the time per token. The closed form then chooses smaller budgets."""


class TunedArrivals(Arrivals):
    """The objective `arrivals` for a tuned policy: the plan of the policy without tuning, improved by simulation."""

    def __init__(
        self,
        scheduler: Scheduler,
        finish: Callable[[PlanDraft], PlanDraft],
        progress: Progress | None,
        kind: str,
        order: AdmissionOrder | None,
    ) -> None:
        super().__init__(scheduler, finish, progress)
        self._kind, self._order = kind, order

    def certify(self, plans: dict[str, PlanDraft]) -> dict[str, Found]:
        (found,) = super().certify(plans).values()
        fixed = [found.draft, *self._under_tighter()]
        base, *others = sorted(fixed, key=rate_of, reverse=True)
        others += [self.finish(plan) for plan in self._on_one_stage(fixed)]
        draft = tune(base, self.scheduler.problem.profile, others=others, order=self._order)
        return {self._kind: Found(draft, Ceiling(None, TUNED_ONLY))}

    def _under_tighter(self) -> Iterator[PlanDraft]:
        constraint = self.scheduler.problem.constraint
        assert constraint.tpot_s is not None
        for share in TIGHTER:
            tighter = constraint.but(tpot_s=share * constraint.tpot_s)
            try:
                found = Arrivals(self.scheduler.under(tighter), self.finish).settle((TUNED[self._kind],))
            except InfeasibleError:
                continue
            for plan in (one.draft for one in found.values()):
                bounds = plan.constraint.but(tpot_s=constraint.tpot_s)  # keeps the plan's headroom
                plan = plan.but(constraint=bounds)
                yield with_capacity(plan, self.scheduler.problem.profile, rate_of(plan), edges=False)

    def _on_one_stage(self, fixed: list[PlanDraft]) -> list[PlanDraft]:
        """With tuned settings, a single stage may be better than a pipeline. In a pipeline, a step has less time, and
        only one of the micro-batches encodes a given prompt.
        """
        problem = self.scheduler.problem
        if any(len(plan.stages) == 1 for plan in fixed) or "pp" in problem.fixed:
            return []
        one = Scheduler(replace(problem, fixed={**problem.fixed, "pp": 1}))
        return [plan for plan, _ in Arrivals(one).of_kind(TUNED[self._kind], 1)]


class Score(NamedTuple):
    """The score of settings. `kept` states whether they keep the bounds slightly above the best rate so far. If so,
    `rate` is the highest rate at which they do.
    """

    kept: bool
    rate: float


def tune(
    plan: PlanDraft, profile: Profile, *, others: Sequence[PlanDraft] = (), order: AdmissionOrder | None = None
) -> PlanDraft:
    """Return the plan with the best tuned settings found, and its simulated capacity.

    Args:
        order: order of admission. None means that the order is tuned as well.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    plans = [with_step_times(one, profile) for one in (plan, *others)]
    plan = plans[0]
    found = plan.estimate.capacity
    assert found is not None
    best, best_settings = found.rate_per_s, None
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=0, multivariate=True, n_startup_trials=12)
    )
    for settings in _slack_settings(plan):
        study.enqueue_trial({"plan": 0, **settings})
    for i, other in enumerate(plans[1:], 1):
        for settings in islice(_slack_settings(other), 5):
            study.enqueue_trial({"plan": i, **settings})
    with _workers(plan, profile) as score_all:
        for _ in range(NUM_TRIALS // ROUND):
            trials = [study.ask() for _ in range(ROUND)]
            plans_of_trials = [plans[trial.suggest_categorical("plan", range(len(plans)))] for trial in trials]
            tuned = [_with_slack(one, trial, order) for one, trial in zip(plans_of_trials, trials, strict=True)]
            scores = score_all(tuned, best)
            for trial, one, score in zip(trials, tuned, scores, strict=True):
                study.tell(trial, score.rate)
                if score.kept and score.rate > best:
                    best, best_settings = score.rate, one
    first = _with_slack(plan, optuna.trial.FixedTrial(next(iter(_slack_settings(plan)))), order)
    return _settled(first if best_settings is None else best_settings, profile, best)


def _settled(plan: PlanDraft, profile: Profile, rate: float) -> PlanDraft:
    saturated = max(Trial(plan, profile).saturated(), rate)
    estimate, factor = plan.estimate, saturated / plan.estimate.throughput_rps
    cost = estimate.cost_per_million_tokens
    search = CapacitySearch(plan, profile, rate, most=max(saturated, 1.05 * rate))
    search.precision = PRECISION / 2
    capacity = search.found()
    others = rates_of_draws(plan, profile, rate, DRAWS, PRECISION, most=1.3 * saturated)
    error = float(np.std([capacity.rate_per_s, *others], ddof=1) / max(capacity.rate_per_s, 1e-9))
    return plan.but(
        estimate=estimate.but(
            throughput_rps=saturated,
            output_tokens_per_s=factor * estimate.output_tokens_per_s,
            cost_per_million_tokens=None if cost is None else cost / factor,
            capacity=capacity.but(error=round(error, 4)),
            simulated=("throughput_rps", "output_tokens_per_s", "cost_per_million_tokens"),
        )
    )


def _slack_settings(plan: PlanDraft) -> Iterator[dict[str, Any]]:
    budget = plan.policy.token_budget  # type: ignore[union-attr]
    fixed = {
        "by_slack": False,
        "least": min(max(budget, 16), LARGEST_STEP),
        "beyond": 1.0,
        "share": 0.95,
        "behind": 0,
        "order": "fcfs",
    }
    yield fixed
    yield {**fixed, **_in_time(plan)}
    slack = {**fixed, "by_slack": True, "least": 32, "beyond": LARGEST_STEP / 32}
    for share, behind in ((0.97, 0), (0.93, 0), (0.95, 1), (0.95, 0), (0.9, 0), (0.97, 2), (0.97, 4)):
        yield {**slack, "share": share, "behind": behind, **_in_time(plan)}
    yield slack
    yield {**slack, "least": max(budget // 2, 16), "beyond": 4.0, **_in_time(plan)}


def _in_time(plan: PlanDraft) -> dict[str, str]:
    return {"order": "fcfs" if plan.constraint.ttft_s is None else "in-time"}


def _with_slack(plan: PlanDraft, trial: optuna.trial.BaseTrial, order: AdmissionOrder | None) -> PlanDraft:
    by_slack = trial.suggest_categorical("by_slack", [False, True])
    least = trial.suggest_int("least", 16, LARGEST_STEP, log=True)
    most = round(least * trial.suggest_float("beyond", 1.0, LARGEST_STEP / 16, log=True))
    share = round(trial.suggest_float("share", 0.7, 1.0), 3)
    behind = trial.suggest_int("behind", 0, 8)
    orders = ["fcfs"] if plan.constraint.ttft_s is None else ["fcfs", "in-time"]
    chosen: Any = trial.suggest_categorical("order", orders)
    slack = SlackBudget(
        least_tokens=least, most_tokens=max(least, min(most, LARGEST_STEP)), share=share, behind_tokens=behind
    )
    admission = plan.admission.but(order=order or chosen)
    policy = plan.policy.but(slack=slack if by_slack else None)
    return plan.but(policy=policy, admission=admission)


_profile: Profile | None = None


@contextmanager
def _workers(plan: PlanDraft, profile: Profile) -> Iterator[Callable[[list[PlanDraft], float], list[Score]]]:
    count = min(NUM_PROCESSES, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    if count < 2:
        _begin(profile)
        yield lambda plans, best: [_score(plan, best) for plan in plans]
        return
    pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_begin, initargs=(profile,))
    try:
        yield lambda plans, best: list(pool.map(_score, plans, [best] * len(plans)))
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(profile: Profile) -> None:
    global _profile
    _profile = profile


def _score(plan: PlanDraft, best: float) -> Score:
    assert _profile is not None
    search = CapacitySearch(plan, _profile, best, most=2 * max(best, plan.estimate.throughput_rps))
    search.precision = PRECISION
    over = search.excess_over((1 + PRECISION) * best, FAR)
    if over > 1:
        return Score(False, best / min(over, FAR))
    return Score(True, search.rate)
