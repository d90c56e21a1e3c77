"""Choose what to measure next, and update what is believed by each measurement."""

from __future__ import annotations

from dataclasses import replace

from xscheduler.tuning.belief import Belief, MeasuredRate, Standing
from xscheduler.tuning.model import EngineModel, MeasuredTimes
from xsimulator.fitted import Fit


class Tuner:
    def __init__(self, model: EngineModel, seed: int = 0) -> None:
        self.model = model
        self._lacking: list[int] = []
        self.belief: Belief = replace(model.belief(), seed=seed)

    def tell(self, found: MeasuredRate, *loads: MeasuredTimes | None) -> None:
        for load in loads:
            if load is not None:
                self.tell_times(load)
        self.belief = self.belief.measure(found)

    def tell_times(self, load: MeasuredTimes) -> None:
        self.belief = self.model.informed(self.belief, load)

    def tell_failed(self, candidate: int, *, for_memory: bool) -> None:
        """Add settings that do not start. For lack of memory, those that need no less do not start either.

        Memory is taken by tokens and by requests. If two token budgets fail, requests are the reason.
        """
        cut = {candidate}
        if for_memory:
            placement, settings = self.model.settings[candidate]
            failed = [self.model.settings[index][1] for index in self._lacking] + [settings]
            self._lacking.append(candidate)
            several = len({each.token_budget for each in failed}) > 1
            variant = self.model.variant[candidate]
            for index, (other, each) in enumerate(self.model.settings):
                is_larger = each.max_batch >= settings.max_batch and each.token_budget >= settings.token_budget
                is_alike = other == placement and self.model.variant[index] == variant
                if is_alike and (is_larger or (several and each.max_batch >= settings.max_batch)):
                    cut.add(index)
        self.belief = self.belief.exclude(cut)

    def standing(self) -> Standing:
        return self.belief.standing()

    @property
    def fit(self) -> Fit:
        return self.model.fitted(self.belief)
