"""Search for the highest arrival rate with Optuna, for problems without a valid bound."""

from __future__ import annotations

from collections.abc import Sequence

from xgpt.core.schema import PolicySettings
from xscheduler.arrival_rate import Rated, closed_rate
from xscheduler.search.optuna_search import sample_points
from xscheduler.space import Space
from xsimulator.forecast.base import Ints

NUM_TRIALS = 150
MOST_RETURNED = 4
BOUND = "none: sampled settings prove no bound"


def sampled(spaces: Sequence[Space]) -> list[Rated]:
    """Return the sampled settings with the highest arrival rates in closed form, the highest first."""
    found: dict[tuple[int, PolicySettings], float] = {}

    def score(_: object, number: int, columns: dict[str, Ints]) -> float:
        space = spaces[number]
        if not space.evaluate(columns).fits[0]:
            return 0.0
        settings = space.settings(columns, 0)
        found[number, settings] = rate = closed_rate(space, settings)
        return rate

    sample_points(spaces, score, num_trials=NUM_TRIALS)
    rated = [Rated(rate, spaces[number], settings) for (number, settings), rate in found.items() if rate > 0]
    return sorted(rated, key=lambda one: -one.rate)[:MOST_RETURNED]
