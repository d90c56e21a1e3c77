"""Search with Optuna's TPE sampler, for objectives and constraints without valid bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from xscheduler.search.base import SearchResult
from xscheduler.space import Space

NUM_TRIALS = 300


def search(spaces: Sequence[Space], *, num_trials: int = NUM_TRIALS, seed: int = 0) -> SearchResult:
    """Return the best of `num_trials` sampled points, without a proof. Bounds and memory are constraints of the
    sampler."""
    import optuna  # takes half a second to load: only if used

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    best: SearchResult | None = None
    highest = -np.inf

    def objective(trial: optuna.Trial) -> float:
        nonlocal best, highest
        space = spaces[trial.suggest_categorical("space", range(len(spaces)))]
        columns = {
            axis.variable.name: np.asarray(
                [axis.values[trial.suggest_int(axis.variable.name, 0, len(axis.values) - 1)]]
            )
            for axis in (*space.searched, *space.enumerated)
        }
        evaluation = space.evaluate(columns)
        overfull = float(evaluation.performance.peak_requests[0] / space.capacity - 1)
        trial.set_constraint("memory", overfull)
        trial.set_constraint("latency", float(evaluation.excess[0]))
        trial.set_constraint("allowed", 0.0 if evaluation.feasible[0] else 1.0)
        score = float(evaluation.score[0])
        if evaluation.feasible[0] and score > highest:
            best, highest = SearchResult(space, space.settings(columns, 0), evaluation.at(0), 0, None, ""), score
        return score

    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True)
    optuna.create_study(direction="maximize", sampler=sampler).optimize(objective, n_trials=num_trials)
    found = best or SearchResult(None, None, {}, 0, None, "")
    evaluations = sum(space.evaluations for space in spaces)
    return replace(found, method="optuna", evaluations=evaluations, bound="none: sampled points prove no bound")
