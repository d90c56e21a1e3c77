"""Sample settings with Optuna, for objectives and constraints without known valid bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from xscheduler.search.branch_and_bound import SearchResult
from xscheduler.space import Space
from xsimulator.forecast.base import Ints

if TYPE_CHECKING:
    import optuna

NUM_TRIALS = 300


def sample_points(
    spaces: Sequence[Space], score: Callable[[optuna.Trial, int, dict[str, Ints]], float], *, num_trials: int
) -> None:
    """Call `score` for `num_trials` points that Optuna's TPE sampler draws to find high scores."""
    import optuna  # imported here, since the import takes half a second

    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def objective(trial: optuna.Trial) -> float:
        number = trial.suggest_categorical("space", range(len(spaces)))
        columns = {}
        for axis in spaces[number].axes:
            name = f"{spaces[number].kind} {axis.variable.name}"
            index = trial.suggest_int(name, 1, len(axis.values), log=True) - 1
            columns[axis.variable.name] = np.asarray([axis.values[index]])
        return score(trial, number, columns)

    sampler = optuna.samplers.TPESampler(seed=0)
    optuna.create_study(direction="maximize", sampler=sampler).optimize(objective, n_trials=num_trials)


def search(spaces: Sequence[Space], *, num_trials: int = NUM_TRIALS) -> SearchResult:
    best: SearchResult | None = None
    highest = -np.inf

    def score(trial: optuna.Trial, number: int, columns: dict[str, Ints]) -> float:
        nonlocal best, highest
        space = spaces[number]
        evaluation = space.evaluate(columns)
        overfull = float(evaluation.performance.peak_requests[0] / space.capacity - 1)
        trial.set_constraint("memory", overfull)
        trial.set_constraint("latency", float(evaluation.excess[0]))
        trial.set_constraint("allowed", 0.0 if evaluation.feasible[0] else 1.0)
        value = float(evaluation.score[0])
        if evaluation.feasible[0] and value > highest:
            best, highest = SearchResult(space, space.settings(columns, 0), evaluation.at(0), 0, None, ""), value
        return value

    sample_points(spaces, score, num_trials=num_trials)
    found = best or SearchResult(None, None, {}, 0, None, "")
    evaluations = sum(space.evaluations for space in spaces)
    return replace(found, method="optuna", evaluations=evaluations, bound="none: sampled points prove no bound")
