"""Define the interface of an objective. It finds the plan with the highest value of a figure and proves its gap."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from xgpt.core.progress import Progress
from xgpt.core.schema import PlanDraft
from xscheduler.found import Found
from xscheduler.schedule import Scheduler

Schedule = TypeVar("Schedule", PlanDraft, Found)
Ranked = dict[str, list[tuple[Schedule, float]]]


TOGETHER = "none: requests that began together stay together, which closed forms do not model"
"""The reason why there is no proof if a simulation at saturation contradicts the closed form."""


class Objective(ABC, Generic[Schedule]):
    def __init__(
        self,
        scheduler: Scheduler,
        finish: Callable[[PlanDraft], PlanDraft] = lambda plan: plan,
        progress: Progress | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.finish = finish
        self.progress = progress

    @abstractmethod
    def rank(self, kinds: Sequence[str]) -> Ranked[Schedule]:
        """Return each policy's plans with the highest values in closed form.

        Raises:
            InfeasibleError: closed forms show that no plan keeps the constraint.
        """

    @abstractmethod
    def verify(self, ranked: Ranked[Schedule]) -> dict[str, Schedule]:
        """Return each policy's plan with the highest value in simulation.

        Raises:
            InfeasibleError: no plan keeps the constraint.
        """

    @abstractmethod
    def certify(self, plans: dict[str, Schedule]) -> dict[str, Found]:
        """Return the plans with what is proven about their question, the highest value first.

        Raises:
            InfeasibleError: no plan sustains the requested arrival rate.
        """

    def settle(self, kinds: Sequence[str]) -> dict[str, Found]:
        return self.certify(self.verify(self.rank(kinds)))


def simulating(what: str) -> str:
    from xsimulator.counts.counted_run import is_compiled

    once = "" if is_compiled() else " (compiled once on each machine, in about 15 s)"
    return f"simulating {what}{once}"
