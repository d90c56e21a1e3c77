"""Search for the highest arrival rate with Optuna, for problems without a valid bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from xgpt.core.schema import Constraint, PolicySettings
from xscheduler.arrival_rate import Rated, closed_rate
from xscheduler.space import Space

if TYPE_CHECKING:
    import optuna

NUM_TRIALS = 150
MOST_RETURNED = 4
BOUND = "none: sampled settings prove no bound"


def sampled(
    spaces: Sequence[Space], constraint: Constraint, *, num_trials: int = NUM_TRIALS, seed: int = 0
) -> list[Rated]:
    """Return the sampled settings with the highest arrival rates in closed form, the highest first."""
    import optuna  # takes half a second to load: only if used

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    found: dict[tuple[int, PolicySettings], float] = {}

    def objective(trial: optuna.Trial) -> float:
        number = trial.suggest_categorical("space", range(len(spaces)))
        space = spaces[number]
        columns = {}
        for axis in space.axes:
            # On a logarithmic scale, since small batches differ more from each other.
            index = trial.suggest_int(f"{space.kind} {axis.variable.name}", 1, len(axis.values), log=True) - 1
            columns[axis.variable.name] = np.asarray([axis.values[index]])
        if not space.evaluate(columns).fits[0]:
            return 0.0
        settings = space.settings(columns, 0)
        found[number, settings] = rate = closed_rate(space, settings, constraint)
        return rate

    sampler = optuna.samplers.TPESampler(seed=seed)
    optuna.create_study(direction="maximize", sampler=sampler).optimize(objective, n_trials=num_trials)
    rated = [Rated(rate, spaces[number], settings) for (number, settings), rate in found.items() if rate > 0]
    return sorted(rated, key=lambda one: -one.rate)[:MOST_RETURNED]
