"""What the planner, the queue and re-planning ask of a policy: its forecast, one object for each.

A forecast keeps nothing. What it reads is a model: the steps of a placement's lanes under one workload
(`one_lane.OneLaneModel`, `two_lanes.TwoLaneModel`), which policies on the same lanes share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from xgpt.schema import PolicySettings
from xsimulator.curves import Array
from xsimulator.forecast.performance import Performance

Columns = Mapping[str, Array]
"""Candidates: a column of values for each control variable, and for micro-batches."""
M = TypeVar("M")


class Forecast(ABC, Generic[M]):
    """One policy.

    Attributes:
        settings: its settings, which declare its control variables.
        model: makes what predictions read, from the lanes' costs (`LaneCost`), the lengths, the quantile and
            `all_requests`.
    """

    settings: ClassVar[type[Any]]
    model: ClassVar[Callable[..., Any]]

    def evaluate(self, model: M, **columns: npt.ArrayLike) -> Performance:
        """Predict candidates; `columns` are control variables, one entry a candidate. Micro-batches not named are 1."""
        return self.predict(model, {name: np.atleast_1d(np.asarray(of, float)) for name, of in columns.items()})

    @abstractmethod
    def predict(self, model: M, columns: Columns) -> Performance:
        """Predict candidates at saturation, one of them for each entry of the columns."""

    def estimate(self, model: M, settings: PolicySettings) -> dict[str, float]:
        """Predict one plan's settings."""
        searched = {variable.name for variable in settings.variables}
        columns = {name: of for name, of in vars(settings).items() if name in searched or "microbatches" in name}
        return self.evaluate(model, **columns).at(0)


def column(columns: Columns, name: str) -> Array:
    """A column, of ones where it is not named."""
    found = columns.get(name)
    return np.ones(len(next(iter(columns.values())))) if found is None else found
