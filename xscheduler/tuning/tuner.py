"""Choose what to measure next, and update what is believed by each measurement."""

from __future__ import annotations

from xscheduler.tuning.belief import Belief, MeasuredRate, Standing
from xscheduler.tuning.model import EngineModel, MeasuredTimes
from xsimulator.fitted import Fit


class Tuner:
    """The state of a search: a model of the engine and what is believed of its settings.

    Attributes:
        model: the engine's settings with their predictions.
        belief: what is believed after all measurements.
    """

    def __init__(self, model: EngineModel, seed: int = 0) -> None:
        self.model, self._seed = model, seed
        self.belief: Belief = model.belief()

    def tell(self, found: MeasuredRate, *loads: MeasuredTimes | None) -> None:
        """Add a measured rate, and the loads at which times were measured with the same settings."""
        for load in loads:
            if load is not None:
                self.belief = self.model.informed(self.belief, load)
        self.belief = self.belief.measure(found)

    def tell_failed(self, candidate: int, *, larger: bool) -> None:
        """Add settings that do not start. See `Belief.exclude`."""
        self.belief = self.belief.exclude(candidate, larger=larger)

    def verdict(self) -> Standing:
        """Return what is best so far, how sure that is, and what to measure next."""
        return self.belief.verdict(seed=self._seed)

    @property
    def fit(self) -> Fit:
        """The parameters that fit the measured loads."""
        return self.model.fitted(self.belief)
